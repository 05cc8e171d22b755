"""Weights of models that collect-garbage deletes, and which ones it keeps."""

import json
import time
import uuid

import pytest

from vitline.flows.ops import garbage
from vitline.flows.ops.collect_garbage import DAY_S
from vitline.infra.storage import open_store

from .old_runs import WEEKS, actions, checkpointed, moved


def publication(root, version, ago=WEEKS, run_key=None, committed=None, marked=True):
    """A publication in the folder `0123456789ab` that was interrupted `ago` seconds ago; `committed` is what config.json names."""
    model = open_store(root).child(f"models/birds/{version}")
    model.write("0123456789ab/model.safetensors", b"weights")
    model.write("0123456789ab/classes.json", b"{}")
    if marked:
        at = {"schema_version": 1, "at": time.time() - ago, "run_key": run_key}
        model.write_json("0123456789ab/publishing.json", at)
    if committed:
        model.write_json("config.json", {"schema_version": 2, "weights": f"{committed}/model.safetensors"})
    return model


def test_weights_of_publications_that_never_committed_go(root, collect):
    model = publication(root, "1", run_key="birds-0123456789ab", committed="ba9876543210")
    model.write("ba9876543210/model.safetensors", b"weights")
    of_no_run, young = publication(root, "2"), publication(root, "3", ago=DAY_S)
    lost = "its publication was begun 20"
    findings = collect(dry_run=True)
    assert [finding.subject for finding in findings] == ["model birds/1/0123456789ab", "model birds/2/0123456789ab"]
    assert all(finding.problem.startswith(lost) and "never committed" in finding.problem for finding in findings)
    assert [finding.action for finding in collect()] == ["deleted, 3 objects"] * 2
    assert model.list() == ["ba9876543210/model.safetensors", "config.json"]
    assert (of_no_run.list(), len(young.list())) == ([], 3)


def test_marker_of_a_publication_goes_last(root, collect, monkeypatch):
    """A collection that is killed leaves what tells the next one that this is garbage."""
    model, deleted = publication(root, "1"), []
    delete = type(model).delete
    monkeypatch.setattr(type(model), "delete", lambda store, key: (deleted.append(key), delete(store, key)))
    collect()
    assert deleted[-1] == "0123456789ab/publishing.json"


def test_published_weights_and_those_of_a_run_that_lives_stay(root, collect):
    """Those that a commit names lose only the marker that a kill right after the commit has left."""
    model = publication(root, "1", committed="0123456789ab")
    run = checkpointed(root, "birds-0123456789ab", "failed", ago=DAY_S)
    living = publication(root, "2", run_key="birds-0123456789ab")
    assert actions(collect()) == {"model birds/1/0123456789ab": "deleted"}
    assert model.list() == ["0123456789ab/classes.json", "0123456789ab/model.safetensors", "config.json"]
    assert len(living.list()) == 3
    run.write("lease.json", b"{")
    assert set(actions(collect()).values()) == {"kept: nothing says that it is garbage"}
    assert len(living.list()) == 3


def test_publication_that_goes_on_after_it_was_listed_stays(root, collect, monkeypatch):
    model, daily = publication(root, "1"), {"notice_days": 6.5}
    assert actions(collect(**daily)) == {"model birds/1/0123456789ab": "listed; deleted"}
    moved(monkeypatch, 7)
    model.write_json("0123456789ab/publishing.json", {"schema_version": 1, "at": 1.0, "run_key": None})
    assert actions(collect(**daily)) == {"model birds/1/0123456789ab": "listed; deleted"}  # by a clock of 1970
    moved(monkeypatch, 14)
    real = garbage.publication_life
    monkeypatch.setattr(garbage, "publication_life", lambda *at: [real(*at), uuid.uuid4().hex])
    assert actions(collect()) == {"model birds/1/0123456789ab": "kept: it has changed meanwhile"}
    assert len(model.list()) == 3


@pytest.mark.parametrize("unreadable", [{"marked": False}, b"{}", b"[]", b'{"at": "soon"}', "config"])
def test_weights_that_nothing_calls_garbage_are_named_and_stay(root, collect, unreadable):
    """As those that an older version of vitline left, which wrote no marker."""
    model = publication(root, "1", **(unreadable if isinstance(unreadable, dict) else {}))
    if isinstance(unreadable, bytes):
        model.write("0123456789ab/publishing.json", unreadable)
    if unreadable == "config":  # of a newer version: it may name its weights otherwise
        model.write_json("config.json", {"schema_version": 9})
    before = model.list()
    (finding,) = collect()
    assert finding.subject.startswith("model birds/1")
    assert finding.action == "kept: nothing says that it is garbage"
    assert model.list() == before


def kept_model(root, name, ago=WEEKS, **provenance):
    """A model of two files, published `ago` seconds ago."""
    model = open_store(root).child(f"models/{name}")
    model.write("0123456789ab/model.safetensors", b"weights")
    model.write_json("config.json", {
        "schema_version": 2, "weights": "0123456789ab/model.safetensors", "created_at": time.time() - ago,
        "provenance": provenance,
    })  # fmt: skip
    return model


def test_models_of_evaluations_go_only_where_their_age_is_given_and_no_run_reads_them(root, collect, monkeypatch):
    old = kept_model(root, "birds-digits/1", trial="digits-final-1")
    young = kept_model(root, "birds-digits/2", ago=DAY_S, trial="digits-final-2")
    trained = kept_model(root, "birds/1", run_key="birds-0123456789ab")
    readers = {"a": {"models": [None]}, "b": {"model": ""}, "c": {"config": {"init_model": ""}}}
    in_use = {key: kept_model(root, f"birds-digits/{key}", trial=f"digits-final-{key}") for key in readers}
    for (key, config), model in zip(readers.items(), in_use.values(), strict=True):
        run = checkpointed(root, f"{key}-0123456789ab", "preempted", ago=DAY_S)
        run.write("config.json", json.dumps(config).replace("null", '""').replace('""', f'"{model.uri}"').encode())
    before = open_store(root).list("models/")
    assert collect() == []
    deleted, delete = [], type(old).delete
    monkeypatch.setattr(type(old), "delete", lambda store, key: (deleted.append(key), delete(store, key)))
    assert actions(collect(kept_models_days=7, keep=["birds-digits/1"])) == {
        "model birds-digits/1": "kept: `keep` names it"
    }
    assert open_store(root).list("models/") == before
    (finding,) = collect(kept_models_days=7)
    assert (finding.subject, finding.action) == ("model birds-digits/1", "deleted, 2 objects")
    assert finding.problem.startswith("the network of trial digits-final-1, published 20")
    assert deleted == ["0123456789ab/model.safetensors", "config.json"]
    assert [len(model.list()) for model in (old, young, trained, *in_use.values())] == [0, 2, 2, 2, 2, 2]
    open_store(root).write("runs/a-0123456789ab/config.json", b"{")  # what it reads is not known
    assert "model birds-digits/2" not in actions(collect(kept_models_days=0))
    assert young.exists("config.json")
