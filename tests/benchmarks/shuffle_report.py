"""How well a reading order shuffles: figures of its batches, and the same figures of perfect shuffles. No image is read.

    .venv/bin/python tests/benchmarks/shuffle_report.py CORPUS --recipe NAME [--root ROOT] [--batches 64]

Prints each figure of the batches of such a training beside its mean and range over perfect shuffles. `shuffle_floor.py` measures
what a low class entropy costs.

A perfect shuffle is a random order of all rows, drawn anew for every epoch. Order inside a batch has no effect on an update,
so a batch counts as a set.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.shard_format import Manifest, ShardReader
from vitline.flows.cli.training import requested_training
from vitline.infra.settings import Settings
from vitline.infra.storage import Store
from vitline.vit.input.order import Ints, Order, Rows
from vitline.vit.input.permutation import KeyedPermutation, derive_key, hash64

LEAST_ENTROPY_FRACTION = 0.97
"""Measured: below it a network loses a point of accuracy and more (tests/benchmarks/shuffle_floor.py)."""
MOST_ROWS = 2_000_000
"""Rows whose columns are read at most. The process then takes 0.6 GB."""
# One more order that is a perfect shuffle, too, lies outside the range of 39 others once in 20 times.
_PERFECT_SHUFFLES = 39
_COLUMNS = ("labels", "example_id", "source")
_STORE_THREADS, _FILE_THREADS = 32, 2


@dataclass(frozen=True)
class Figure:
    """One figure of an order; mean, lowest and highest value of perfect shuffles (a range that holds 95 % of them)."""

    value: float
    perfect: float
    low: float
    high: float


@dataclass(frozen=True)
class ShuffleReport:
    """Figures of some batches: means over the batches, and distances of the examples in them."""

    num_batches: int
    num_rows: int
    """Rows whose labels were read: all of the split, or those of the row groups that the batches are from."""
    num_row_groups: int
    num_sources: int
    class_entropy_bits: Figure
    """Entropy of the labels in a batch."""
    row_group_pairs: Figure
    """Pairs of examples of a batch that are stored in one row group."""
    source_pairs: Figure
    """Pairs of examples of a batch that are from one source."""
    neighbours: Figure
    """Pairs of examples of a batch that follow each other in a source, in the order of the example ids that were read."""
    shortest_repeat: Figure
    """Positions between two reads of an example: the least of all examples in the batches."""
    median_repeat: Figure
    """Their median. A perfect shuffle has about the size of an epoch."""

    @property
    def entropy_fraction(self) -> float:
        """Class entropy as a fraction of that of a perfect shuffle; 1 where there is one class only."""
        figure = self.class_entropy_bits
        return figure.value / figure.perfect if figure.perfect else 1.0

    @property
    def lower_than_chance(self) -> bool:
        """True if the class entropy is twice as far below the mean of perfect shuffles as the lowest of them."""
        figure = self.class_entropy_bits
        return figure.perfect - figure.value > 2 * (figure.perfect - figure.low)

    @property
    def too_low(self) -> bool:
        """True if the class entropy is below the floor, and lower than chance explains."""
        return self.entropy_fraction < LEAST_ENTROPY_FRACTION and self.lower_than_chance


class SmallColumns:
    """Labels, example ids and sources of a split: about 300 bytes a row, one range request per row group.

    Also keeps what was read last, because orders that are compared mostly need the same row groups.
    """

    def __init__(self, corpus: Store, manifest: Manifest, split: str) -> None:
        self._reader = ShardReader(corpus, manifest, split)
        self._threads = _STORE_THREADS if corpus.high_latency else _FILE_THREADS
        self._last: tuple[list[int], _Pool] | None = None

    def pool(self, row_groups: Ints) -> "_Pool":
        """The rows of ascending row groups. Raises ShardError as `ShardReader.row_group`."""
        wanted = row_groups.tolist()
        if self._last is None or self._last[0] != wanted:
            self._last = None  # both at once might not fit into memory
            self._last = wanted, _Pool(row_groups, list(self._tables(wanted)))
        return self._last[1]

    def _tables(self, row_groups: list[int]) -> Iterator[pa.Table]:
        threads = ThreadPoolExecutor(self._threads, thread_name_prefix="small-columns")
        try:
            yield from threads.map(lambda group: self._reader.row_group(group, columns=_COLUMNS), row_groups)
        finally:
            threads.shutdown(cancel_futures=True)


def shuffle_report(
    order: Order, columns: SmallColumns, *, num_batches: int = 64, most_rows: int = MOST_ROWS
) -> ShuffleReport:
    """Figures of `num_batches` batches, spread evenly over the first epoch; of the first ones if an epoch has fewer.

    A split of more than `most_rows` rows is sampled: there are only as many batches as need no more rows (one batch at
    least), and perfect shuffles are drawn from the rows of their row groups.
    """
    sample = _Sample.of(order, columns, num_batches, most_rows)
    pool, rows = sample.pool, sample.rows
    read = _figures(pool, pool.index(rows)) | sample.repeats(order.position_of(rows.epoch + 1, rows.row))
    perfect = [_perfect(order, sample, trial) for trial in range(_PERFECT_SHUFFLES)]
    figures = {name: _figure(value, [other[name] for other in perfect]) for name, value in read.items()}
    return ShuffleReport(len(rows.row), pool.num_rows, len(pool.row_groups), pool.num_sources, **figures)


class _Pool:
    """Rows that were read, in arrays by index: those of the first row group, of the second, ..."""

    def __init__(self, row_groups: Ints, tables: list[pa.Table]) -> None:
        table, sizes = pa.concat_tables(tables).combine_chunks(), np.array([len(each) for each in tables])
        self.row_groups, self.num_rows = row_groups, len(table)
        self._start = np.cumsum(sizes) - sizes
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        """Number of the row group, counted over those that were read."""
        self.num_labels = pc.list_value_length(table["labels"]).to_numpy().astype(np.int64)
        self.labels = pc.list_flatten(table["labels"]).to_numpy().astype(np.int64)
        self.first_label = np.cumsum(self.num_labels) - self.num_labels
        source = pc.dictionary_encode(table["source"]).combine_chunks()
        self.source, self.num_sources = source.indices.to_numpy().astype(np.int64), len(source.dictionary)
        by_source = pc.sort_indices(table, sort_keys=[("source", "ascending"), ("example_id", "ascending")]).to_numpy()
        self.place = np.empty(len(table), dtype=np.int64)
        self.place[by_source] = np.arange(len(table)) + np.cumsum(np.diff(self.source[by_source], prepend=0) != 0)
        """Place in its source; the places of two sources are not consecutive."""

    def index(self, rows: Rows) -> Ints:
        index: Ints = self._start[np.searchsorted(self.row_groups, rows.row_group)] + rows.row_in_group
        return index


@dataclass(frozen=True)
class _Sample:
    """The batches of a report."""

    positions: Ints
    """Shape (batches, B)."""
    rows: Rows
    pool: _Pool
    """Holds all these rows."""

    @classmethod
    def of(cls, order: Order, columns: SmallColumns, num_batches: int, most_rows: int) -> "_Sample":
        last = max(num_batches, order.num_rows // order.global_batch_size) - 1
        while True:
            batches = np.linspace(0, last, num_batches).astype(np.int64)
            positions = np.stack([order.slots(batch) for batch in batches.tolist()])
            rows = order.locate(positions)
            if order.num_rows <= most_rows:
                return cls(positions, rows, columns.pool(np.arange(order.groups.num_groups)))
            groups = np.unique(rows.row_group)
            num_rows = int(order.groups.size(groups).sum())
            if num_rows <= most_rows or num_batches == 1:
                return cls(positions, rows, columns.pool(groups))
            num_batches = max(1, min(num_batches - 1, num_batches * most_rows // num_rows))

    def repeats(self, next_positions: Ints) -> dict[str, float]:
        distances = next_positions - self.positions
        return {"shortest_repeat": float(distances.min()), "median_repeat": float(np.median(distances))}


def _perfect(order: Order, sample: _Sample, trial: int) -> dict[str, float]:
    """The figures of a perfect shuffle at the same positions."""
    key, epoch, later = derive_key(0, "shuffle_report", trial), sample.rows.epoch, sample.rows.epoch + 1
    in_epoch = np.arange(epoch.size) - np.searchsorted(epoch.ravel(), epoch.ravel())
    drawn = KeyedPermutation(sample.pool.num_rows, hash64(key, 0, epoch))(in_epoch.reshape(epoch.shape))
    place = KeyedPermutation(order.num_rows, hash64(key, 1, later))(sample.rows.row)
    figures = _figures(sample.pool, drawn)
    figures["row_group_pairs"] *= sample.pool.num_rows / order.num_rows  # the split has more row groups than a sample
    return figures | sample.repeats(later * order.num_rows + place)


def _figures(pool: _Pool, index: Ints) -> dict[str, float]:
    """Means over batches; `index` (batches, B) are rows of the pool."""
    return {
        "class_entropy_bits": float(_entropy_bits(pool, index).mean()),
        "row_group_pairs": _pairs(pool.group[index]),
        "source_pairs": _pairs(pool.source[index]),
        "neighbours": float((np.diff(np.sort(pool.place[index], axis=1), axis=1) == 1).sum() / len(index)),
    }


def _entropy_bits(pool: _Pool, index: Ints) -> np.ndarray:
    """Entropy of the labels of each batch; every label of an example counts once, whatever its weight."""
    flat = index.ravel()
    num_labels = pool.num_labels[flat]
    ends = np.cumsum(num_labels)
    at = np.arange(num_labels.sum()) + np.repeat(pool.first_label[flat] - (ends - num_labels), num_labels)
    batch = np.repeat(np.arange(index.size) // index.shape[1], num_labels)
    of_batch, counts = _counts(batch, pool.labels[at])
    total = np.bincount(batch, minlength=len(index))
    share = counts / total[of_batch]
    return np.bincount(of_batch, weights=-share * np.log2(share), minlength=len(index))


def _pairs(values: Ints) -> float:
    """Pairs of equal values in a batch, on average; shape (batches, B)."""
    batch = np.repeat(np.arange(len(values)), values.shape[1])
    _, counts = _counts(batch, values.ravel())
    return float((counts * (counts - 1) // 2).sum() / len(values))


def _counts(batch: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Batch and count of every distinct pair (batch, value)."""
    size = int(values.max(initial=0)) + 1
    found, counts = np.unique(batch * size + values, return_counts=True)
    return found // size, counts


def _figure(value: float, perfect: list[float]) -> Figure:
    return Figure(value, float(np.mean(perfect)), min(perfect), max(perfect))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--root", default=Settings().root)
    parser.add_argument("--batches", type=int, default=64)
    asked = parser.parse_args()
    training = requested_training(asked.root, [asked.corpus], asked.recipe, {"overrides": {}})
    config, (corpus,) = training.config, training.corpora.parts
    order = corpus.order(config.split, config.recipe.input, config.recipe.seed)
    columns = SmallColumns(corpus.store, corpus.manifest, config.split)
    report = shuffle_report(order, columns, num_batches=asked.batches)
    for field in fields(report):
        value = getattr(report, field.name)
        if isinstance(value, Figure):
            print(
                f"{field.name}: {value.value:,.3f}; perfect {value.perfect:,.3f}, {value.low:,.3f} to {value.high:,.3f}"
            )
        else:
            print(f"{field.name}: {value:,}")
    print(f"class entropy: {report.entropy_fraction:.1%} of a perfect shuffle{', too low' if report.too_low else ''}")


if __name__ == "__main__":
    main()
