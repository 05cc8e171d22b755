"""Which pictures the rules of a recipe keep, and in which split, as far as labels and splits say it without the pictures.

For dry runs: the rules are those of `plan_shards.py` and `sort_records.py`, applied to counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.config import CorpusConfig
from data_prep.corpora.raw import RawCorpus
from data_prep.labels.class_maps import load_class_map
from data_prep.plan.plan_shards import Base

Tables = Callable[[], Iterable[pa.Table]]
"""Labels and splits of some pictures, a table at a time, anew at every call."""


@dataclass
class Kept:
    """Pictures that stay, before duplicates are dropped."""

    splits: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    """By reason, those of which no class is kept."""
    num_small: int = 0
    """Classes that are left out as they are small."""
    largest: tuple[str, int] = ("", 0)
    """The class with the most pictures, kept or not."""
    num_drawn: int = 0
    """Pictures whose splits are drawn from their pixels, which nobody knows yet: counted as their ids would draw them."""
    train_at_most: int = 0

    @property
    def share(self) -> float:
        """Of all pictures, what stays."""
        kept = self.splits.total()
        return kept / max(1, kept + self.lost.total())


def kept_rows(
    tables: Tables, config: CorpusConfig, source: RawCorpus, base: Base | None, *, examined: bool = True
) -> Kept:
    """What class map, `min_images_per_class` and `val_per_class` leave of pictures that are all readable; `examined`: so
    that splits drawn from their pixels are known.

    Holds a number for every class, whatever the number of pictures.
    """
    labels = Counter[str]()
    for table in tables():
        labels.update(counts(pc.list_flatten(table["labels"])))
    kept = Kept(largest=max(labels.items(), key=lambda item: (item[1], item[0]), default=("", 0)))
    classes, reason = _classes(labels, config, source, base)
    kept.num_small = len(labels.keys() - classes) if reason == "small_class" else 0
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


def _classes(
    labels: Mapping[str, int], config: CorpusConfig, source: RawCorpus, base: Base | None
) -> tuple[set[str], str]:
    """The classes that a corpus would have, and why others are left out."""
    if config.recipe.class_map:
        return set(load_class_map(config.recipe.class_map).source_ids), "unknown_class"
    if declared := source.declared_classes():
        return set(declared), "unknown_class"
    large = {label for label, count in labels.items() if count >= config.recipe.min_images_per_class}
    return large | set(base.class_map().source_ids if base else ()), "small_class"


def _any_of(labels: pa.ListArray, names: pa.Array) -> pa.Array:
    """Whether a list of labels has one of these names."""
    if not len(labels):
        return pa.array([], pa.bool_())
    known = pc.is_in(pc.list_flatten(labels), names)
    owners = pc.list_parent_indices(labels).filter(known)
    return pc.is_in(pa.array(range(len(labels)), pa.int64()), owners.cast(pa.int64()))


def counts(values: pa.ChunkedArray | pa.Array) -> dict[str, int]:
    """How often each value is there."""
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(values).to_pylist()}


def shares(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` dealt out in proportion, without one more or less; what gets none is left out."""
    every = sum(parts.values())
    exact = {name: total * count / every for name, count in parts.items()}
    dealt = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: dealt[name] - exact[name])[: total - sum(dealt.values())]:
        dealt[name] += 1
    return {name: rows for name, rows in dealt.items() if rows}
