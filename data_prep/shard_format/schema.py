"""The columns of a shard."""

import json
from typing import Any

import pyarrow as pa


def shard_schema(*, single_label: bool, has_weights: bool) -> pa.Schema:
    """Columns of every shard of a corpus, with the Hugging Face `Image` feature declared in the metadata."""
    label_columns: list[pa.Field] = [pa.field("labels", pa.list_(pa.int32()), nullable=False)]
    if single_label:
        label_columns.append(pa.field("label", pa.int32(), nullable=False))
    if has_weights:
        label_columns.append(pa.field("weights", pa.list_(pa.float32()), nullable=False))
    fields = [
        # Nullable, though never null: `datasets` ignores the declared Image feature of a non-nullable field.
        pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *label_columns,
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("group", pa.string()),  # examples of one group share a split; null: no group
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("pixel_sha256", pa.binary(), nullable=False),
        pa.field("phash", pa.binary(), nullable=False),
        pa.field("phash_mirror", pa.binary(), nullable=False),
        pa.field("width_px", pa.int32(), nullable=False),
        pa.field("height_px", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
    features = {field.name: _huggingface_feature(field) for field in fields}
    return pa.schema(fields, metadata={b"huggingface": json.dumps({"info": {"features": features}}).encode()})


def _huggingface_feature(field: pa.Field) -> dict[str, Any]:
    if field.name == "image":
        return {"_type": "Image"}
    if pa.types.is_list(field.type):
        return {"feature": {"dtype": str(field.type.value_type), "_type": "Value"}, "_type": "Sequence"}
    return {"dtype": str(field.type), "_type": "Value"}
