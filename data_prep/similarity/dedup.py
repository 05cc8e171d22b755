"""Pictures that occur more than once: which of them stays.

Bytes or only decoded pixels equal, both count. Of a set of equal pictures the one stays that is in the corpus already,
else the one that the source names as test, then as val, then the one of the group that sorts first, then the one with
the smallest sha256, then the smallest id. A split that is drawn has no say: who stays would be in val or test the more
often, the more copies there are. Two splits never share a picture. Where a picture may have several labels it gets those
of its copies.
"""

from typing import Any, Literal

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
GAINS_SCHEMA = pa.schema(
    [
        pa.field("order_key", pa.uint64()),
        pa.field("example_id", pa.string()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("weights", pa.list_(pa.float32())),
        pa.field("gained", pa.list_(pa.string())),  # of the labels those that it did not have
    ]
)
"""Labels and weights that a picture has with those of its copies."""


def exact_duplicates(rows: pa.Table, policy: Literal["drop", "keep"], *, several_labels: bool = False) -> pa.Table:
    """Of `rows` (PIXELS_SCHEMA, all rows of their pixel hashes) those that go, as DROPS_SCHEMA.

    Under "keep" only those go that lie in another split than the one that stays. With `several_labels` what stays gets
    those of what goes: see `gained_labels`.
    """
    goes, kept = _equal_pairs(rows, policy)
    return _drops(rows.take(pa.array(goes)), rows.take(pa.array(kept)), several_labels)


def gained_labels(rows: pa.Table, policy: Literal["drop", "keep"]) -> pa.Table:
    """What stays of `exact_duplicates` and has fewer labels, or smaller weights, than what goes for it, as GAINS_SCHEMA:
    its own labels in their order, then the others sorted; of every label the largest weight.

    What is in the corpus already stays as it is.
    """
    goes, kept = _equal_pairs(rows, policy)
    copies: dict[int, list[int]] = {}
    for gone, stays in zip(goes.tolist(), kept.tolist(), strict=True):
        copies.setdefault(stays, []).append(gone)
    pairs = np.unique(np.concatenate([goes, kept]))
    taken = dict(zip(pairs.tolist(), rows.take(pa.array(pairs)).to_pylist(), strict=True))
    merged = (_merged(taken[stays], [taken[gone] for gone in gone_for_it]) for stays, gone_for_it in copies.items())
    return pa.Table.from_pylist([row for row in merged if row], schema=GAINS_SCHEMA)


def _merged(kept: dict[str, Any], copies: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A row of GAINS_SCHEMA; none where the copies add nothing."""
    weights: dict[str, float] = {}
    for row in (kept, *copies):
        for label, weight in zip(row["labels"], row["weights"] or [0.0] * len(row["labels"]), strict=True):
            weights[label] = max(weight, weights.get(label, weight))
    gained = sorted(weights.keys() - set(kept["labels"]))
    labels = [*kept["labels"], *gained]
    new_weights = None if kept["weights"] is None else [weights[label] for label in labels]
    if kept["known"] or (labels, new_weights) == (kept["labels"], kept["weights"]):
        return None
    named = {name: kept[name] for name in ("order_key", "example_id")}
    return {**named, "labels": labels, "weights": new_weights, "gained": gained}


def _equal_pairs(rows: pa.Table, policy: Literal["drop", "keep"]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of what goes, and of what stays instead."""
    known = rows["known"].to_numpy()
    splits = rows["split"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    keys = pa.table(
        {
            "pixels": rows["pixel_sha256"].combine_chunks(),
            "rank": np.where(known, -1, split_ranks(rows)),
            "group": rows["group"].combine_chunks(),
            "sha256": rows["sha256"].combine_chunks(),
            "example_id": rows["example_id"].combine_chunks(),
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names]).to_numpy()
    pixels = keys["pixels"].combine_chunks().dictionary_encode().indices.to_numpy()[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = pixels[1:] != pixels[:-1]
    # The kept row of every position: the last set start at or before it.
    kept = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    crossing = splits[order] != splits[kept]
    goes = ~first & ~known[order] & (crossing | (policy == "drop"))
    return order[goes], kept[goes]


def split_ranks(rows: pa.Table) -> np.ndarray:
    """0 for what the source names as test, 1 as val, 2 for all else: the smaller one stays. int8."""
    named = pc.is_null(rows["val_fraction"])
    rank = pc.if_else(pc.equal(rows["split"], "test"), 0, pc.if_else(pc.equal(rows["split"], "val"), 1, 2))
    return pc.if_else(named, rank, 2).cast(pa.int8()).to_numpy()


def _drops(goes: pa.Table, stays: pa.Table, several_labels: bool) -> pa.Table:
    pairs = list(zip(goes.to_pylist(), stays.to_pylist(), strict=True))
    kinds = ["same_file" if gone["sha256"] == kept["sha256"] else "same_pixels" for gone, kept in pairs]
    return drops_table(
        goes,
        stays,
        reason="duplicate",
        kinds=kinds,
        details=[_detail(kind, gone, kept, several_labels) for kind, (gone, kept) in zip(kinds, pairs, strict=True)],
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


def _detail(kind: str, gone: dict, kept: dict, several_labels: bool) -> str:
    text = f"{kind.replace('_', ' ')} as {kept['example_id']}"
    if kept["known"]:
        text += ", which is in the corpus already"
    if gone["split"] != kept["split"]:
        text += f", which stays in {kept['split']} and would be in {gone['split']} too"
    if gone["labels"] != kept["labels"] and not kept["known"]:
        text += (
            f", labelled {kept['labels']} and here {gone['labels']}{', which it gets too' if several_labels else ''}"
        )
    return text
