"""manifest -> checkpoint and published model, by one Ray Train job."""

from datetime import date

from flows.stages.engines import Engines
from flows.stages.prepare_corpus import leaks_of
from flows.stages.stage import StageResult, run_stage, run_store
from infra.storage import open_store
from vit.config import TrainConfig
from vit.run_spec import START_TRY_S, RunSpec, make_spec, read_progress
from vit.training.checkpoint_names import newest_step


def train_model(config: TrainConfig, engines: Engines, night: date | None = None) -> tuple[RunSpec, StageResult]:
    """Trains the config's network, or returns the finished run of the same key; also fine-tunes on a whole corpus.

    Raises ValueError for a config that does not fit its corpus, before a job is submitted; StageFailed, Skipped.
    """
    for line in mixture_leaks(config):
        engines.observer.say(f"warning: {line}")
    spec = make_spec(config, engines.root, night)
    run = run_store(engines.root, spec.run_key)
    execution = config.execution
    result = run_stage(
        engines,
        run,
        spec.run_key,
        "vit.ray_train",
        spec,
        title=f"{config.stage} {config.name}",
        progress=lambda: read_progress(run),
        output=lambda state: open_store(state["model"]).exists("config.json"),
        kept=lambda: {"checkpoint": newest_step(run) or 0},
        grace_s=execution.grace_s,
        claim_timeout_s=execution.claim_timeout_s,
        env={"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(min(START_TRY_S, execution.queue_timeout_s / 4))},
    )
    return spec, result


def mixture_leaks(config: TrainConfig) -> list[str]:
    """What is known of leakage of the corpora of a mixture, as sentences: what their preparations have found, and which were compared
    with no evaluation set. Nothing for one corpus, whose preparation has said it."""
    lines = list[str]()
    for each in config.mixture.corpora if config.mixture else ():
        name = "/".join(each.corpus.rstrip("/").split("/")[-2:])
        found = leaks_of(each.corpus)
        lines += [f"{name}: {line}" for line in (["not compared with any evaluation set"] if found is None else found)]
    return lines
