"""The shard list of a corpus that a test writes by hand, as schema version 1 has it: its shards state no identity."""

import hashlib

import pyarrow as pa

from vitline.data_prep.parquet_files import read_parquet
from vitline.data_prep.prepare.publish import SHARDS_SCHEMA
from vitline.data_prep.records import write_table
from vitline.data_prep.shard_format import SHARDS_KEY, Manifest
from vitline.data_prep.shards.content_digest import table_content_digest
from vitline.infra.config import replace
from vitline.infra.storage import Store


def with_shard_list(store: Store, manifest: Manifest) -> Manifest:
    """Writes shards.parquet for the shards of `manifest`; the manifest with the digests of its splits."""
    lines = {}
    for split in manifest.splits.values():
        for _, key in split.keys_in_use():
            data = store.read(key)
            rows = read_parquet(pa.BufferReader(data))
            lines[key] = {
                "key": key,
                "version": "",
                "num_rows": len(rows),
                "num_bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "content_digest": table_content_digest(rows),
            }
    write_table(store, SHARDS_KEY, pa.Table.from_pylist([*lines.values()], schema=SHARDS_SCHEMA))
    digests = {key: line["content_digest"] for key, line in lines.items()}
    splits = {
        name: replace(split, digest=split.digest_over(manifest.class_map_digest, digests))
        for name, split in manifest.splits.items()
    }
    return replace(manifest, schema_version=1, splits=splits)
