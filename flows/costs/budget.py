"""Whether a pipeline fits its deadline, estimated from the throughput of earlier runs of the same network."""

import statistics

from flows.catalog import list_runs
from flows.requests.pipeline_plan import PipelinePlan
from infra.records import readable, reading
from infra.runs.journal import read_journal
from infra.storage import Store, open_store
from vit.config import TrainConfig

# With fewer records, the warmup of caches and compilers would distort the median.
MIN_RECORDS = 3


def known_images_per_s(root: str, training: TrainConfig) -> float | None:
    """Median throughput of the newest finished or paused training of the same network, batch and number of workers."""
    wanted = _like(training)
    for row in list_runs(root):
        if row["stage"] != "pretrain" or row["state"] not in ("finished", "paused"):
            continue
        run = open_store(row["uri"])
        # A config with fields of a newer version is none of the same training.
        config = next(readable([run], _config, lambda odd: None), None)
        if config is None or _like(config) != wanted:
            continue
        rates = [record.value for record in read_journal(run) if record.key == "throughput/images_per_s"]
        if len(rates) >= MIN_RECORDS:
            return statistics.median(rates)
    return None


def _config(run: Store) -> TrainConfig:
    with reading(run.uri_of("config.json")):
        return TrainConfig.model_validate(run.read_json("config.json")["config"])


def _like(training: TrainConfig) -> tuple[object, ...]:
    recipe, execution = training.recipe, training.execution
    return recipe.model, recipe.input.global_batch_size, recipe.precision, execution.num_workers


def check_deadline(root: str, plan: PipelinePlan) -> str:
    """One line about the deadline of a plan. Raises ValueError if the plan does not fit."""
    hours = plan.request.deadline_hours
    if hours is None:
        return "no deadline"
    nights, recipe = plan.nights, plan.training.recipe
    cooldown, field = nights.cooldown_images or 0, "nights.advance_images" if nights.advance_images else "train_images"
    images = nights.advance_images or recipe.total_steps * recipe.input.global_batch_size * nights.num_seeds
    images += cooldown
    rate = known_images_per_s(root, plan.training)
    if rate is None:
        return f"deadline of {hours:g} h: no earlier run of this network has a known rate; the run is stopped at the deadline"
    needed = images / rate / 3600
    if needed > hours:
        fits = max(int(hours * 3600 * rate / nights.num_seeds) - cooldown, 0)
        raise ValueError(
            f"{images:,} images take {needed:.2f} h at the {rate:,.0f} images/s of the last run of this network, "
            f"but deadline_hours is {hours:g}. Set {field} to at most {fits:,}, or a larger deadline_hours."
        )
    return f"deadline of {hours:g} h: {images:,} images take {needed:.2f} h at {rate:,.0f} images/s"
