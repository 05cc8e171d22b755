"""Whether a pipeline fits its deadline, estimated from earlier trainings of the same network and the last transfer of the pipeline."""

from statistics import fmean

from vitline.flows.catalog.snapshot import RootSnapshot
from vitline.flows.forms.nights import NightSettings
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.plans.measured_speed import measured_speeds
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import hours_of


def known_images_per_s(root: str, training: TrainConfig) -> float | None:
    """Throughput of the newest finished or paused training of the same network, batch and number of workers."""
    workers = training.execution.num_workers
    speeds = measured_speeds(root, training)
    return next((speed.images_per_s for speed in speeds if speed.config.execution.num_workers == workers), None)


_TRANSFER = ("name", "tasks", "protocol", "from_scratch", "recipe", "overrides")
"""The fields of a request that decide how long its transfer takes."""


def known_transfer_hours(root: str, plan: PipelinePlan) -> float | None:
    """How long the model of one seed was scored in the newest pipeline that requested the same; None where there is none."""
    requested = plan.request.model_dump(mode="json", include={*_TRANSFER})
    with RootSnapshot.read(open_store(root), ["pipeline"]) as snapshot:
        records = sorted(
            (stored.record for stored in snapshot.pipelines.values()), key=lambda record: -record.updated_at
        )
    for record in records:
        took = [stage.wall_s for stage in record.stages if stage.stage == "evaluate" and not stage.reused]
        if took and requested.items() <= record.request.items():
            return fmean(took) / 3600
    return None


def check_deadline(root: str, plan: PipelinePlan) -> str:
    """One line about the deadline of a plan, for the training and the transfer. Raises ValueError if the plan does not fit."""
    hours, nights, recipe = plan.request.deadline_hours, plan.nights, plan.training.recipe
    of_seed = None if hours is None else known_transfer_hours(root, plan)
    transfer = (of_seed or 0.0) * nights.num_seeds
    if nights.cooldown_at_hours is not None:
        return _check_cooldown(hours, nights, known_images_per_s(root, plan.training), transfer)
    if hours is None:
        return "no deadline"
    cooldown, field = nights.cooldown_images or 0, "nights.advance_images" if nights.advance_images else "train_images"
    images = nights.advance_images or recipe.total_steps * recipe.input.global_batch_size * nights.num_seeds
    images += cooldown
    rate = known_images_per_s(root, plan.training)
    if rate is None:
        return f"deadline of {hours:g} h: no earlier run of this network has a known rate; the run is stopped at the deadline"
    needed = hours_of(images, rate)
    if needed + transfer > hours:
        fits = max(int((hours - transfer) * 3600 * rate / nights.num_seeds) - cooldown, 0)
        scored = f" and the transfer took {transfer:.2f} h last time" if transfer else ""
        raise ValueError(
            f"{images:,} images take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network{scored}, "
            f"but deadline_hours is {hours:g}. Set {field} to at most {fits:,}, or a larger deadline_hours."
        )
    scored = (
        f", the transfer {transfer:.2f} h as last time"
        if transfer
        else "; how long the transfer takes is not known yet"
    )
    return f"deadline of {hours:g} h: {images:,} images take {needed:.2f} h at {rate:,.0f} images/s{scored}"


def _check_cooldown(hours: float | None, nights: NightSettings, rate: float | None, transfer: float) -> str:
    """The line about the deadline of a training that is cooled down before it, so that `transfer` hours are left. Raises ValueError if the
    cooldown does not fit."""
    begin, images = nights.cooldown_at_hours or 0, nights.cooldown_images or 0
    deadline = "no deadline" if hours is None else f"deadline of {hours:g} h"
    text = f"{deadline}: a training that is not done after {begin:g} h is cooled down over {images:,} images"
    if rate is None:
        return f"{text}; no earlier run of this network has a known rate"
    needed = hours_of(images, rate)
    if hours is not None and begin + needed + transfer > hours:
        fits = max(int((hours - begin - transfer) * 3600 * rate), 0)
        scored = f", which took {transfer:.2f} h last time" if transfer else ""
        raise ValueError(
            f"nights.cooldown_images={images:,} take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network, but from "
            f"nights.cooldown_at_hours={begin:g} to deadline_hours={hours:g} there are {hours - begin:g} h, also for the transfer{scored}. "
            f"Set fewer than {fits:,} images, or an earlier time."
        )
    return f"{text}, which take {needed:.2f} h at {rate:,.0f} images/s"
