"""Whether a pipeline fits its deadline, estimated from the throughput of earlier runs of the same network."""

from vitline.flows.forms.nights import NightSettings
from vitline.flows.forms.pipeline_plan import PipelinePlan
from vitline.flows.plans.measured_speed import measured_speeds
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import hours_of


def known_images_per_s(root: str, training: TrainConfig) -> float | None:
    """Throughput of the newest finished or paused training of the same network, batch and number of workers."""
    workers = training.execution.num_workers
    speeds = measured_speeds(root, training)
    return next((speed.images_per_s for speed in speeds if speed.config.execution.num_workers == workers), None)


def check_deadline(root: str, plan: PipelinePlan) -> str:
    """One line about the deadline of a plan. Raises ValueError if the plan does not fit."""
    hours, nights, recipe = plan.request.deadline_hours, plan.nights, plan.training.recipe
    if nights.cooldown_at_hours is not None:
        return _check_cooldown(hours, nights, known_images_per_s(root, plan.training))
    if hours is None:
        return "no deadline"
    cooldown, field = nights.cooldown_images or 0, "nights.advance_images" if nights.advance_images else "train_images"
    images = nights.advance_images or recipe.total_steps * recipe.input.global_batch_size * nights.num_seeds
    images += cooldown
    rate = known_images_per_s(root, plan.training)
    if rate is None:
        return f"deadline of {hours:g} h: no earlier run of this network has a known rate; the run is stopped at the deadline"
    needed = hours_of(images, rate)
    if needed > hours:
        fits = max(int(hours * 3600 * rate / nights.num_seeds) - cooldown, 0)
        raise ValueError(
            f"{images:,} images take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network, "
            f"but deadline_hours is {hours:g}. Set {field} to at most {fits:,}, or a larger deadline_hours."
        )
    return f"deadline of {hours:g} h: {images:,} images take {needed:.2f} h at {rate:,.0f} images/s"


def _check_cooldown(hours: float | None, nights: NightSettings, rate: float | None) -> str:
    """The line about the deadline of a training that is cooled down before it. Raises ValueError if the cooldown does not fit."""
    begin, images = nights.cooldown_at_hours or 0, nights.cooldown_images or 0
    deadline = "no deadline" if hours is None else f"deadline of {hours:g} h"
    text = f"{deadline}: a training that is not done after {begin:g} h is cooled down over {images:,} images"
    if rate is None:
        return f"{text}; no earlier run of this network has a known rate"
    needed = hours_of(images, rate)
    if hours is not None and begin + needed > hours:
        fits = int((hours - begin) * 3600 * rate)
        raise ValueError(
            f"nights.cooldown_images={images:,} take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network, but from "
            f"nights.cooldown_at_hours={begin:g} to deadline_hours={hours:g} there are {hours - begin:g} h, also for the transfer. Set "
            f"fewer than {fits:,} images, or an earlier time."
        )
    return f"{text}, which take {needed:.2f} h at {rate:,.0f} images/s"
