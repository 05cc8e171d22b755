"""How the labels of one corpus become classes of a mixture, and which of its rows stay where classes are dropped.

The reading order counts the rows that stay, so dropped ones take no place in a batch. It needs to know how many each row group
has, which is found by reading the labels once.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from vitline.data_prep.shard_format import Manifest, ShardReader
from vitline.infra.storage import Store
from vitline.vit.input.decoded_cache import Label
from vitline.vit.input.order import Ints, RowGroups

LabelMap = tuple[int | None, ...]
"""Entry i is the class in the mixture for label i of the corpus; None for a class that is dropped."""
_STORE_THREADS, _FILE_THREADS = 32, 2


@dataclass(frozen=True)
class KeptRows:
    """The rows of a split that stay, row group by row group."""

    row_groups: Ints
    """The row groups that have such rows, ascending."""
    sizes: Ints
    """How many each of them has."""

    @property
    def groups(self) -> RowGroups:
        return RowGroups.of_sizes(self.sizes)


@dataclass(frozen=True)
class MappedLabels:
    """The labels of one corpus in a mixture of `num_classes` classes. Raises ValueError for a class that it does not have."""

    label_map: LabelMap
    num_classes: int
    single_label: bool
    """Whether all corpora of the mixture have one label per image."""
    kept: KeptRows | None = None
    """The rows of the split that stay; None where no class is dropped."""

    def __post_init__(self) -> None:
        targets = [target for target in self.label_map if target is not None]
        if targets and not 0 <= min(targets) <= max(targets) < self.num_classes:
            raise ValueError(
                f"The class map has classes {min(targets)} to {max(targets)}, but the mixture has classes 0 to "
                f"{self.num_classes - 1}. Correct the class map."
            )
        if self.drops and self.kept is None:
            raise ValueError("The class map drops classes, but the rows that stay are not known. Find them first.")

    @property
    def drops(self) -> bool:
        return None in self.label_map

    def __call__(self, label: Label) -> Label:
        """The label in the classes of the mixture, for an example that stays."""
        if isinstance(label, int):
            target = self.label_map[label]
            assert target is not None, label
            return target
        targets = [self.label_map[i] for i in label[0]]
        weights = label[1] and [w for target, w in zip(targets, label[1], strict=True) if target is not None]
        return [target for target in targets if target is not None], weights


def keeps(label: Label, label_map: LabelMap) -> bool:
    """Whether an example stays: all but those whose classes are all dropped."""
    if isinstance(label, int):
        return label_map[label] is not None
    return not label[0] or any(label_map[i] is not None for i in label[0])


def kept_indices(labels: Sequence[Label], label_map: LabelMap) -> list[int]:
    """The positions of the labels whose examples stay."""
    return [i for i, label in enumerate(labels) if keeps(label, label_map)]


def find_kept_rows(corpus: Store, manifest: Manifest, split: str, label_map: LabelMap) -> KeptRows:
    """Counts the rows that stay by reading the labels of a split, one range request per row group.

    Raises ValueError if there are none, ShardError like `ShardReader.row_group`.
    """
    workers = _STORE_THREADS if corpus.high_latency else _FILE_THREADS
    with ShardReader(corpus, manifest, split) as reader, ThreadPoolExecutor(workers, "labels") as threads:
        count = partial(_num_kept, reader, manifest.single_label, label_map)
        sizes = np.fromiter(threads.map(count, range(reader.split.num_row_groups)), dtype=np.int64)
    row_groups = np.flatnonzero(sizes)
    if not row_groups.size:
        raise ValueError(
            f"The class map drops every example of split {split!r} of {corpus.uri}. Keep a class of it, or leave the corpus out."
        )
    return KeptRows(row_groups, sizes[row_groups])


def _num_kept(reader: ShardReader, single_label: bool, label_map: LabelMap, row_group: int) -> int:
    if single_label:
        labels = reader.row_group(row_group, columns=["label"]).column("label").to_numpy()
        return int(np.array([target is not None for target in label_map])[labels].sum())
    lists = reader.row_group(row_group, columns=["labels"]).column("labels").to_pylist()
    return len(kept_indices([(classes, None) for classes in lists], label_map))
