"""Pictures that occur more than once: which of them stays.

Bytes or only decoded pixels equal, both count. Of a set of equal pictures the one in an evaluation split stays (test,
then val, then train), then the one with the smallest sha256, then the smallest id. Two splits never share a picture.
"""

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_SPLIT_RANK = {"test": 0, "val": 1, "train": 2}


def exact_duplicates(records: pa.Table, policy: Literal["drop", "keep"]) -> pa.Table:
    """Of `records` (accepted examples) the positions that go, `row`, and for each the position that stays, `kept`.

    Under "keep" only those go that lie in another split than the one that stays.
    """
    splits = records["split"].to_pylist()
    keys = pa.table(
        {
            "pixels": records["pixel_sha256"].combine_chunks(),
            "rank": [_SPLIT_RANK.get(split, len(_SPLIT_RANK)) for split in splits],
            "sha256": records["sha256"].combine_chunks(),
            "example_id": records["example_id"].combine_chunks(),
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names]).to_numpy()
    codes = keys["pixels"].combine_chunks().dictionary_encode().indices.to_numpy()[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = codes[1:] != codes[:-1]
    # The kept row of every position: the last set start at or before it.
    kept = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else order
    split_codes = records["split"].combine_chunks().dictionary_encode().indices.to_numpy()
    crossing = split_codes[order] != split_codes[kept]
    goes = ~first & (crossing | (policy == "drop"))
    return pa.table({"row": order[goes], "kept": kept[goes]}, schema=_SCHEMA)


_SCHEMA = pa.schema([("row", pa.int64()), ("kept", pa.int64())])
