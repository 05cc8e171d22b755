"""What collect-garbage deletes, and above all what it keeps."""

import json
import os
import re
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from vitline.data_prep.examples import presets
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.flows.catalog.snapshot import StoredRun
from vitline.flows.forms.forms import CollectGarbageRequest
from vitline.flows.ops import collect_garbage as collecting
from vitline.flows.ops.collect_garbage import DAY_S, FOLDERS
from vitline.flows.to_mlflow import outbox
from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import list_checkpoints

from .old_runs import MONTHS, WEEKS, actions, checkpointed, moved


@pytest.mark.parametrize("unreadable", [b"{}", b"[]", b"{"])
def test_what_cannot_be_read_is_kept_and_named_and_stops_no_other(root, collect, unreadable):
    store = open_store(root)
    checkpointed(root, "birds-0123456789ab")
    checkpointed(root, "odd-0123456789ab").write("state.json", unreadable)
    for key in ("corpora/birds/0123/manifest.json", "features/0123456789ab/test.json", "flow-runs/0198.json"):
        store.write(key, unreadable)
    store.write("corpora/birds/0123/_work/listing.json", b"{}")
    kept = store.list("corpora/") + store.list("features/") + store.list("flow-runs/") + store.list("runs/odd")
    findings = {finding.subject: finding.action for finding in collect()}
    assert findings.pop("run birds-0123456789ab") == "deleted, 7 objects"
    named = {"run odd-0123456789ab", "corpus birds/0123", "features/0123456789ab", "flow run 0198"}
    assert findings == dict.fromkeys(named, "kept: nothing says that it is garbage")
    assert store.list("corpora/") + store.list("features/") + store.list("flow-runs/") + store.list("runs/odd") == kept


def test_finished_runs_keep_their_newest_checkpoints(root, collect):
    run = checkpointed(root, "birds-0123456789ab")
    (finding,) = collect()
    assert finding.subject == "run birds-0123456789ab"
    assert finding.action == "deleted, 7 objects"
    assert list_checkpoints(run) == ["checkpoints/step-000000020-a10"]
    assert run.list("checkpoints/") == [
        "checkpoints/step-000000020-a10/manifest.json",
        "checkpoints/step-000000020-a10/rank-00000-of-00001.safetensors",
    ]
    assert collect() == []
    assert len(collect(keep_checkpoints=0)) == 1
    assert run.list("checkpoints/") == []


@pytest.mark.parametrize("state", ["finished", "preempted"])
def test_lasting_checkpoints_are_never_collected(root, collect, state):
    run, permanent = checkpointed(root, "birds-0123456789ab", state), "checkpoints/step-000000010-a1"
    run.write_json(f"{permanent}/permanent.json", {"images_seen": 160})
    (finding,) = collect(keep_checkpoints=0, unfinished_days=1)
    assert "1 permanent checkpoints are kept" in finding.problem
    assert list_checkpoints(run) == [permanent]
    assert collect(keep_checkpoints=0, unfinished_days=1) == []
    run.delete(f"{permanent}/permanent.json")
    collect(keep_checkpoints=0, unfinished_days=1)
    assert run.list("checkpoints/") == []


def test_checkpoints_marked_as_damaged_do_not_count_as_kept(root, collect):
    run = checkpointed(root, "birds-0123456789ab")
    newest, older = "checkpoints/step-000000020-a10", "checkpoints/step-000000010-a1"
    for name in ("step-000000020-a10", "step-000000020-a2", "step-000000020-a1"):
        run.write_json(f"checkpoints/{name}/rejected.json", {"reason": "a byte differs"})
    collect(keep_checkpoints=2)
    assert {key.rpartition("/")[0] for key in run.list("checkpoints/")} == {newest, older}
    run.write_json(f"{older}/rejected.json", {"reason": "a byte differs"})
    collect()  # nothing else is left: what may be read again one day stays
    assert {key.rpartition("/")[0] for key in run.list("checkpoints/")} == {newest}


@pytest.mark.parametrize(
    "run",
    [
        {"state": "running"},
        {"state": "failed"},  # the same request resumes these
        {"state": "preempted"},
        {"ago": DAY_S},
        {"attempts": 2},  # run again because its model was deleted: the new attempt resumes from them
    ],
)
def test_checkpoints_that_a_run_may_resume_from_are_kept(root, collect, run):
    store = checkpointed(root, "birds-0123456789ab", **run)
    before = store.list()
    assert collect() == []
    assert store.list() == before


def test_a_dry_run_is_the_default_and_deletes_nothing(root, collect):
    checkpointed(root, "birds-0123456789ab")
    store = open_store(root)
    before = store.list()
    assert CollectGarbageRequest().dry_run
    assert [finding.action for finding in collect(dry_run=True)] == ["would be: deleted, 7 objects"]
    assert store.list() == before


@pytest.mark.slow
def test_work_files_of_published_corpora_are_deleted_and_the_corpus_stays_intact(root, collect):
    (manifest,) = prepare([presets.digits()], root)
    store = open_store(root)
    corpus = store.child(f"corpora/{manifest.name}/{manifest.version}")
    store.write("corpora/other/1/_work/progress.json", b"{}")  # not published: its preparation may still resume
    assert collect() == []
    assert corpus.list("_work/") != []
    (finding,) = collect(older_than_days=0)
    assert finding.subject == f"corpus {manifest.name}/{manifest.version}"
    assert corpus.list("_work/") == []
    assert verify_corpus(corpus).problems == {}
    assert store.exists("corpora/other/1/_work/progress.json")
    assert prepare([presets.digits()], root)[0].digest == manifest.digest


def test_leftovers_of_killed_writers_are_deleted_once_they_are_a_day_old(root, collect):
    store = open_store(root)
    store.write("runs/a/x", b"whole")
    old, young = (Path(root, "runs/a", f".tmp-{name}") for name in ("old", "young"))
    for path, age in ((old, 2 * DAY_S), (young, DAY_S / 2)):
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age,) * 2)
    assert collect() == []
    assert [finding.action for finding in collect(older_than_days=0)] == ["deleted, 1 unfinished writes"]
    assert (old.exists(), young.exists(), store.list()) == (False, True, ["runs/a/x"])


def test_unfinished_writes_of_other_programs_stay(root, collect):
    store = open_store(root)
    store.write("runs/a/x", b"whole")
    ours, theirs = Path(root, "models/birds/.tmp-0f"), (Path(root, ".tmp-0f"), Path(root, "backups/.tmp-0f"))
    for path in (ours, *theirs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"part")
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    for dry_run in (True, False):
        (finding,) = collect(older_than_days=0, dry_run=dry_run)
        assert finding.action.endswith("deleted, 1 unfinished writes")
    assert (ours.exists(), *(path.exists() for path in theirs)) == (False, True, True)


@pytest.mark.s3
def test_uploads_of_others_in_a_bucket_that_is_the_root_go_on(s3_uri, collect, monkeypatch):
    """A day later, as far as the store can tell."""
    from vitline.infra.stores import s3_store

    bucket = f"vl-{uuid.uuid4().hex}"
    s3 = open_store(s3_uri)._client()
    s3.call_s3("create_bucket", Bucket=bucket)
    ours = "runs/birds-0123456789ab/checkpoints/step-000000010-a1/rank-00000-of-00001.safetensors"
    theirs = ["backups/runs/db.tar", "corpora-of-others/a", "database.tar", "models"]
    uploads = {
        key: s3.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"] for key in (ours, *theirs)
    }

    class InTwoDays(datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + timedelta(days=2)

    monkeypatch.setattr(s3_store, "datetime", InTwoDays)
    try:
        (finding,) = collect(root=f"s3://{bucket}", older_than_days=0)
        assert finding.action == "deleted, 1 unfinished writes"
        left = s3.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
        assert {upload["Key"]: upload["UploadId"] for upload in left} == {key: uploads[key] for key in theirs}
    finally:
        for key in theirs:
            s3.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=uploads[key])
        s3.call_s3("delete_bucket", Bucket=bucket)


def test_garbage_is_looked_for_in_every_folder_of_the_store_layout():
    design = Path(__file__).parents[3].joinpath("docs/design.md").read_text()
    layout = design.split("## Store layout")[1].split("## ")[0]
    assert sorted(FOLDERS) == sorted({*re.findall(r"^ +(?:<root>/)?([a-z-]+)/", layout, re.MULTILINE)})


def test_old_test_objects_and_heartbeats_of_killed_processes_are_deleted(root, collect):
    store = open_store(root)
    for ago in (WEEKS, 60):
        at = time.time() - ago
        store.write(f"doctor/{int(at * 1e9)}-0f3a", b"vitline")
        store.write_json(f"flow-runs/{ago:.0f}.json", {"heartbeat": at})
    store.write_json("leases/nightly-0123456789ab/lease.json", {"heartbeat": 0.0})
    assert [finding.subject for finding in collect()] == ["doctor/", "flow-runs/"]
    left = set(store.list())
    assert len(left) == 3
    assert left >= {"leases/nightly-0123456789ab/lease.json", "flow-runs/60.json"}


def test_features_of_deleted_models_and_corpora_are_deleted(root, collect):
    store, ago = open_store(root), time.time() - WEEKS
    for uri, key in (("models/bird/1", "config.json"), ("corpora/birds/1", "manifest.json")):
        store.write_json(f"{uri}/{key}", {})

    def keep(name, made_at=ago, model="models/bird/1", corpus="corpora/birds/1"):
        source = {"model": store.uri_of(model), "corpus": store.uri_of(corpus)}
        store.write_json(f"features/{name}/test.json", {"source": source, "made_at": made_at})
        store.write(f"features/{name}/test/00.safetensors", b"numbers")

    keep("in-use")
    keep("young", made_at=time.time(), model="models/gone/1")
    keep("of-no-model", model="models/gone/1")
    keep("of-no-corpus", corpus="corpora/gone/1")
    store.write("features/begun/test/00.safetensors", b"numbers")
    assert [finding.subject for finding in collect()] == ["features/of-no-corpus", "features/of-no-model"]
    assert {key.split("/")[1] for key in store.list("features/")} == {"in-use", "young", "begun"}


def test_scheduled_collections_delete_what_they_listed_a_week_before(root, collect, monkeypatch):
    run, daily, store = checkpointed(root, "birds-0123456789ab"), {"notice_days": 6.5}, open_store(root)
    store.write(f"doctor/{int((time.time() - WEEKS) * 1e9)}-0f3a", b"vitline")
    before = run.list()
    listed = {"run birds-0123456789ab": "listed; deleted"}
    assert actions(collect(**daily)) == listed | {"doctor/": "deleted"}
    assert actions(collect(dry_run=True, **daily)) == {"run birds-0123456789ab": "would be: deleted"}
    for day in (1, 3, 6):
        moved(monkeypatch, day)
        assert actions(collect(**daily)) == listed
        assert run.list() == before
    moved(monkeypatch, 7)
    assert actions(collect(keep=["birds-01"], **daily)) == {"run birds-0123456789ab": "kept: `keep` names it"}
    assert actions(collect(**daily)) == listed  # who has objected gets a week again
    moved(monkeypatch, 14)
    assert actions(collect(keep_checkpoints=0, **daily)) == listed  # nobody has seen that all would go
    moved(monkeypatch, 21)
    assert actions(collect(keep_checkpoints=0, **daily)) == {"run birds-0123456789ab": "deleted"}
    assert run.list("checkpoints/") == []
    assert collect(**daily) == []
    assert store.read_json("ops/garbage.json")["listed"] == []


def test_what_shows_life_after_it_was_listed_is_kept(root, collect, monkeypatch):
    run, daily = checkpointed(root, "birds-0123456789ab", "failed", MONTHS), {"notice_days": 6.5}
    assert actions(collect(**daily)) == {"run birds-0123456789ab": "listed; deleted"}
    moved(monkeypatch, 7)
    lease = acquire_lease(run, "birds-0123456789ab", job_state=lambda job: "failed", owner="someone")
    # A heartbeat whose clock is wrong by years does not look alive, but the counter of the lease has moved.
    run.write_json("lease.json", replace(lease, heartbeat=1.0).model_dump())
    assert actions(collect(**daily)) == {"run birds-0123456789ab": "listed; deleted"}
    real = StoredRun.life
    monkeypatch.setattr(StoredRun, "life", lambda run: [real(run), uuid.uuid4().hex])  # a heart that beats
    assert actions(collect()) == {"run birds-0123456789ab": "kept: it has changed meanwhile"}
    assert len(list_checkpoints(run)) == 4


def test_a_clock_that_was_ahead_deletes_nothing_unseen(root, collect, monkeypatch):
    checkpointed(root, "birds-0123456789ab")
    for days in (500, 0, 1):
        moved(monkeypatch, days)
        assert actions(collect(notice_days=6.5)) == {"run birds-0123456789ab": "listed; deleted"}
    open_store(root).write("ops/garbage.json", b"[1]")  # not to be read: everything is listed anew
    moved(monkeypatch, 30)
    assert actions(collect(notice_days=6.5)) == {"run birds-0123456789ab": "listed; deleted"}


@pytest.mark.parametrize("state", ["running", "failed", "preempted", "cancelled", "diverged", "out_of_time"])
def test_checkpoints_of_unfinished_runs_go_after_months_of_silence(root, collect, state):
    run = checkpointed(root, "birds-0123456789ab", state, MONTHS)
    run.write_json("checkpoints/step-000000040-a10-of-a-newer-version/manifest.json", {})
    younger = checkpointed(root, "younger-0123456789ab", state, 80 * DAY_S)
    before = younger.list()
    kept, deleted = collect()
    assert (kept.action, deleted.action) == ("kept: nothing says that it is garbage", "deleted, 9 objects")
    assert run.list("checkpoints/") == ["checkpoints/step-000000040-a10-of-a-newer-version/manifest.json"]
    assert {"lease.json", "state.json"} <= {*run.list()}
    assert younger.list() == before
    run.write_json("lease.json", {**run.read_json("lease.json"), "heartbeat": time.time()})
    run.write_json("checkpoints/step-000000010-a1/manifest.json", {})
    assert collect() == []  # it lives again
    assert run.exists("checkpoints/step-000000010-a1/manifest.json")


def test_preparations_that_came_to_no_end_leave_nothing_after_months(root, collect, monkeypatch):
    store = open_store(root)

    def stopped(name, ago):
        corpus = store.child(f"corpora/{name}/0123")
        spill = "_work/chunks-of-1/source/spill/0.bin"
        for key in (
            "_work/chunks-of-1/listing.json",
            "_work/chunks-of-1/records-0.parquet",
            spill,
            "train/s/part-0.parquet",
        ):
            corpus.write(key, b"{}")
        corpus.write_json("_work/progress.json", {"stage": "examine", "started_at": time.time() - ago})
        return corpus

    old, younger = stopped("old", MONTHS), stopped("younger", 80 * DAY_S)
    (finding,) = collect(notice_days=6.5)
    assert finding.action.startswith("listed; deleted after")
    moved(monkeypatch, 7)
    old.write_json("_work/progress.json", {**old.read_json("_work/progress.json"), "done": 7})
    assert actions(collect(notice_days=6.5)) == {"corpus old/0123": "listed; deleted"}  # somebody prepares it again
    moved(monkeypatch, 0)
    deleted = []
    delete = type(store).delete
    monkeypatch.setattr(type(store), "delete", lambda store, key: (deleted.append(key), delete(store, key)))
    assert actions(collect()) == {"corpus old/0123": "deleted"}
    assert (deleted[0], deleted[-1]) == ("_work/chunks-of-1/listing.json", "_work/progress.json")
    assert (len(old.list()), len(younger.list())) == (0, 5)


def test_of_two_collections_at_once_one_goes_on(root, collect, monkeypatch):
    checkpointed(root, "birds-0123456789ab")
    real = collecting.listed_before

    def overtaken(store, data):
        monkeypatch.setattr(collecting, "listed_before", real)
        collect(notice_days=6.5)
        return real(store, data)

    monkeypatch.setattr(collecting, "listed_before", overtaken)
    with pytest.raises(RuntimeError, match=r"Another collection has written .*ops/garbage.json.* Start this one again"):
        collect(notice_days=6.5)


def sealed(run, segments=3):
    """A journal of some segments; what a reader finds in it."""
    for number in range(segments):
        record = {"seq": number, "key": "train/loss", "value": 1.0, "step": number, "timestamp_ms": 5}
        run.write(f"journal/a1/segment-{number:06d}.jsonl", json.dumps(record).encode())
    return read_journal(run)


def test_journals_of_runs_that_ended_become_one_object(root, collect):
    old = {"a-0123456789ab": ("finished", WEEKS), "b-0123456789ab": ("preempted", MONTHS)}
    runs = {key: checkpointed(root, key, *end) for key, end in old.items()}
    kept = {
        "c-0123456789ab": checkpointed(root, "c-0123456789ab", ago=DAY_S),
        "d-0123456789ab": checkpointed(root, "d-0123456789ab", "running", WEEKS),
        "e-0123456789ab": checkpointed(root, "e-0123456789ab", "failed", 80 * DAY_S),
        "f-0123456789ab": checkpointed(root, "f-0123456789ab", attempts=2),
        "g-0123456789ab": checkpointed(root, "g-0123456789ab"),  # MLflow lacks something of it
    }
    outbox.put(open_store(root), outbox.OutboxEntry("run", "g-0123456789ab"))
    before = {key: sealed(run) for key, run in (runs | kept).items()}
    sealed(checkpointed(root, "h-0123456789ab"), segments=1)
    done = {finding.subject: finding.action for finding in collect(keep_checkpoints=9, notice_days=6.5)}
    journals = {subject: action for subject, action in done.items() if subject.startswith("journal")}
    assert journals == dict.fromkeys((f"journal of {key}" for key in old), "merged, 3 objects")
    for key, run in runs.items():
        assert run.list("journal/") == ["journal/merged-000000.jsonl"]
        assert read_journal(run) == before[key]
    for key, run in kept.items():
        assert len(run.list("journal/")) == 3
        assert read_journal(run) == before[key]
    assert not [finding for finding in collect(keep_checkpoints=9) if finding.subject.startswith("journal")]


def branched(root, branch, days):
    """The checkpoint of step 10 of a finished run, which was pinned for a branch so many days ago."""
    run, pinned = checkpointed(root, "birds-0123456789ab"), "checkpoints/step-000000010-a1"
    at = time.time() - days * DAY_S
    run.write_json(f"{pinned}/pinned-{branch}.json", {"schema_version": 1, "branch": branch, "at": at})
    return run, pinned


BRANCH = "branch-0123456789ab"


@pytest.mark.parametrize(("days", "kept"), [(80, True), (100, False)])
def test_a_checkpoint_stays_while_a_branch_may_begin_from_it(root, collect, days, kept):
    run, pinned = branched(root, BRANCH, days)
    (finding,) = collect()
    assert ("; 1 checkpoints are kept for branches" in finding.problem) == kept
    assert (pinned in list_checkpoints(run)) == kept
    assert not kept or collect() == []


@pytest.mark.parametrize("finished", [False, True])
def test_a_branch_at_work_keeps_its_parents_checkpoint_as_long_as_its_mark_is_there(root, collect, finished):
    run, pinned = branched(root, BRANCH, days=100)
    branch = open_store(root).child(f"runs/{BRANCH}")
    acquire_lease(branch, BRANCH, job_state=lambda job: None, owner="someone")
    branch.write_json(
        "checkpoints/step-000000011-a1/manifest.json", {}
    )  # it may go back to its parent's, by the spike guard
    if finished:
        write_state(branch, "finished", 1)
    collect()
    assert (pinned in list_checkpoints(run)) == (not finished)


def test_a_mark_of_a_branch_that_cannot_be_read_keeps_the_checkpoint(root, collect):
    run, pinned = branched(root, BRANCH, days=100)
    run.write(f"{pinned}/pinned-{BRANCH}.json", b"{")
    collect()
    assert pinned in list_checkpoints(run)


def test_a_checkpoint_that_is_pinned_after_it_was_listed_stays(root, collect, monkeypatch):
    run, pinned = branched(root, BRANCH, days=0)
    run.delete(f"{pinned}/pinned-{BRANCH}.json")
    treat = collecting.treat

    def pin_first(heap, *others):
        branched_again = {"schema_version": 1, "branch": BRANCH, "at": time.time()}
        run.write_json(f"{pinned}/pinned-{BRANCH}.json", branched_again)
        return treat(heap, *others)

    monkeypatch.setattr(collecting, "treat", pin_first)
    (finding,) = collect()
    assert finding.action == "kept: it has changed meanwhile"
    assert pinned in list_checkpoints(run)
