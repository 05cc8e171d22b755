"""Pictures that occur more than once: which of them stays.

Bytes or only decoded pixels equal, both count. Of a set of equal pictures the one stays that is in the corpus already,
else the one in an evaluation split (test, then val, then train), then the one with the smallest sha256, then the
smallest id. Two splits never share a picture.
"""

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LOCATOR_SCHEMA = pa.schema(
    [
        pa.field("base", pa.string()),
        pa.field("key", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int64()),
    ]
)
PIXELS_SCHEMA = pa.schema(
    [
        pa.field("pixel_sha256", pa.binary()),
        pa.field("sha256", pa.binary()),
        pa.field("split", pa.string()),
        pa.field("example_id", pa.string()),
        pa.field("order_key", pa.uint64()),
        pa.field("labels", pa.list_(pa.string())),
        *LOCATOR_SCHEMA,
        pa.field("known", pa.bool_()),  # in the corpus already, in a segment that stays as it is
    ]
)
DROPS_SCHEMA = pa.schema(
    [
        pa.field("order_key", pa.uint64()),
        pa.field("example_id", pa.string()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("reason", pa.string()),  # of RejectReason
        pa.field("kind", pa.string()),  # same_file, same_pixels or near
        pa.field("detail", pa.string()),
        pa.field("labels_differ", pa.bool_()),
        pa.field("other_corpus", pa.string()),  # NAME/VERSION of another corpus; null: this one
        pa.field("other_split", pa.string()),
        pa.field("other_id", pa.string()),  # the example that stays instead
        *(field.with_name(f"other_{field.name}") for field in LOCATOR_SCHEMA),
    ]
)
"""What goes, and the picture that it repeats."""
_SPLIT_RANK = {"test": 0, "val": 1, "train": 2}


def exact_duplicates(rows: pa.Table, policy: Literal["drop", "keep"]) -> pa.Table:
    """Of `rows` (PIXELS_SCHEMA, all rows of their pixel hashes) those that go, as DROPS_SCHEMA.

    Under "keep" only those go that lie in another split than the one that stays.
    """
    known = rows["known"].to_numpy()
    ranks = np.array([_SPLIT_RANK.get(split, len(_SPLIT_RANK)) for split in rows["split"].to_pylist()], dtype=np.int8)
    keys = pa.table(
        {
            "pixels": rows["pixel_sha256"].combine_chunks(),
            "rank": np.where(known, -1, ranks),
            "sha256": rows["sha256"].combine_chunks(),
            "example_id": rows["example_id"].combine_chunks(),
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names]).to_numpy()
    codes = keys["pixels"].combine_chunks().dictionary_encode().indices.to_numpy()[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = codes[1:] != codes[:-1]
    # The kept row of every position: the last set start at or before it.
    kept = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    crossing = ranks[order] != ranks[kept]
    goes = ~first & ~known[order] & (crossing | (policy == "drop"))
    return _drops(rows.take(pa.array(order[goes])), rows.take(pa.array(kept[goes])))


def _drops(goes: pa.Table, stays: pa.Table) -> pa.Table:
    pairs = list(zip(goes.to_pylist(), stays.to_pylist(), strict=True))
    kinds = ["same_file" if gone["sha256"] == kept["sha256"] else "same_pixels" for gone, kept in pairs]
    return drops_table(
        goes,
        stays,
        reason="duplicate",
        kinds=kinds,
        details=[_detail(kind, gone, kept) for kind, (gone, kept) in zip(kinds, pairs, strict=True)],
        labels_differ=[not kept["known"] and gone["labels"] != kept["labels"] for gone, kept in pairs],
    )


def drops_table(
    goes: pa.Table,
    stays: pa.Table,
    *,
    reason: str,
    kinds: list[str],
    details: list[str],
    labels_differ: list[bool],
    other_corpus: list[str | None] | None = None,
) -> pa.Table:
    """Rows of DROPS_SCHEMA: row i of `goes` is left out for row i of `stays`."""
    columns = {
        **{name: goes[name] for name in ("order_key", "example_id", "labels")},
        "reason": pa.repeat(reason, len(goes)),
        "kind": pa.array(kinds, pa.string()),
        "detail": pa.array(details, pa.string()),
        "labels_differ": pa.array(labels_differ, pa.bool_()),
        "other_corpus": pa.array(other_corpus or [None] * len(goes), pa.string()),
        "other_split": stays["split"],
        "other_id": stays["example_id"],
        **{f"other_{name}": stays[name] for name in LOCATOR_SCHEMA.names},
    }
    return pa.table(columns).select(DROPS_SCHEMA.names).cast(DROPS_SCHEMA)


def _detail(kind: str, gone: dict, kept: dict) -> str:
    text = f"{kind.replace('_', ' ')} as {kept['example_id']}"
    if kept["known"]:
        text += ", which is in the corpus already"
    if gone["split"] != kept["split"]:
        text += f", which stays in {kept['split']} and would be in {gone['split']} too"
    if gone["labels"] != kept["labels"] and not kept["known"]:
        text += f", labelled {kept['labels']} and here {gone['labels']}"
    return text
