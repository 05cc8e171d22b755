"""manifest -> checkpoint and published model, by one Ray Train job."""

from datetime import datetime

from vitline.data_prep.find_corpus import FoundCorpus
from vitline.flows.catalog.lists import corpus_stats
from vitline.flows.plans.measured_speed import measured_speed
from vitline.flows.plans.training_cost import training_cost
from vitline.flows.plans.training_plan import plan_rows
from vitline.flows.runs.prepare_corpus import leak_lines
from vitline.flows.runs.priority import RoomMaker
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import StageResult, run_stage, run_store
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.run.branch import pin_parent
from vitline.vit.run.resolved import ResolvedTraining
from vitline.vit.run.run_spec import START_TRY_S, RunSpec, read_progress


def train_model(
    training: ResolvedTraining,
    services: Services,
    night: datetime | None = None,
    pause_at_step: int | None = None,
    pause_at: float | None = None,
) -> tuple[RunSpec, StageResult]:
    """Trains the network, or returns the finished run of the same key; also fine-tunes on a whole corpus.
    With `pause_at_step`, or `pause_at` in Unix seconds, it trains up to there, and the state may be `paused`.

    Raises ValueError for a config that does not fit its corpus or parent, before a job is submitted; StageFailed, Skipped.
    """
    config, spec = training.config, training.spec(night, pause_at_step, pause_at)
    run = run_store(services.root, spec.run_key)
    begun = read_state(run)
    finished = (begun or NO_STATE)["state"] == "finished"
    if config.mixture is not None and begun is None:  # a run that has begun has said it
        services.observer.say("looking for leakage in the corpora of the mixture")
        for line in mixture_leaks(training):
            services.observer.say(f"warning: {line}")
    if config.parent is not None and newest_step(run) is None and not finished:
        pin_parent(config.parent, spec.run_key)  # before anything is submitted: the parent may be at work
        services.observer.say(
            f"step {config.parent.step:,} of {spec.inputs['parent'].partition('@')[0]} is kept for {spec.run_key}"
        )
    execution, cost = config.execution, training_cost(training)
    if not finished:
        services.observer.say(
            f"{cost['images']:,} images in {cost['steps']:,} steps, {cost['epochs']:.1f} epochs; {cost['loss']}"
        )
        if "warning" in cost:
            services.observer.say(f"warning: {cost['warning']}")
        services.observer.table("plan", f"Plan of {spec.run_key}", ["field", "value"], plan_rows(config, cost))
    result = run_stage(
        services,
        spec,
        "vitline.vit.ray_jobs.train_driver",
        title=f"{config.stage} {config.name}",
        progress=lambda: read_progress(run),
        output=lambda state: open_store(state["model"]).exists("config.json"),
        paused=lambda state: pause_at is not None or (pause_at_step is not None and state["step"] >= pause_at_step),
        kept=lambda: {"checkpoint": newest_step(run) or 0},
        grace_s=execution.grace_s,
        lease_timeout_s=execution.lease_timeout_s,
        make_room=RoomMaker(services, spec.run_key, execution),
        env={"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(min(START_TRY_S, execution.queue_timeout_s / 4))},
    )
    if not result.reused and (speed := measured_speed(run, config)) is not None:
        services.observer.say(speed.text(cost["corpus"]["classes"]))
    return spec, result


def mixture_leaks(training: ResolvedTraining) -> list[str]:
    """Leakage of all corpora of a mixture, as sentences: what their preparations have found, and what came later or is in the
    validation split of another of them. Nothing for one corpus, whose preparation has said it."""
    if training.config.mixture is None:
        return []
    from vitline.data_prep.plan.mixture_leakage import find_mixture_leaks

    config = training.config
    corpora = [FoundCorpus(part.store, part.manifest) for part in training.corpora.parts]
    lines, compared = list[str](), dict[str, frozenset[tuple[str, str]]]()
    for store, _ in corpora:
        title, stats = "/".join(store.uri.rstrip("/").split("/")[-2:]), corpus_stats(store).stats
        compared[title] = stats.compared
        lines += [f"{title}: {line}" for line in leak_lines(stats)]
    leaks = find_mixture_leaks(
        corpora, open_store(training.root), split=config.split, val_split=config.val_split, compared=compared
    )
    return lines + [
        f"{leak.corpus}: {leak.num_images:,} training images match the {leak.split} split of {leak.evaluation}; prepare "
        f"{leak.corpus.partition('/')[0]} with --decontaminate {leak.evaluation.partition('/')[0]} to leave them out"
        for leak in leaks
    ]
