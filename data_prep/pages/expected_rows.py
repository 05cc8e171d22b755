"""Which images a recipe keeps, and in which split, as far as labels and splits determine it without reading images.

For dry runs: applies the rules of `plan_shards.py` and `sort_records.py` to counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.plan.plan_shards import Base, class_map_of
from vitline.data_prep.sources.raw import ImageSource

Tables = Callable[[], Iterable[pa.Table]]
"""Labels and splits of some images, table by table; every call starts again."""


@dataclass
class Kept:
    """Images that stay, before duplicates are dropped."""

    splits: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    """Images of which no class is kept, by reason."""
    num_small: int = 0
    """Number of classes that are left out because they are too small."""
    labels: Counter[str] = field(default_factory=Counter)
    """Images of every label, kept or not."""
    num_drawn: int = 0
    """Images whose splits are drawn from pixels that are not known yet; counted as their ids would draw them."""
    train_at_most: int = 0

    @property
    def total(self) -> int:
        """Images that stay or are lost, at least 1."""
        return max(1, self.splits.total() + self.lost.total())

    @property
    def share(self) -> float:
        """Share of the images that stay."""
        return self.splits.total() / self.total


def kept_rows(
    tables: Tables, config: CorpusConfig, source: ImageSource, base: Base | None, *, examined: bool = True
) -> Kept:
    """What class map, `min_images_per_class` and `val_per_class` keep if all images are readable. `examined`: the images were
    decoded, so splits drawn from pixels are final.

    Memory holds one number per class, whatever the number of images.
    """
    kept = Kept()
    for table in tables():
        kept.labels.update(counts(pc.list_flatten(table["labels"])))
    classes = set(class_map_of(config, source, kept.labels, base).source_ids)
    reason = "unknown_class" if config.recipe.class_map else "small_class"
    kept.num_small = len(kept.labels.keys() - classes) if reason == "small_class" else 0
    in_train, has_val, moved, drawn = Counter[str](), False, 0, Counter[str]()
    names = pa.array(sorted(classes), pa.string())
    for table in tables():
        has_val = has_val or pc.any(pc.equal(table["split"], "val")).as_py() is True
        stays = _any_of(table["labels"].combine_chunks(), names)
        kept.lost[reason] += len(table) - (pc.sum(stays).as_py() or 0)
        rows = table.filter(stays)
        kept.splits.update(counts(rows["split"]))
        if not examined:
            shares_drawn = pc.fill_null(pc.add(rows["val_fraction"], rows["test_fraction"]), 0.0)
            drawn.update(counts(rows.filter(pc.greater(shares_drawn, 0.0))["split"]))
        in_train.update(counts(pc.list_element(rows.filter(pc.equal(rows["split"], "train"))["labels"], 0)))
    if (per_class := config.recipe.val_per_class) and not has_val:
        moved = per_class * sum(count >= 2 * per_class for count in in_train.values())
        kept.splits.update({"train": -moved, "val": moved})
    kept.splits, kept.lost, kept.num_drawn = +kept.splits, +kept.lost, drawn.total()
    kept.train_at_most = kept.splits["train"] + (kept.num_drawn and moved + kept.num_drawn - drawn["train"])
    return kept


def _any_of(labels: pa.ListArray, names: pa.Array) -> pa.Array:
    """Whether a list of labels contains one of these names."""
    if not len(labels):
        return pa.array([], pa.bool_())
    known = pc.is_in(pc.list_flatten(labels), names)
    owners = pc.list_parent_indices(labels).filter(known)
    return pc.is_in(pa.array(range(len(labels)), pa.int64()), owners.cast(pa.int64()))


def counts(values: pa.ChunkedArray | pa.Array) -> dict[str, int]:
    """Number of occurrences of each value."""
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(values).to_pylist()}


def shares(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """Split `total` in proportion to `parts`, exactly; entries that get nothing are left out."""
    every = sum(parts.values())
    exact = {name: total * count / every for name, count in parts.items()}
    rounded = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: rounded[name] - exact[name])[: total - sum(rounded.values())]:
        rounded[name] += 1
    return {name: rows for name, rows in rounded.items() if rows}
