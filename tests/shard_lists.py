"""The identities of shards that a test writes by hand, and their list."""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq

from vitline.data_prep.parquet_files import write_table
from vitline.data_prep.prepare.publish import SHARDS_SCHEMA
from vitline.data_prep.shard_format import SHARDS_KEY, Manifest, ShardIdentity
from vitline.data_prep.shards.content_digest import table_content_digest
from vitline.data_prep.shards.write_shards import HashingSink
from vitline.infra.config import replace
from vitline.infra.storage import Store


def with_shard_list(store: Store, manifest: Manifest) -> Manifest:
    """Writes shards.parquet for the shards of `manifest`, which get identities; the manifest with the digests of its splits."""
    lines = {}
    for split in manifest.splits.values():
        for _, key in split.keys_in_use():
            rows = _with_identity(store, manifest.name, key)
            data = store.read(key)
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
    return replace(manifest, splits=splits)


def _with_identity(store: Store, corpus: str, key: str) -> pa.Table:
    """Writes a shard again with its identity; its rows."""
    file = pq.ParquetFile(pa.BufferReader(store.read(key)))
    rows, digest = file.read(), table_content_digest(file.read())
    with store.writer(key) as out:
        sink = HashingSink(out)
        with pq.ParquetWriter(sink, rows.schema, compression="none", write_page_checksum=True) as writer:
            writer.write_table(rows, row_group_size=file.metadata.row_group(0).num_rows)
            identity = ShardIdentity(corpus=corpus, key=key, content_digest=digest, data_bytes=sink.num_bytes)
            writer.add_key_value_metadata(identity.as_metadata())
    return rows
