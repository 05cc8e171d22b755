"""The flow process, each server of the stack and a worker are killed while a flow trains: the result is bit for bit that of
an undisturbed training."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.catalog.records import read_pipeline
from vitline.flows.to_mlflow import outbox
from vitline.infra.local.stack import check_services, find_stack
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.run_state import read_state
from vitline.vit.run.run_spec import RunSpec

from ..eventually import eventually
from ..servers.stack import TINY
from ..trainings import losses_of, outcome_of
from .undisturbed import train_undisturbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS = 80


@pytest.fixture
def kill(stack):
    """kill(name): SIGKILL to every process of a service; the stack starts it again. Gives when it works again."""

    def end(name):
        service = next(service for service in find_stack(stack.directory).services if service.name == name)
        for process in [*psutil.Process(service.pid).children(recursive=True), psutil.Process(service.pid)]:
            os.kill(process.pid, signal.SIGKILL)

    return end


def back(stack):
    eventually(lambda: not any(check_services(stack.directory).values()), awaited="all services work again")


def test_a_pipeline_that_ends_while_mlflow_and_its_sender_are_killed_is_finished_everywhere(work, stack, kill):
    overrides = TINY["overrides"] | {"protocol.total_steps": 4}
    run = work.start("pretrain-then-transfer/tiny", name="twice", overrides=overrides)
    record = work.eventually(
        lambda: next((r for r in list_pipelines(work.root.uri) if r.origin.flow_run_id == run), None)
    )
    work.eventually(lambda: read_pipeline(work.root, record.key).stages[1:])
    mlflow = service(stack, "mlflow")
    for process in [mlflow, *mlflow.children(recursive=True)]:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        while (state := work.flows.find(run)["state_name"]) in ("Pending", "Running"):
            for process in work.processes_of_flow(run):
                with contextlib.suppress(psutil.Error):  # it may end by itself
                    if "vitline.flows.to_mlflow.send" in process.cmdline():  # a child of the flow process
                        process.kill()
            time.sleep(5.0)  # an answer that never comes; meanwhile a new one has started
    finally:
        kill("mlflow")  # stopped, it would hold up every test behind this one
    assert state == "Completed", work.flows.lines(run)
    keys = [record.key, *(stage.run_key for stage in read_pipeline(work.root, record.key).stages if stage.run_key)]
    back(stack)
    work.eventually(lambda: {work.mlflow_status(key) for key in keys} == {"FINISHED"})
    assert {read_state(work.run(key))["state"] for key in keys[1:]} == {"finished"}
    assert all(job.state == "succeeded" for job in work.jobs.list({"flow_run_id": run}))


def service(stack, name):
    found = next(service for service in find_stack(stack.directory).services if service.name == name)
    return psutil.Process(found.pid)


def training_worker(work):
    processes = [psutil.Process(pid) for pid in work.workers()]
    return next(process for process in processes if "RayTrainWorker" in " ".join(process.cmdline()))


def test_the_work_of_a_flow_run_that_was_deleted_in_prefect_ends_in_order(work, stack):
    log = stack.log_dir / "prefect-worker.log"
    run, said_before = work.pretrain("deleted", 30), len(log.read_text())
    work.reach(key := work.key(run), 3)
    work.flows.api.delete(f"/flow_runs/{run}").raise_for_status()
    work.started.remove(run)
    work.eventually(lambda: read_state(work.run(key))["state"] == "finished")
    work.eventually(lambda: not work.processes_of_flow(run), timeout_s=120)
    said = log.read_text()[said_before:]
    assert f"flow run {run} was deleted in Prefect; its work continues unseen" in said
    assert f"flow run {run}, which was deleted in Prefect, has ended as Completed" in said
    assert "Traceback" not in said
    assert "does not answer" not in said


def test_flow_process_servers_and_a_worker_are_killed_in_mid_training(work, stack, kill, root):
    first = work.pretrain("disturbed", STEPS)
    key = work.key(first)
    work.reach(key, 5)
    for process in work.processes_of_flow(first):
        process.kill()
    with work.frozen_training():
        assert work.flows.wait(first, timeout_s=240)["state_type"] == "CRASHED"
    work.reach(key, work.progress(key) + 5)
    assert work.jobs.find(read_lease(work.run(key)).job_id).state == "running"

    run = work.pretrain("disturbed", STEPS)
    with work.frozen_training():
        work.eventually(lambda: any("following it from here" in line for line in work.flows.lines(run)))
    for names in (("s3",), ("mlflow", "prefect")):
        at = work.progress(key)
        for name in names:
            kill(name)
        work.reach(key, at + 8)
        with work.frozen_training():
            back(stack)
    training_worker(work).kill()
    assert work.progress(key) < STEPS, "killed too late to have mattered"
    work.flows.completes(run)
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"], state["step"]) == ("finished", 1, STEPS)
    assert len(work.run(key).list("starts/")) == 2
    spec = RunSpec.model_validate(work.run(key).read_json("config.json"))
    assert outcome_of(work.run(key)) == outcome_of(train_undisturbed(spec, root))
    # The sender sends the status before the rest, and then deletes the entry.
    work.eventually(lambda: key not in {entry.key for entry in outbox.listed(work.root)})
    assert work.mlflow_status(key) == "FINISHED"
    sent = work.mlflow_curve(key, "train/loss")
    assert len(sent) == len({step for step, _ in sent}) > STEPS / 2
    assert set(sent) <= losses_of(work.run(key)).items()
    assert float(work.flows.artifacts(run)["pretrain"]["data"]) == 100.0
    assert any("s3://" in line and "trying again" in line for line in work.flows.lines(run))
