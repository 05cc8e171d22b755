"""`vitline data shuffle-report`: figures of the batches of a training beside those of perfect shuffles, and the verdict."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from vitline.data_prep.shard_format import Manifest, load_manifest
from vitline.flows import console
from vitline.infra.config import replace
from vitline.infra.html.page import num_bytes
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.input.order import Order
from vitline.vit.input.plan import plan_order
from vitline.vit.input.shuffle_report import (
    LEAST_ENTROPY_FRACTION,
    Figure,
    ShuffleReport,
    SmallColumns,
    shuffle_report,
    window_needed,
)


def show_shuffle(config: TrainConfig, *, num_batches: int, as_json: bool) -> None:
    """Prints how well a training shuffles. Raises RuntimeError, after printing, if its batches lack too many classes."""
    store, window = open_store(config.corpus), config.recipe.input.shuffle_window
    manifest = load_manifest(store)
    order_of, columns = partial(_order, config, manifest), SmallColumns(store, manifest, config.split)
    with console.progress(f"reading the labels of {manifest.name}"):
        report = shuffle_report(order_of(window), columns, num_batches=num_batches)
        needed = window_needed(order_of, window, columns, num_batches=num_batches) if report.too_low else None
    if as_json:
        console.emit(_as_json(config, manifest, report, needed))
    else:
        columns_shown = ["figure", "this order", "perfect shuffle", "95 % of them"]
        console.table(_title(config, manifest), columns_shown, [*_rows(report)], right=(1, 2, 3))
        console.print_result(_basis(report, manifest.split(config.split).num_rows))
    if report.too_low:
        raise RuntimeError(_refusal(config, manifest, report, needed))


def _order(config: TrainConfig, manifest: Manifest, window: int) -> Order:
    return Order.of(
        manifest, config.split, replace(config.recipe.input, shuffle_window=window), seed=config.recipe.seed
    )


def _title(config: TrainConfig, manifest: Manifest) -> str:
    order = config.recipe.input
    return (
        f"{manifest.name}/{manifest.version}, {config.split}: batches of {order.global_batch_size:,}, {order.num_lanes:,} lanes, "
        f"shuffle window {order.shuffle_window:,}, seed {config.recipe.seed}"
    )


def _as_json(config: TrainConfig, manifest: Manifest, report: ShuffleReport, needed: int | None) -> dict[str, object]:
    order = config.recipe.input
    return {
        "corpus": f"{manifest.name}/{manifest.version}",
        "split": config.split,
        "global_batch_size": order.global_batch_size,
        "num_lanes": order.num_lanes,
        "shuffle_window": order.shuffle_window,
        "seed": config.recipe.seed,
        "passed": not report.too_low,
        "entropy_fraction": report.entropy_fraction,
        "least_entropy_fraction": LEAST_ENTROPY_FRACTION,
        "window_needed": needed,
        **asdict(report),
    }


def _rows(report: ShuffleReport) -> Iterator[list[str]]:
    def row(name: str, figure: Figure, form: str) -> list[str]:
        low, high = format(figure.low, form), format(figure.high, form)
        return [name, format(figure.value, form), format(figure.perfect, form), f"{low} to {high}"]

    yield row("class entropy, bits", report.class_entropy_bits, ".3f")
    yield row("pairs from one row group", report.row_group_pairs, ",.1f")
    if report.num_sources > 1:
        yield row("pairs from one source", report.source_pairs, ",.1f")
    yield row("pairs that are neighbours in the source", report.neighbours, ",.1f")
    yield row("positions until an example repeats, least", report.shortest_repeat, ",.0f")
    yield row("positions until an example repeats, median", report.median_repeat, ",.0f")


def _basis(report: ShuffleReport, num_rows: int) -> str:
    chance = "less than chance explains" if report.lower_than_chance else "no less than chance explains"
    return (
        f"Class entropy: {console.percent(report.entropy_fraction)} of a perfect shuffle, {chance}. Measured on "
        f"{report.num_batches:,} batches, with the labels of {report.num_rows:,} of {num_rows:,} rows."
    )


def _refusal(config: TrainConfig, manifest: Manifest, report: ShuffleReport, needed: int | None) -> str:
    found = (
        f"{manifest.name}/{manifest.version}, split {config.split!r}: batches have {console.percent(report.entropy_fraction)} of "
        f"the class entropy of a perfect shuffle, less than the {console.percent(LEAST_ENTROPY_FRACTION)} that are needed, because rows "
        "that are stored together have the same classes. "
    )
    again = "prepare the corpus again with its rows in random order"
    if needed is None:
        return f"{found}No recipe.input.shuffle_window is enough with these lanes: {again}."
    plan = plan_order(
        _order(config, manifest, needed),
        world_size=config.execution.num_workers,
        mean_row_group_bytes=manifest.mean_row_group_bytes(config.split),
    )
    return (
        f"{found}Add --set recipe.input.shuffle_window={needed}, with which a worker keeps {num_bytes(plan.open_memory_bytes)} of "
        f"row groups open, or {again}."
    )
