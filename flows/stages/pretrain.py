"""manifest -> checkpoint and published model, by one Ray Train job."""

from datetime import date

from flows.stages.engines import Engines
from flows.stages.stage import StageResult, run_stage, run_store
from infra.storage import open_store
from vit.config import TrainConfig
from vit.run_spec import START_TRIES, RunSpec, make_spec, read_progress


def train_model(config: TrainConfig, engines: Engines, night: date | None = None) -> tuple[RunSpec, StageResult]:
    """Trains the config's network, or returns the finished run of the same key; also fine-tunes on a whole corpus.

    Raises ValueError for a config that does not fit its corpus, before a job is submitted; StageFailed, Skipped.
    """
    spec = make_spec(config, engines.root, night)
    run = run_store(engines.root, spec.run_key)
    execution, left_s = config.execution, engines.observer.time_left()
    # Waiting for another training is not a failure; if there is a deadline, the wait may last until then.
    queue_s = max(execution.queue_timeout_s, left_s or 0)
    result = run_stage(
        engines,
        run,
        spec.run_key,
        "vit.ray_train",
        spec,
        title=f"{config.stage} {config.name}",
        progress=lambda: read_progress(run),
        output=lambda state: open_store(state["model"]).exists("config.json"),
        grace_s=execution.grace_s,
        claim_timeout_s=execution.claim_timeout_s,
        env={"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(queue_s / START_TRIES)},
    )
    return spec, result
