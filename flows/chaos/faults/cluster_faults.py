"""Faults of trainings on the Ray cluster of the settings; without one, on a one-node Ray that is started for each scenario."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from vitline.flows.chaos.bench import Bench, Training
from vitline.flows.chaos.promises import PromiseBroken, require
from vitline.flows.chaos.ray_driver import AT, FAULT
from vitline.flows.chaos.scenario import scenario
from vitline.flows.stages.engines import Engines, open_engines
from vitline.flows.stages.stage import StageFailed, run_stage, run_store
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import Store
from vitline.vit.run_spec import START_TRY_S, make_spec, read_progress, read_starts
from vitline.vit.training.checkpoints.names import list_checkpoints

NEEDS = "one free CPU in Ray"


@scenario(f"SIGKILL to a Ray Train worker after step {AT}", NEEDS, about_s=60)
def killed_worker(bench: Bench) -> str:
    """Ray Train restarts a worker that was killed; the same attempt goes on from the newest checkpoint and ends bit for bit as
    without the kill."""
    run = on_cluster(bench, "killed-worker", "kill")
    bench.require_undisturbed(run)
    starts, attempt = len(read_starts(run.run)), (read_state(run.run) or NO_STATE)["attempt"]
    require(
        (starts, attempt) == (2, 1), f"there were {starts} starts of the worker, and attempt {attempt} finished the run"
    )
    return "restarted once within attempt 1"


@scenario(f"a stop request `preempted` after step {AT}", NEEDS, about_s=90)
def preempted_job(bench: Bench) -> str:
    """A preempted training writes a checkpoint of its last step and ends its job; the next attempt resumes it, and ends bit for
    bit as without the fault."""
    run = on_cluster(bench, "preempted-job", "preempted")
    bench.require_undisturbed(run)
    state = read_state(run.run) or NO_STATE
    require(state["attempt"] == 2, f"attempt {state['attempt']} finished the run, not attempt 2")
    starts = run.run.list("starts/a2-")
    require(f"step-{AT:09d}-" in "".join(starts), f"attempt 2 did not resume from step {AT}: {', '.join(starts)}")
    return f"attempt 2 resumed from step {AT}"


@scenario(f"a stop request `cancelled` after step {AT}", NEEDS, about_s=60)
def cancelled_job(bench: Bench) -> str:
    """A training that is cancelled, and may not save on a cancel, ends as cancelled and saves nothing more."""
    try:
        run = on_cluster(bench, "cancelled-job", "cancelled", on_cancel="discard")
    except StageFailed as failed:
        require(failed.state == "cancelled", f"it ended as {failed.state}: {failed}")
        (key,) = {key.split("/")[1] for key in bench.place.list("runs/") if "/chaos-cancelled-job" in f"/{key[5:]}"}
        later = [p for p in list_checkpoints(run_store(bench.place.uri, key)) if int(p.split("-")[1]) >= AT]
        require(not later, f"it saved {', '.join(later)} after the cancel")
        return "ended as cancelled without a further checkpoint"
    raise PromiseBroken(f"the cancelled training ended as {(read_state(run.run) or NO_STATE)['state']}")


def on_cluster(bench: Bench, name: str, fault: str, **execution: str) -> Training:
    """The tiny training as a job of Ray, followed to its end as flows do. MLflow is not told. Raises StageFailed."""
    with open_engines(settings_of(bench)) as engines:
        return followed(engines, bench, name, fault, execution=execution)


def settings_of(bench: Bench) -> Settings:
    return bench.settings.model_copy(update={"root": bench.place.uri, "mlflow_tracking_uri": None})


def followed(
    engines: Engines,
    bench: Bench,
    name: str,
    fault: str,
    look: Callable[[Store], object] = lambda run: None,
    env: Mapping[str, str] = MappingProxyType({}),
    execution: Mapping[str, str] = MappingProxyType({}),
) -> Training:
    """The tiny training, followed to its end with `engines`; `look(run)` is called every second. Raises StageFailed."""
    config = bench.config(name, None, **execution)
    spec = make_spec(config, bench.place.uri)
    run = run_store(bench.place.uri, spec.run_key)
    run.write_json(FAULT, {"fault": fault})

    def progress() -> RunProgress | None:
        look(run)
        return read_progress(run)

    run_stage(
        engines,
        run,
        spec.run_key,
        "vitline.flows.chaos.ray_driver",
        spec,
        title=name,
        progress=progress,
        grace_s=config.execution.grace_s,
        claim_timeout_s=config.execution.claim_timeout_s,
        env={"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_TRY_S), **env},
    )
    return Training.of(run, spec.run_key)
