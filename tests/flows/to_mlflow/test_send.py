"""Runs in MLflow: what they show, and that no outage loses or duplicates data (flows/to_mlflow/README.md)."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from mlflow import MlflowClient

from vitline.flows.catalog.records import Origin, PipelineRecord, StageRecord, write_pipeline
from vitline.flows.to_mlflow import outbox, send
from vitline.flows.to_mlflow.child import SenderChild, sync_runs
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.infra.config import replace
from vitline.infra.local.stack import find_stack
from vitline.infra.runs.journal import Journal, read_journal
from vitline.infra.runs.lease import acquire_lease, held, job_id_of
from vitline.infra.runs.run_state import read_state, write_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World

from ...eventually import eventually
from ...servers.stack import send_everything


@pytest.fixture(autouse=True, scope="module")
def _single_torch_thread():
    """Networks this small are slower on two threads, and far slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def settings(stack, root) -> Settings:
    return Settings(root=root, mlflow_tracking_uri=stack.env["MLFLOW_TRACKING_URI"])


@pytest.fixture
def client(settings) -> MlflowClient:
    return MlflowClient(settings.mlflow_tracking_uri, settings.mlflow_tracking_uri)


@pytest.fixture
def tables(stack):
    """tables(): all tables of MLflow's own database that a sender writes to."""

    def read():
        with sqlite3.connect(f"file:{stack.directory}/mlflow/mlflow.db?mode=ro", uri=True, timeout=60) as database:
            names = ("runs", "metrics", "latest_metrics", "params", "tags", "inputs", "datasets", "model_versions",
                     "logged_models", "logged_model_metrics", "registered_model_aliases", "model_version_tags")  # fmt: skip
            return {name: sorted(map(repr, database.execute(f"select * from {name}"))) for name in names}

    return read


@pytest.fixture
def sync(settings):
    """sync(): as `vitline runs send`, but in this process. What became of each run and pipeline, by key."""
    return functools.partial(send_everything, settings.root, settings.mlflow_tracking_uri)


@pytest.fixture
def begin(root, begin_run):
    """begin(name, origin, **execution): a run of this test's root that has been claimed."""
    return functools.partial(begin_run, root)


@pytest.fixture
def tracked(client):
    """tracked(store): its MLflow run, found by the id that the sender wrote to the store."""

    def find(run, key="mlflow.json"):
        (names,) = run.read_json(key)["servers"].values()
        return client.get_run(names["run"])

    return find


def curve(client, run, key):
    return {(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, key)}


def test_a_training_is_shown_while_it_runs_and_complete_at_its_end(
    settings, begin, tracked, client, tables, tmp_path, digits
):
    run, key, attempt = begin(inspect_images=2)
    beside = Journal(run, attempt, writer="node-1")
    beside.record({"system/node1/cpu_fraction": 0.5}, 3)
    with SenderChild(settings, tmp_path / "logs") as sender:
        assert sender.run_url(key) is None
        sender.follow(key)
        eventually(lambda: sender.run_url(key))
        eventually(lambda: tracked(run).info.status == "SCHEDULED")  # it was submitted and has not begun
        beside.close()
        assert TrainingRun(run, attempt, World()).execute() == "finished"
        assert sender.close(240) == []
        assert f"/runs/{tracked(run).info.run_id}" in sender.run_url(key)
    seen, state, manifest = tracked(run), read_state(run), digits.read_json("manifest.json")
    info, data = seen.info, seen.data
    assert (info.run_name, info.status, info.start_time) == (f"{key}, seed 0", "FINISHED", 1_700_000_001_000)
    assert info.end_time == round(state["updated_at"] * 1000)
    assert client.get_experiment(info.experiment_id).name == "vitline/pretrain"
    records = read_journal(run)
    for metric in ("train/loss", "progress/images_seen", "val/top1", "system/node1/cpu_fraction"):
        assert curve(client, seen, metric) == {(r.step, r.value, r.timestamp_ms) for r in records if r.key == metric}
    assert {"model.depth": "2", "optim.optimizer": "adamw", "seed": "0", "total_steps": "20", "corpus": "digits",
            "input.global_batch_size": "16", "execution.num_workers": "1"}.items() <= data.params.items()  # fmt: skip
    assert len(data.params) < 40
    config_digest = run.read_json("config.json")["inputs"]["corpus"]
    assert {"vitline.run_key": key, "vitline.ray_job_id": job_id_of(run, key, 1), "mlflow.user": "ann", "vitline.trigger": "command",
            "vitline.corpus_digest": config_digest, "vitline.model_uri": state["model"]}.items() <= data.tags.items()  # fmt: skip
    assert f"http://127.0.0.1:8265/#/jobs/{job_id_of(run, key, 1)}" in data.tags["mlflow.note.content"]
    files = {f.path for f in client.list_artifacts(info.run_id)}
    assert files == {"config.json", "state.json", "inputs.png", "inspection"}
    figures = {f.path.removeprefix("inspection/") for f in client.list_artifacts(info.run_id, "inspection")}
    assert {"index.html", "attention-distance.png", "patch-filters.png"} < figures
    assert {(i.dataset.name, i.dataset.digest) for i in seen.inputs.dataset_inputs} == {
        ("digits", manifest["digest"][:36]),
        ("digits/val", manifest["digest"][:36]),
    }
    (made,) = seen.outputs.model_outputs
    model = client.get_logged_model(made.model_id)
    assert {(m.key, m.step) for m in model.metrics} == {("val/top1", 20), ("val/loss", 20)}
    version = client.get_model_version_by_alias(model.name, "candidate")
    assert version.source == f"models:/{made.model_id}"
    assert version.tags["vitline.model_digest"] == open_store(state["model"]).read_json("config.json")["digest"]
    files = {f.path for f in client.list_logged_model_artifacts(made.model_id)}
    assert {"MLmodel", "pointer.json", "card.md", "input_example.json"} <= files
    before = tables()
    assert sync_runs(settings) == ([key], {})
    assert outbox.listed(open_store(settings.root)) == {}
    assert tables() == before


def test_mlflow_down_for_a_whole_run_loses_and_duplicates_nothing(settings, begin, tracked, client, tables, tmp_path):
    run, key, attempt = begin()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        away = settings.model_copy(update={"mlflow_tracking_uri": f"http://127.0.0.1:{closed.getsockname()[1]}"})
        with SenderChild(away, tmp_path) as sender:
            sender.follow(key)
            TrainingRun(run, attempt, World()).execute()
            assert sender.close(240) == [key]
            assert sender.run_url(key) is None
        report = sync_runs(away)
        assert (report.done, list(report.left)) == ([], [key])
        assert re.search(r"does not answer \(API request to http.*Connection refused", report.left[key])
    assert sync_runs(settings, [key[:8]]) == ([key], {})
    seen = tracked(run)
    assert seen.info.status == "FINISHED"
    assert (seen.info.start_time, seen.info.end_time) == (
        1_700_000_001_000,
        round(read_state(run)["updated_at"] * 1000),
    )
    assert len(curve(client, seen, "train/loss")) == 20
    before = tables()
    assert sync_runs(settings) == ([key], {})
    assert tables() == before


def test_mlflow_killed_during_a_run_gets_every_point_once(stack, settings, begin, tracked, client, tmp_path):
    run, key, attempt = begin()
    journal = Journal(run, attempt, seal_every_s=1e6)
    write_state(run, "running", attempt)

    def record(steps):
        for step in steps:
            journal.record({"train/loss": 1 / step}, step)
        journal.seal()

    with SenderChild(settings, tmp_path) as sender:
        record(range(1, 6))
        sender.follow(key)
        eventually(lambda: run.exists("mlflow.json") and len(curve(client, tracked(run), "train/loss")) == 5)
        found = find_stack(stack.directory)
        (service,) = (service for service in found.services if service.name == "mlflow")
        for process in [*psutil.Process(service.pid).children(recursive=True), psutil.Process(service.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        record(range(6, 11))
        eventually(lambda: is_up(client))  # the stack starts it again, on the same port and database
        record(range(11, 16))
        journal.close()
        write_state(run, "finished", attempt, step=15)
        left = sender.close(240)
    assert left == [], (tmp_path / "sender.log").read_text()
    assert curve(client, tracked(run), "train/loss") == {(r.step, r.value, r.timestamp_ms) for r in read_journal(run)}
    assert tracked(run).info.status == "FINISHED"


def is_up(client):
    with contextlib.suppress(Exception):
        return bool(client.search_experiments(max_results=1))


def test_a_server_that_never_answers_does_not_delay_the_end(settings, begin, tmp_path):
    _, key, _ = begin()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with SenderChild(settings.model_copy(update={"mlflow_tracking_uri": uri}), tmp_path) as sender:
            sender.follow(key)
            sender.follow_pipeline("some-pipeline")
            assert key in sender.close(3)
    eventually(lambda: not children())


def children(pid=None):
    return [
        p
        for p in psutil.Process(pid).children()
        if p.status() != "zombie" and "vitline.flows.to_mlflow.send" in p.cmdline()
    ]


def test_without_a_server_nothing_is_started(settings, begin, tmp_path):
    _, key, _ = begin()
    away = settings.model_copy(update={"mlflow_tracking_uri": None})
    with SenderChild(away, tmp_path / "logs") as sender:
        sender.follow(key)
        assert sender.run_url(key) is None
        assert sender.close() == []
    assert not (tmp_path / "logs").exists()
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI is not set"):
        sync_runs(away)
    assert sync_runs(settings, []) == ([], {})
    with pytest.raises(ValueError, match="no run or pipeline 'nothing'"):
        sync_runs(settings, ["nothing"])


PARENT = """
import sys, time
from pathlib import Path
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.settings import Settings
SenderChild(Settings(root=sys.argv[1], mlflow_tracking_uri=sys.argv[2]), Path(sys.argv[3])).follow(sys.argv[4])
time.sleep(600)
"""


def test_the_child_sends_the_rest_and_ends_when_its_parent_is_killed(settings, begin, tracked, tmp_path):
    run, key, attempt = begin()
    write_state(run, "cancelled", attempt)
    arguments = [settings.root, settings.mlflow_tracking_uri, str(tmp_path), key]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments])
    eventually(lambda: children(parent.pid))
    (child,) = children(parent.pid)
    parent.kill()
    parent.wait()
    eventually(lambda: not child.is_running() or child.status() == "zombie")
    assert tracked(run).info.status == "KILLED"
    assert outbox.listed(open_store(settings.root)) == {}
    assert "Traceback" not in (tmp_path / "sender.log").read_text()


GRPC_PORT_OFFSET = """
import os, signal, sys
from mlflow import MlflowClient
from vitline.flows.to_mlflow import send
send.LEASE_S, create = 3.0, MlflowClient.create_run
def stopped(*args, **named):
    created = create(*args, **named) if sys.argv[1] == "after" else None
    os.kill(os.getpid(), signal.SIGSTOP)
    return created or create(*args, **named)
if sys.argv[1]:
    MlflowClient.create_run = stopped
send.main(["--once"])
"""


@pytest.mark.parametrize("stopped", ["before", "after"])
def test_a_sender_that_is_suspended_while_it_creates_a_run_leaves_no_twin(settings, begin, tracked, client, stopped):
    """It goes on after another has taken its lease and sent the run."""
    run, key, attempt = begin()
    write_state(run, "finished", attempt)
    root = open_store(settings.root)
    outbox.put(root, OutboxEntry("run", key))
    environment = {**os.environ, "VITLINE_ROOT": root.uri, "MLFLOW_TRACKING_URI": settings.mlflow_tracking_uri}
    first = subprocess.Popen([sys.executable, "-c", GRPC_PORT_OFFSET, stopped], env=environment)
    try:
        eventually(lambda: psutil.Process(first.pid).status() == "stopped")
        second = subprocess.run([sys.executable, "-c", GRPC_PORT_OFFSET, ""], env=environment, check=False)
        assert second.returncode == 0
        assert outbox.listed(root) == {}
        kept = tracked(run).info
        first.send_signal(signal.SIGCONT)
        first.wait(240)
    finally:
        first.kill()
        first.wait()
    found = client.search_runs([kept.experiment_id], f"tags.`vitline.run_key` = '{key}'")
    assert [each.info.run_id for each in found] == [kept.run_id]
    assert (tracked(run).info.run_id, tracked(run).info.status) == (kept.run_id, "FINISHED")


def test_entries_that_another_sender_works_on_are_awaited_and_those_of_other_versions_left(settings, begin, tracked):
    (run, key, attempt), root = begin(), open_store(settings.root)
    write_state(run, "finished", attempt)
    other = OutboxEntry("run", "other-0123456789ab")
    outbox.put(root, other)
    mark = root.read_json("tracking/outbox/run/other-0123456789ab.json")
    root.write_json("tracking/outbox/run/other-0123456789ab.json", {**mark, "version": "99"})
    store = root.child(f"leases/{send.lease_key(settings.mlflow_tracking_uri)}")
    lease = acquire_lease(store, "lease", job_state=lambda job: None, owner="another sender")
    with held(store, lease, every_s=0.2), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sync_runs, settings, [key])
        entry = OutboxEntry("run", key)
        eventually(lambda: outbox.read(root, entry))
        outbox.note(root, entry, outbox.read(root, entry).nonce, "MLflow is on fire")
        assert waiting.result(240) == ([], {key: "MLflow is on fire"})
    assert sync_runs(settings, [key]) == ([key], {})
    assert tracked(run).info.status == "FINISHED"
    assert list(outbox.listed(root)) == [other]


def test_a_resumed_run_is_one_mlflow_run_with_changed_params_as_tags(sync, begin, tracked, root, client):
    run, key, attempt = begin("resumed", num_workers=2)
    write_state(run, "preempted", attempt, step=5, reason="SIGTERM")
    sync()
    first = tracked(run)
    assert (first.info.status, first.data.tags["vitline.reason"]) == ("KILLED", "SIGTERM")
    begin("resumed", num_workers=1)
    sync()
    assert tracked(run).info.status == "SCHEDULED"
    write_state(run, "running", 2)
    sync()
    assert tracked(run).info.status == "RUNNING"
    write_state(run, "diverged", 2, step=9)
    sync()
    again = tracked(run)
    assert again.info.run_id == first.info.run_id
    assert (again.info.status, again.info.start_time) == ("FAILED", first.info.start_time)
    assert again.data.params["execution.num_workers"] == "2"
    assert again.data.tags["vitline.param.execution.num_workers"] == "1"
    assert (again.data.tags["vitline.attempts"], again.data.tags["vitline.ray_job_id"]) == ("2", job_id_of(run, key, 2))


def test_a_pipeline_is_the_parent_of_its_runs_and_links_reused_ones(sync, begin, tracked, root, client, tables):
    old, old_key, attempt = begin()
    TrainingRun(old, attempt, World()).execute()
    pipeline = f"nightly-{uuid.uuid4().hex[:12]}"
    url = "http://127.0.0.1:4200/runs/flow-run/7"
    origin = Origin(trigger="schedule", flow_run_id="7", flow_run_url=url, deployment="p/nightly", pipeline=pipeline)
    run, key, attempt = begin(origin=origin)
    TrainingRun(run, attempt, World()).execute()
    state = read_state(run)
    made = StageRecord(stage="pretrain", run_key=key, reused=False, wall_s=12.5, what="320 images", where=run.uri)
    reused = StageRecord(stage="finetune", run_key=old_key, reused=True, wall_s=0.1, what="found", where=old.uri)
    open_store(root).write("reports/r.html", b"<p>report</p>")
    record = PipelineRecord(
        key=pipeline,
        name="nightly",
        request={"recipe": "digits", "corpus": "digits", "seed": 0, "overrides": {"recipe.total_steps": 20}},
        origin=origin,
        started_at=1_700_000_000.0,
        updated_at=1_700_000_050.0,
        stages=(made,),
        model=state["model"],
        images_seen=320,
    )
    write_pipeline(open_store(root), record)
    sync()
    place = f"tracking/pipelines/{pipeline}/mlflow.json"
    assert tracked(open_store(root), place).info.status == "RUNNING"
    metrics = {"val/top1": 0.5, "tasks/digits/top1": 0.75}
    record = replace(record, state="finished", stages=(made, reused), metrics=metrics, updated_at=1_700_000_100.0,
                     report=open_store(root).uri_of("reports/r.html"))  # fmt: skip
    write_pipeline(open_store(root), record)
    sync()
    parent, child, found = tracked(open_store(root), place), tracked(run), tracked(old)
    assert (parent.info.status, parent.info.end_time) == ("FINISHED", 1_700_000_100_000)
    experiment = client.get_experiment(parent.info.experiment_id)
    assert experiment.name == "vitline/pretrain-then-transfer"
    snapshot = json.loads(experiment.tags["mlflow.sharedViewState.vitlinescores"])
    assert {"val/top1", "tasks/digits/top1"} <= set(snapshot["vitline"]["metrics"])
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "mlflow.parentRunId" not in found.data.tags
    assert parent.data.tags["vitline.run.finetune"] == found.info.run_id
    note = parent.data.tags["mlflow.note.content"]
    assert url in note
    assert found.info.run_id in note
    assert {**metrics, "time/pretrain_s": 12.5} == parent.data.metrics
    assert {m.step for m in client.get_metric_history(parent.info.run_id, "tasks/digits/top1")} == {320}
    assert {"model.depth": "2", "seed": "0", "request.recipe": "digits"}.items() <= parent.data.params.items()
    assert child.data.params.items() <= parent.data.params.items()
    assert "report.html" in {f.path for f in client.list_artifacts(parent.info.run_id)}
    # The same pipeline once more, from finished stages: the first measurements stay.
    later = replace(record, stages=(replace(made, reused=True, wall_s=0.1), reused), updated_at=1_700_000_900.0)
    write_pipeline(open_store(root), later)
    sync()
    assert len(client.get_metric_history(parent.info.run_id, "tasks/digits/top1")) == 1
    assert tracked(open_store(root), place).data.metrics["time/pretrain_s"] == 12.5
    before = tables()
    assert "sent" not in sync().values()
    assert tables() == before


def test_no_secret_reaches_mlflow(stack, sync, begin, tables, monkeypatch):
    monkeypatch.setenv("PLANTED_TOKEN", "hunter2hunter2")
    run, key, attempt = begin(origin=Origin(flow_run_url="http://ann:hunter3hunter3@prefect/runs/1", flow_run_id="1"))
    reason = "GET s3://AKIAX:hunter3hunter3@b/k?X-Amz-Signature=hunter3hunter3 refused hunter2hunter2"
    write_state(run, "failed", attempt, reason=reason)
    assert sync() == {key: "sent"}
    everything = json.dumps(tables()) + sent_files(stack)
    assert "refused ***" in everything
    assert "hunter" not in everything


def sent_files(stack):
    """Texts of all artifacts that MLflow keeps in the stack's store."""
    folder = Path(stack.directory, "mlflow", "artifacts")
    if folder.is_dir():
        return "".join(f.read_text(errors="replace") for f in folder.rglob("*.json"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.env.items():
            if name.startswith("AWS_"):
                patch.setenv(name, value)
        store = open_store(f"{stack.env['VITLINE_ROOT']}/mlflow-artifacts")
        return "".join(store.read(key).decode() for key in store.list() if key.endswith(".json"))


def test_a_sender_that_has_nothing_to_send_imports_no_mlflow():
    code = "import sys, vitline.flows.to_mlflow.child, vitline.flows.to_mlflow.send; sys.exit(bool({'mlflow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0
