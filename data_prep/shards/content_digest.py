"""Content digests of shards, splits and corpora, as sha256: equal on every store, for any number of workers and any version."""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from vitline.data_prep.shard_format import SplitInfo
from vitline.infra.config import digest_of

_DIGEST_FORMAT = 1
"""Format of what the corpus digest covers. It is not the schema version of the manifest: equal rows have equal digests."""
RowContent: TypeAlias = tuple[str, bytes, Iterable[int], Iterable[float] | None]
"""Example id, sha256 of the image bytes, labels, weights."""


def content_digest(rows: Iterable[RowContent]) -> str:
    """sha256 over the content of rows, independent of how they are stored.

    Every field is preceded by its length, so different lists of rows never have the same encoding.
    """
    digest = hashlib.sha256()
    for example_id, sha256, labels, weights in rows:
        name, ids, values = example_id.encode(), list(labels), list(weights or ())
        digest.update(struct.pack(f"<I{len(name)}sI{len(sha256)}s", len(name), name, len(sha256), sha256))
        digest.update(struct.pack(f"<I{len(ids)}iI{len(values)}f", len(ids), *ids, len(values), *values))
    return digest.hexdigest()


def table_content_digest(table: pa.Table) -> str:
    """`content_digest` of the rows of a shard or row group; the image column is not needed."""
    weights: Iterable[Any] = table["weights"].to_pylist() if "weights" in table.column_names else [None] * len(table)
    columns = (table[name].to_pylist() for name in ("example_id", "sha256", "labels"))
    return content_digest(zip(*columns, weights, strict=True))


def corpus_digest(class_map_digest: str, splits: Mapping[str, SplitInfo], shard_digests: Mapping[str, str]) -> str:
    """Digest of a corpus: format, class map, and layout and shards of each split."""
    layouts = {name: split.layout(shard_digests) for name, split in splits.items()}
    return digest_of({"schema_version": _DIGEST_FORMAT, "class_map": class_map_digest, "splits": layouts})
