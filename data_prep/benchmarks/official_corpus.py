"""A benchmark as a corpus: the official splits of a data set, as slices of TFDS splits, read from its official files.

Rows are in the order of TFDS, so train800 is the first 800 rows of train and val200 the first 200 rows of val. An example id is the
TFDS split and the key that TFDS gives the example, such as train/Abyssinian_100.jpg: the order and the splits can be computed
again from the ids.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from vitline.data_prep.benchmarks.image_files import place_of
from vitline.data_prep.benchmarks.official_files import files_fingerprint
from vitline.data_prep.benchmarks.official_splits import OfficialSplits, Views, order_key
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.labels.classes import ClassInfo, number_label
from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.sources.folder_layout import readable_id
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, Spill, WorkFolder


class OfficialCorpus(ImageSource):
    """The corpus of a data set with official splits. Its parts are those of the files of the data set."""

    def __init__(self, data: BenchmarkData, official_splits: OfficialSplits, views: Views) -> None:
        self._data, self._official_splits, self.views = data, official_splits, views
        self.origin, self.credit = data.store.uri, f"{data.official.title}; {data.official.terms}"
        self.benchmark_rows = official_splits.num_rows
        self._positions: dict[str, Mapping[Key, int] | np.ndarray] = {}

    def fingerprint(self) -> str:
        return files_fingerprint(self._data.files())

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        files, keys = self._data.files(), self._data.keys()
        for split, expected in self._official_splits.sizes.items():
            if (there := len(keys.get(split, ()))) != expected:
                examples = f"{there:,} examples of {split}"
                raise self._data.official.incomplete(self._data.store, files, examples, expected)
            _save_positions(work, split, keys[split])
        yield from self._data.parts(work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        with Spill(work, part) as spill:
            for found in self._data.images(part, work):
                if found.refused:
                    example_id = readable_id(f"{found.split}/{found.key}")
                    yield RawExample(example_id, (), "train", spill.base, spill.key, refused=found.refused)
                elif example := self._example(found, work, spill):
                    yield example

    def declared_classes(self) -> tuple[str, ...]:
        return tuple(number_label(number) for number in range(len(self._data.class_names())))

    def class_info(self, source_id: str) -> ClassInfo:
        return ClassInfo(name=self._data.class_names()[int(source_id)], source_id=source_id)

    def _example(self, found: Found, work: WorkFolder, spill: Spill) -> RawExample | None:
        """The example, or None if the benchmark does not use it."""
        position = self._position(found.split, found.key, work)
        split = None if position is None else self._official_splits.split_of(found.split, position)
        if position is None or split is None or found.data is None:
            return None
        return RawExample(
            example_id=f"{found.split}/{found.key}",
            labels=(number_label(found.label),),
            split=split,
            data=found.data,
            order_key=order_key(position, self._official_splits.sizes[found.split]),
            **place_of(self._data.store, found.where, found.data, spill),
        )

    def _position(self, split: str, key: Key, work: WorkFolder) -> int | None:
        if split not in self._official_splits.sizes:
            return None
        if split not in self._positions:
            self._positions[split] = _load_positions(work, split)
        positions = self._positions[split]
        if isinstance(positions, np.ndarray):
            return int(positions[int(key)]) if 0 <= int(key) < len(positions) else None
        return positions.get(key)


def _save_positions(work: WorkFolder, split: str, keys: Sequence[Key]) -> None:
    """Save the position of every key in the order of TFDS, for the workers."""
    positions = np.empty(len(keys), np.int64)
    positions[tfds_order(split, keys)] = np.arange(len(keys))
    columns = {"position": pa.array(positions)}
    if not isinstance(keys, range):
        columns["key"] = pa.array([str(key) for key in keys])
    write_table(work.store, f"positions/{split}.parquet", pa.table(columns))


def _load_positions(work: WorkFolder, split: str) -> Mapping[Key, int] | np.ndarray:
    """Positions by key; an array if the keys are the numbers from 0 on."""
    table = read_table(work.store, f"positions/{split}.parquet")
    positions: np.ndarray = table["position"].to_numpy()
    if "key" not in table.column_names:
        return positions
    return dict(zip(table["key"].to_pylist(), positions.tolist(), strict=True))
