"""One record that cannot be read is shown and stops no list and no search (infra/README.md)."""

import re
from pathlib import Path

import pytest

from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.catalog import lists
from vitline.flows.catalog.snapshot import RootSnapshot
from vitline.flows.reports.score_report import read_report
from vitline.infra.records import UnreadableRecord
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store

ODD = [b"{}", b"[]", b"null", b"{", b'{"schema_version": 99}', b"[" * 100_000]
CORPUS = {
    "schema_version": 2,
    "name": "birds",
    "version": "0123",
    "digest": "d",
    "class_map_digest": "m",
    "num_classes": 2,
    "order_seed": 0,
    "single_label": True,
    "splits": {},
    "decode_policy": {},
    "counts": {"num_found": 1, "num_accepted": 1, "num_refused": 0, "num_bytes": 1, "refused": {}},
    "provenance": {},
}
MODEL = {"digest": "d", "num_classes": 10, "model": {"image_size_px": 28}, "provenance": {}, "created_at": 1.0}


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.mark.parametrize("unreadable", ODD)
def test_models_are_listed_and_found_beside_one_that_cannot_be_read(store, root, unreadable, capsys):
    store.write_json("models/birds/0123/config.json", MODEL | {"licence": "of a newer version"})
    store.write("models/birds/4567/config.json", unreadable)
    assert [row["version"] for row in lists.list_models(root)] == ["0123"]
    assert "models/birds/4567/config.json is not a record that this version" in "".join(
        capsys.readouterr().err.split("\n")
    )
    assert lists.find_model(root, "birds") == store.uri_of("models/birds/0123")
    assert lists.find_model(root, "birds/4567") == store.uri_of("models/birds/4567")  # loading it says what is wrong


def two_runs(store):
    """Two runs that have finished; the second, in which a record cannot be read."""
    for key in ("owls-0123456789ab", "odd-0123456789ab"):
        run = store.child(f"runs/{key}")
        run.write_json("config.json", {"run_key": key, "config": {"stage": "pretrain"}})
        acquire_lease(run, key, job_state=lambda job: "failed", owner="someone")
        write_state(run, "finished", 1)
    return run


@pytest.mark.parametrize("unreadable", [*ODD, b'{"state": "melted", "attempt": 1, "updated_at": 0}'])
@pytest.mark.parametrize("record", ["state.json", "reconciled.json", "stop.json", "lease.json"])
def test_a_snapshot_has_all_runs_but_one_that_cannot_be_read(store, record, unreadable):
    run = two_runs(store)
    run.write(record, unreadable)
    with RootSnapshot.read(store, leases=True) as snapshot:
        assert snapshot.runs["owls-0123456789ab"].ended
    assert len(snapshot.runs) + len(snapshot.unreadable) == 2
    if unreadable != b"null" or record == "lease.json":
        (found,) = snapshot.unreadable
        assert (found.kind, found.key) == ("run", "odd-0123456789ab")
        assert str(found.error).startswith(f"{run.uri}/{record} is not a record that this version of vitline reads: ")


@pytest.mark.parametrize(
    ("record", "unreadable"), [("state.json", b"{}"), *(("config.json", unreadable) for unreadable in ODD)]
)
def test_runs_are_listed_with_one_that_cannot_be_read(store, root, record, unreadable):
    two_runs(store).write(record, unreadable)
    listed = {row["run"]: row for row in lists.list_runs_and_pipelines(root)}
    assert listed["owls-0123456789ab"]["state"] == "finished"
    assert listed["odd-0123456789ab"]["state"] == "unreadable"
    assert "is not a record that this version of vitline reads" in listed["odd-0123456789ab"]["reason"]


@pytest.mark.parametrize("unreadable", ODD)
def test_corpora_and_pipelines_that_cannot_be_read_are_named(store, root, unreadable, capsys):
    store.write("corpora/birds/0123/manifest.json", unreadable)
    store.write("pipelines/nightly-0123456789ab.json", unreadable)
    assert lists.list_corpora(root) == lists.list_pipelines(root) == []
    shown = "".join(capsys.readouterr().err.split("\n"))
    assert "corpora/birds/0123/manifest.json" in shown
    assert "pipelines/nightly-0123456789ab.json" in shown
    with pytest.raises(ValueError, match=r"no corpus 'birds' .* Not read: .*corpora/birds/0123/manifest\.json"):
        Corpora(open_store(root)).named("birds")


def test_what_is_listed_and_cannot_be_opened_is_named_and_stops_no_list(store, root, capsys):
    """Such as a link to a device or to nothing. `data ls` and `evaluate report` begin with the list of corpora."""
    store.write_json("corpora/birds/0123/manifest.json", CORPUS)
    store.write_json("models/birds/0123/config.json", MODEL)
    folder = Path(root.removeprefix("file://"))
    for number, target in enumerate(("/dev/zero", "nowhere", ".")):
        for name in ("corpora/odd/{}/manifest.json", "models/odd/{}/config.json", "pipelines/{}.json"):
            path = folder / name.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
    assert [row["name"] for row in lists.list_corpora(root)] == ["birds"]
    assert [row["name"] for row in lists.list_models(root)] == ["birds"]
    assert lists.list_pipelines(root) == []
    shown = "".join(capsys.readouterr().err.split("\n"))
    for name in ("corpora/odd/0", "models/odd/0/config.json", "pipelines/0.json"):
        assert name in shown
    assert read_report(root).coverage


def test_corpus_with_a_field_of_a_newer_version_is_not_called_damaged(store):
    store.write_json("corpora/birds/0123/manifest.json", CORPUS | {"decode_policy": {"tone_map": 1}})
    with pytest.raises(UnreadableRecord) as refused:
        load_manifest(store.child("corpora/birds/0123"))
    text = str(refused.value)
    assert re.fullmatch(
        r".*/corpora/birds/0123/manifest\.json is not a record that this version of vitline reads: decode_policy\.tone_map: "
        r"there is no such field\. Use the version that wrote it, or move the object away\.",
        text,
    )


@pytest.mark.parametrize("created_at", [5, None, ["2026"], {}])
def test_a_time_of_another_kind_stops_no_list(store, root, created_at):
    for version, at in (("0123", "2026-01-01T00:00:00+00:00"), ("4567", created_at)):
        record = CORPUS | {"version": version, "provenance": {"created_at": at}}
        store.write_json(f"corpora/birds/{version}/manifest.json", record)
    for version, at in (("0123", 1.0), ("4567", str(created_at))):
        store.write_json(f"models/birds/{version}/config.json", MODEL | {"created_at": at})
    assert "0123" in [row["version"] for row in lists.list_corpora(root)]
    assert "0123" in [row["version"] for row in lists.list_models(root)]
