"""Bucket files of planning: each task of one step writes a file, each task of the next reads its bucket of all these files."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from vitline.data_prep.partitions import read_partition, write_by_key
from vitline.data_prep.records import PLAN
from vitline.infra.storage import Store


class Buckets(NamedTuple):
    """The bucket files of one kind in a corpus."""

    corpus: Store
    kind: str
    num_files: int
    num_buckets: int

    def write(self, file: int, table: pa.Table, keys: np.ndarray) -> None:
        """Write the file of one task: its rows by the range of their uniform uint64 keys."""
        write_by_key(self.corpus, self._key(file), table, keys, self.num_buckets)

    def read(self, bucket: int, schema: pa.Schema) -> pa.Table:
        """The rows of one bucket in all files. Raises FileNotFoundError if a file is missing."""
        return read_partition(self.corpus, self._keys(), bucket, schema)

    def delete(self) -> None:
        for key in self._keys():
            self.corpus.delete(key)

    def _keys(self) -> list[str]:
        return [self._key(file) for file in range(self.num_files)]

    def _key(self, file: int) -> str:
        return f"{PLAN}/{self.kind}/{file:05d}.bin"
