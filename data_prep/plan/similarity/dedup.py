"""Exact duplicates: images with equal bytes or equal decoded pixels, and which of them stays.

Of a set of equal images, the first by these criteria stays: it is in the corpus already; the source names it as test; the source
names it as val; no link leads to it; its group sorts first; it has the smallest sha256; it has the smallest id. A drawn split is not a
criterion: otherwise an image would be in val or test more often the more copies it has. An image is never in two splits. If images
can have several labels, the one that stays gets the labels of its copies.
"""

from typing import Literal, TypedDict

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
        pa.field("val_fraction", pa.float64()),  # null: the split is named by the source
        pa.field("group", pa.string()),
        pa.field("example_id", pa.string()),
        pa.field("order_key", pa.uint64()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("weights", pa.list_(pa.float32())),
        *LOCATOR_SCHEMA,
        pa.field("is_link", pa.bool_()),
        pa.field("known", pa.bool_()),  # in the corpus already, in an existing segment
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
"""Dropped examples, each with the image that it repeats."""
GAINS_SCHEMA = pa.schema(
    [
        pa.field("order_key", pa.uint64()),
        pa.field("example_id", pa.string()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("weights", pa.list_(pa.float32())),
        pa.field("gained", pa.list_(pa.string())),  # the labels that the example did not have itself
    ]
)
"""Labels and weights of an image after those of its copies were merged in."""


class PixelsRow(TypedDict):
    """The fields of a row of PIXELS_SCHEMA that are read one by one."""

    order_key: int
    example_id: str
    split: str
    labels: list[str]
    weights: list[float] | None
    known: bool


class GainsRow(TypedDict):
    """A row of GAINS_SCHEMA."""

    order_key: int
    example_id: str
    labels: list[str]
    weights: list[float] | None
    gained: list[str]


def exact_duplicates(rows: pa.Table, policy: Literal["drop", "keep"], *, several_labels: bool = False) -> pa.Table:
    """The examples to drop among `rows` (PIXELS_SCHEMA, complete for their pixel hashes), as DROPS_SCHEMA.

    With "keep", only examples in another split than the one that stays are dropped. With `several_labels`, the example that
    stays gets the labels of the dropped ones: see `merged_labels`.
    """
    dropped, kept = _equal_pairs(rows, policy)
    return _drops(rows.take(pa.array(dropped)), rows.take(pa.array(kept)), several_labels)


def merged_labels(rows: pa.Table, policy: Literal["drop", "keep"]) -> pa.Table:
    """Examples that stay in `exact_duplicates` and gain labels or larger weights from their dropped copies, as GAINS_SCHEMA:
    first their own labels in order, then the new ones sorted, each with the largest weight.

    Examples that are in the corpus already are not changed.
    """
    dropped, kept = _equal_pairs(rows, policy)
    copies: dict[int, list[int]] = {}
    for row, kept_row in zip(dropped.tolist(), kept.tolist(), strict=True):
        copies.setdefault(kept_row, []).append(row)
    pairs = np.unique(np.concatenate([dropped, kept]))
    taken = dict(zip(pairs.tolist(), rows.take(pa.array(pairs)).to_pylist(), strict=True))
    merged = (
        _merged(taken[kept_row], [taken[row] for row in dropped_rows]) for kept_row, dropped_rows in copies.items()
    )
    return pa.Table.from_pylist([row for row in merged if row], schema=GAINS_SCHEMA)


def _merged(kept: PixelsRow, copies: list[PixelsRow]) -> GainsRow | None:
    """A row of GAINS_SCHEMA; None if the copies add nothing."""
    weights: dict[str, float] = {}
    for row in (kept, *copies):
        for label, weight in zip(row["labels"], row["weights"] or [0.0] * len(row["labels"]), strict=True):
            weights[label] = max(weight, weights.get(label, weight))
    gained = sorted(weights.keys() - set(kept["labels"]))
    labels = [*kept["labels"], *gained]
    new_weights = None if kept["weights"] is None else [weights[label] for label in labels]
    if kept["known"] or (labels, new_weights) == (kept["labels"], kept["weights"]):
        return None
    return {
        "order_key": kept["order_key"],
        "example_id": kept["example_id"],
        "labels": labels,
        "weights": new_weights,
        "gained": gained,
    }


def _equal_pairs(rows: pa.Table, policy: Literal["drop", "keep"]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the dropped rows, and of the rows that stay instead."""
    known = rows["known"].to_numpy()
    splits = rows["split"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    keys = pa.table(
        {
            "pixels": rows["pixel_sha256"].combine_chunks(),
            "rank": np.where(known, -1, split_ranks(rows)),
            "is_link": rows["is_link"].combine_chunks(),
            "group": rows["group"].combine_chunks(),
            "sha256": rows["sha256"].combine_chunks(),
            "example_id": rows["example_id"].combine_chunks(),
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names]).to_numpy()
    pixels = keys["pixels"].combine_chunks().dictionary_encode().indices.to_numpy()[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = pixels[1:] != pixels[:-1]
    # Position of the row that stays, for every position: the last start of a set at or before it.
    kept = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    crossing = splits[order] != splits[kept]
    is_dropped = ~first & ~known[order] & (crossing | (policy == "drop"))
    return order[is_dropped], kept[is_dropped]


def split_ranks(rows: pa.Table) -> np.ndarray:
    """Rank of the split, int8: 0 if the source names test, 1 if it names val, otherwise 2. The smaller rank stays."""
    named = pc.is_null(rows["val_fraction"])
    rank = pc.if_else(pc.equal(rows["split"], "test"), 0, pc.if_else(pc.equal(rows["split"], "val"), 1, 2))
    ranks: np.ndarray = pc.if_else(named, rank, 2).cast(pa.int8()).to_numpy()
    return ranks


def _drops(dropped: pa.Table, kept: pa.Table, several_labels: bool) -> pa.Table:
    pairs = list(zip(dropped.to_pylist(), kept.to_pylist(), strict=True))
    kinds = ["same_file" if copy["sha256"] == original["sha256"] else "same_pixels" for copy, original in pairs]
    return drops_table(
        dropped,
        kept,
        reason="duplicate",
        kinds=kinds,
        details=[
            _detail(kind, copy, original, several_labels) for kind, (copy, original) in zip(kinds, pairs, strict=True)
        ],
        labels_differ=[not original["known"] and copy["labels"] != original["labels"] for copy, original in pairs],
    )


def drops_table(
    dropped: pa.Table,
    kept: pa.Table,
    *,
    reason: str,
    kinds: list[str],
    details: list[str],
    labels_differ: list[bool],
    other_corpus: list[str | None] | None = None,
) -> pa.Table:
    """Rows of DROPS_SCHEMA: row i of `dropped` is dropped because of row i of `kept`."""
    columns = {
        **{name: dropped[name] for name in ("order_key", "example_id", "labels")},
        "reason": pa.repeat(reason, len(dropped)),
        "kind": pa.array(kinds, pa.string()),
        "detail": pa.array(details, pa.string()),
        "labels_differ": pa.array(labels_differ, pa.bool_()),
        "other_corpus": pa.array(other_corpus or [None] * len(dropped), pa.string()),
        "other_split": kept["split"],
        "other_id": kept["example_id"],
        **{f"other_{name}": kept[name] for name in LOCATOR_SCHEMA.names},
    }
    return pa.table(columns).select(DROPS_SCHEMA.names).cast(DROPS_SCHEMA)


def _detail(kind: str, copy: PixelsRow, original: PixelsRow, several_labels: bool) -> str:
    text = f"{kind.replace('_', ' ')} as {original['example_id']}"
    if original["known"]:
        text += ", which is in the corpus already"
    if copy["split"] != original["split"]:
        text += f", which stays in {original['split']}; this copy would be in {copy['split']}"
    if copy["labels"] != original["labels"] and not original["known"]:
        text += (
            f", labelled {original['labels']} (this copy: {copy['labels']}"
            f"{', which are merged into it' if several_labels else ''})"
        )
    return text
