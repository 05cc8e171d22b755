"""The client of MLflow, against a real server: sending twice changes nothing, nor does a sender that was overtaken."""

import math
import sqlite3
import sys
import uuid
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from vitline.infra.mlflow.entities import DatasetUse, Model, Point
from vitline.infra.mlflow.tracking import CANDIDATE, CANDIDATE_BY, MAX_POINTS_PER_KEY, Tracking, downsampled
from vitline.infra.mlflow.tracking_ids import IdsChanged, TrackingIds
from vitline.infra.storage import open_store


@pytest.fixture
def uri(stack) -> str:
    return stack.env["MLFLOW_TRACKING_URI"]


@pytest.fixture
def client(uri) -> MlflowClient:
    return MlflowClient(uri, uri)


@pytest.fixture
def tracking(uri) -> Tracking:
    return Tracking(uri)


@pytest.fixture
def rows(stack):
    """rows(query, *values): rows of MLflow's own database."""

    def ask(query, *values):
        with sqlite3.connect(f"file:{stack.directory}/mlflow/mlflow.db?mode=ro", uri=True, timeout=60) as database:
            return database.execute(query, values).fetchall()

    return ask


@pytest.fixture
def start(tracking, root):
    """start(): an MLflow run, by default of a new run key, with its tracking ids and its run key."""

    def make(key=None, where=tracking):
        key = key or f"k-{uuid.uuid4().hex[:12]}"
        store = open_store(root).child(f"runs/{key}")
        ids = TrackingIds(store, where.uri)
        return where.run(ids, "vitline/test", key, store.uri, 1_700_000_000_000, {}), ids, key

    return make


def test_run_with_an_unknown_id_is_found_by_its_key_and_old_model_ids_are_dropped(start, root, tracking):
    run, _, key = start()
    other = TrackingIds(open_store(root).child("other"), tracking.uri)
    other.save({"run": "0" * 32, "url": "nowhere"})
    other.save({"model 0123": "m-gone"})
    store_uri = open_store(root).child(f"runs/{key}").uri
    found = tracking.run(other, "vitline/test", key, store_uri, 0, {})
    assert found is not None
    assert found.run_id == run.run_id
    assert other.read() == {"run": run.run_id, "url": run.url}
    another = tracking.run(TrackingIds(open_store(root), tracking.uri), "vitline/test", key, "file:///else", 0, {})
    assert another is not None
    assert another.run_id != run.run_id  # another root with the same recipe and corpus


def test_deleted_run_is_not_recreated(start, client):
    run, _, key = start()
    client.delete_run(run.run_id)
    assert start(key)[0] is None


def test_times_and_status_of_a_run_come_from_the_store(start, tracking, client):
    run, _, key = start()
    for status, end_ms in (("KILLED", 1_700_000_050_000), ("RUNNING", None), ("FINISHED", 1_700_000_100_000)):
        tracking.put_status(run, status, end_ms)
        again = start(key)[0]
        tracking.put_status(again, status, end_ms)
        assert client.get_run(run.run_id).info.status == status
    info = client.get_run(run.run_id).info
    assert (info.start_time, info.end_time) == (1_700_000_000_000, 1_700_000_100_000)


def test_changed_params_become_tags_and_long_params_are_truncated(start, tracking, client):
    run, _, key = start()
    tracking.put_params(run, {"seed": 0, "tasks": "x" * 9000})
    tracking.put_params(start(key)[0], {"seed": 1, "tasks": "x" * 9000, "new": None})
    data = client.get_run(run.run_id).data
    assert data.params["seed"] == "0"
    assert data.tags["vitline.param.seed"] == "1"
    assert "vitline.param.tasks" not in data.tags
    assert len(data.params["tasks"]) == 500


def test_sending_points_again_changes_nothing_even_for_nan(start, tracking, rows):
    run, _, _ = start()
    values = [0.5, math.nan, math.inf, -math.inf]
    points = [Point("train/loss", value, step, 1_700_000_000_000 + step) for step, value in enumerate(values * 600)]
    for _ in range(2):
        tracking.log_points(run, points)
    tracking.put_points_once(run, [Point("train/loss", 9.0, 3, 5), Point("train/loss", 9.0, 5_000, 5)])
    found = rows("select step, timestamp, value, is_nan from metrics where run_uuid = ? order by step", run.run_id)
    assert len(found) == len(points) + 1
    largest, at = sys.float_info.max, 1_700_000_000_000
    assert found[:4] == [(0, at, 0.5, 0), (1, at + 1, 0.0, 1), (2, at + 2, largest, 0), (3, at + 3, -largest, 0)]
    assert found[-1] == (5_000, 5, 9.0, 0)


def test_corpora_are_logged_as_dataset_inputs_with_digest_and_context(start, tracking, client):
    run, _, _ = start()
    names = {"c": "train", "c/val": "val"}
    uses = [
        DatasetUse(name, "ab" * 32, "s3://u:secret@b/c", context, {"num_rows": 5}) for name, context in names.items()
    ]
    for _ in range(2):
        tracking.put_data(run, uses)
    inputs = client.get_run(run.run_id).inputs.dataset_inputs
    found = {i.dataset.name: {tag.key: tag.value for tag in i.tags} for i in inputs}
    assert found == {
        name: {"mlflow.data.context": use, "vitline.corpus_digest": "ab" * 32} for name, use in names.items()
    }
    assert len(inputs) == 2
    assert {i.dataset.source for i in inputs} == {'{"uri": "s3://b/c"}'}
    assert {i.dataset.digest for i in inputs} == {"ab" * 18}


def model(name: str, finished_at: float, digest: str) -> Model:
    return Model(
        name=name,
        version="v",
        uri="s3://b/models/x/v",
        digest=digest,
        finished_at=finished_at,
        step=20,
        tags={"vitline.model_digest": digest},
        params={"depth": "2"},
        points=[Point("val/top1", 0.5, 20, 1_700_000_000_000)],
        files={"pointer.json": b"{}"},
        summary="summary",
    )


def test_candidate_alias_points_to_the_model_that_finished_last_in_any_sending_order(start, tracking, client):
    name, versions = f"m-{uuid.uuid4().hex[:8]}", {}
    for finished_at in (200.0, 300.0, 100.0):
        run, ids, _ = start()
        published = model(name, finished_at, uuid.uuid4().hex * 2)
        refs = {tracking.publish(run, ids, published) for _ in range(2)}
        assert len(refs) == 1
        versions[finished_at] = refs.pop().version
        assert client.get_model_version_by_alias(name, CANDIDATE).version == str(versions[max(versions)])
    found = client.search_model_versions(f"name = '{name}'")
    assert len(found) == 3
    # The reason is in the description of the candidate only, and there once.
    descriptions = {v.version: (v.description, v.tags.get(CANDIDATE_BY)) for v in found}
    assert descriptions.pop(versions[300.0])[0].count("because its training ended last") == 1
    assert set(descriptions.values()) == {("summary", None)}


def test_a_repeated_post_creates_one_run_model_and_version(start, tracking, client, monkeypatch):
    """As a client repeats it that a slow server has not answered."""
    for call in ("create_run", "create_logged_model", "create_model_version"):
        post = getattr(tracking._client, call)
        monkeypatch.setattr(tracking._client, call, lambda *a, post=post, **k: [post(*a, **k) for _ in range(2)][1])
    run, ids, key = start()
    name, digest = f"m-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    published = tracking.publish(run, ids, model(name, 1.0, digest))
    (version,) = client.search_model_versions(f"name = '{name}'")
    assert (str(version.version), version.source) == (published.version, f"models:/{published.model_id}")
    (found,) = client.search_runs([run.experiment_id], f"tags.`vitline.run_key` = '{key}'")
    assert found.info.run_id == run.run_id
    (logged,) = client.search_logged_models([run.experiment_id], f"tags.`vitline.model_digest` = '{digest}'")
    assert logged.model_id == published.model_id


@pytest.mark.parametrize("call", ["create_run", "create_logged_model", "create_model_version"])
def test_what_a_sender_creates_after_another_has_overtaken_it_is_deleted(
    uri, start, tracking, client, monkeypatch, call
):
    name, digest, key = f"m-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex, f"k-{uuid.uuid4().hex[:12]}"
    if call != "create_run":
        start(key)

    def publish(where):
        run, ids, _ = start(key, where)
        return where.publish(run, ids, model(name, 1.0, digest))

    create, others = getattr(tracking._client, call), []

    def overtaken(*args, **named):
        others.append(publish(Tracking(uri)))
        return create(*args, **named)

    monkeypatch.setattr(tracking._client, call, overtaken)
    with pytest.raises(IdsChanged):
        publish(tracking)
    assert publish(tracking) == others[0]
    (version,) = client.search_model_versions(f"name = '{name}'")
    assert (str(version.version), version.source) == (others[0].version, f"models:/{others[0].model_id}")
    assert client.get_model_version_by_alias(name, CANDIDATE).version == version.version
    experiment = client.get_experiment_by_name("vitline/test").experiment_id
    assert len(client.search_runs([experiment], f"tags.`vitline.run_key` = '{key}'")) == 1
    (logged,) = client.search_logged_models([experiment], f"tags.`vitline.model_digest` = '{digest}'")
    assert (logged.model_id, str(logged.status)) == (others[0].model_id, "READY")
    assert [(m.key, m.value, m.step) for m in logged.metrics] == [("val/top1", 0.5, 20)]


@given(st.integers(1, 10_000_000), st.integers(1, 5_000), st.lists(st.integers(0, 400), max_size=5))
def test_thinned_curves_are_bounded_keep_both_ends_and_do_not_depend_on_batches(total, every, cuts):
    every = max(every, total // 20_000 + 1)
    steps = sorted({*range(0, total, every), total})
    points = [Point("a", 0.0, step, 0) for step in steps]
    kept = downsampled(points, {}, total)
    assert len(kept) <= MAX_POINTS_PER_KEY
    assert {kept[0].step, kept[-1].step} == {0, total}
    assert max(b.step - a.step for a, b in pairwise(kept)) <= every + 2 * (total // 1_000 + 1)
    assert len(kept) == len(points) or total > MAX_POINTS_PER_KEY - 2
    seen, parts = {}, [0, *sorted(cut * len(points) // 400 for cut in cuts), len(points)]
    assert kept == [p for a, b in pairwise(parts) for p in downsampled(points[a:b], seen, total)]
