"""Data that a sender could not send reaches MLflow later: through the outbox in the store and the stack's sender."""

import contextlib
import os
import signal
import time
import uuid

import psutil
import pytest
from mlflow import MlflowClient

from vitline.flows.catalog.records import Origin, PipelineRecord, StageRecord, write_pipeline
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.child import SenderChild
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.infra.local.stack import find_stack
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store

from ...eventually import eventually


@pytest.fixture
def frozen(stack):
    """frozen(): context in which the MLflow server holds its connections and answers nothing."""

    @contextlib.contextmanager
    def freeze():
        service = next(s for s in find_stack(stack.directory).services if s.name == "mlflow")
        top = psutil.Process(service.pid)
        family = [top, *top.children(recursive=True)]
        try:
            for process in family:
                os.kill(process.pid, signal.SIGSTOP)
            yield
        finally:
            for process in family:
                os.kill(process.pid, signal.SIGCONT)

    return freeze


def status(uri, store, key="mlflow.json"):
    """Status of the MLflow run; None if the store names none."""
    with contextlib.suppress(FileNotFoundError):
        (names,) = store.read_json(key)["servers"].values()
        return MlflowClient(uri, uri).get_run(names["run"]).info.status
    return None


def test_data_not_sent_at_the_end_of_a_run_is_sent_later_by_the_service(in_stack, begin_run, frozen, tmp_path):
    root, uri = open_store(in_stack.root), in_stack.mlflow_tracking_uri
    pipeline = f"left-{uuid.uuid4().hex[:8]}"
    run, key, _ = begin_run(in_stack.root, origin=Origin(pipeline=pipeline))
    stage = StageRecord(stage="pretrain", run_key=key, reused=False, wall_s=1.0, what="-", where=run.uri)
    record = PipelineRecord(
        key=pipeline, name="left", request={}, started_at=time.time(), updated_at=time.time(), stages=(stage,)
    )
    write_pipeline(root, record)
    write_state(run, "running", 1)
    place = f"tracking/pipelines/{pipeline}/mlflow.json"
    with SenderChild(in_stack, tmp_path) as sender:
        sender.follow_pipeline(pipeline)
        sender.follow(key)
        eventually(lambda: (status(uri, run), status(uri, root, place)) == ("RUNNING", "RUNNING"))
        with frozen():
            write_state(run, "finished", 1, step=20)
            write_pipeline(root, record.model_copy(update={"state": "finished", "updated_at": time.time()}))
            assert sorted(sender.close(3)) == sorted([key, pipeline])
            assert {key, pipeline} <= {entry.key for entry in outbox.listed(root)}
    eventually(lambda: (status(uri, run), status(uri, root, place)) == ("FINISHED", "FINISHED"))
    eventually(lambda: not {key, pipeline} & {entry.key for entry in outbox.listed(root)})


def test_a_sender_that_is_killed_is_replaced_even_at_the_very_end(stack, begin_run, root, tmp_path):
    from vitline.infra.settings import Settings

    settings = Settings(root=root, mlflow_tracking_uri=stack.env["MLFLOW_TRACKING_URI"])
    run, key, _ = begin_run(root)
    write_state(run, "running", 1)

    def kill():
        def children():
            found = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
            return [p for p in found if "vitline.flows.to_mlflow.send" in p.cmdline()]

        eventually(children)
        (child,) = children()
        child.kill()
        return child

    with SenderChild(settings, tmp_path) as sender:
        sender.follow(key)
        first = kill()
        eventually(lambda: status(settings.mlflow_tracking_uri, run) == "RUNNING")
        write_state(run, "finished", 1, step=20)
        assert kill().pid != first.pid
        assert sender.close(600) == []
    assert status(settings.mlflow_tracking_uri, run) == "FINISHED"
    assert outbox.listed(open_store(root)) == {}


def test_an_entry_is_cleared_once_the_end_was_sent_and_not_before(root):
    store, run = open_store(root), open_store(root).child("runs/a")
    entry = OutboxEntry("run", "a")
    run.write_json("config.json", {})
    outbox.put(store, entry)
    assert outbox.left(store) == []
    write_state(run, "preempted", 1)
    assert outbox.left(store) == [entry]
    run.write_json("attempts/a2.json", {})  # the next attempt has started and has not written its state yet
    assert outbox.left(store) == []
    write_state(run, "finished", 2)
    read = outbox.read(store, entry).nonce
    outbox.note(store, entry, read, "away")
    assert outbox.wait(store, [entry], 0) == {"a": "away"}
    outbox.put(store, entry)
    outbox.note(store, entry, read, "")
    outbox.clear(store, entry, read)
    assert outbox.wait(store, [entry], 0) == {"a": "no sender has tried it yet"}
    outbox.note(store, entry, outbox.read(store, entry).nonce, "")
    assert outbox.wait(store, [entry], 0) == {}
    outbox.clear(store, entry, outbox.read(store, entry).nonce)
    outbox.clear(store, entry, read)
    assert outbox.listed(store) == {}
    outbox.put(store, OutboxEntry("run", "gone"))
    outbox.put(store, OutboxEntry("pipeline", "gone"))
    assert sorted(outbox.left(store)) == [("pipeline", "gone"), ("run", "gone")]
    store.write("tracking/outbox/run/gone.json", b"half a recor")
    outbox.clear(store, OutboxEntry("run", "gone"), outbox.read(store, OutboxEntry("run", "gone")).nonce)
    assert outbox.left(store) == [("pipeline", "gone")]
