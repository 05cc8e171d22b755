"""The contract between writer and readers of a corpus: Parquet schema, manifest, row-group arithmetic, row-group reader.

    <root>/corpora/<name>/<version>/<split>/<segment>/part-00000-of-00004.parquet, classes.json, manifest.json (last)

`ShardReader` raises ShardError for a shard that does not match the manifest, or whose identity, which it carries in its own Parquet
metadata, is not that of the shard that the manifest lists. Imports neither torch nor Ray.
"""

from vitline.data_prep.shard_format.identity import (
    KnownShard,
    ListedShard,
    ShardError,
    ShardIdentity,
    known_shards,
    listed_shards,
)
from vitline.data_prep.shard_format.manifest import (
    CARD_KEY,
    CLASSES_KEY,
    LEAKAGE_KEY,
    MANIFEST_KEY,
    REJECTS_KEY,
    REPORT_KEY,
    SCHEMA_VERSION,
    SHARDS_KEY,
    CorpusVersion,
    Counts,
    Manifest,
    SegmentInfo,
    SplitInfo,
    ViewOrigin,
    first_rows,
    load_class_names,
    load_classes,
    load_manifest,
    segment_keys,
    segment_store,
    shard_key,
)
from vitline.data_prep.shard_format.open_checked import check_shard, open_shard
from vitline.data_prep.shard_format.reader import ShardReader, read_row_group
from vitline.data_prep.shard_format.schema import shard_schema

__all__ = [
    "CARD_KEY",
    "CLASSES_KEY",
    "LEAKAGE_KEY",
    "MANIFEST_KEY",
    "REJECTS_KEY",
    "REPORT_KEY",
    "SCHEMA_VERSION",
    "SHARDS_KEY",
    "CorpusVersion",
    "Counts",
    "KnownShard",
    "ListedShard",
    "Manifest",
    "SegmentInfo",
    "ShardError",
    "ShardIdentity",
    "ShardReader",
    "SplitInfo",
    "ViewOrigin",
    "check_shard",
    "first_rows",
    "known_shards",
    "listed_shards",
    "load_class_names",
    "load_classes",
    "load_manifest",
    "open_shard",
    "read_row_group",
    "segment_keys",
    "segment_store",
    "shard_key",
    "shard_schema",
]
