"""Keyed hashes that place an example: its split, independent of the seed, and its position in the row order.

If the source does not name the split, it is drawn per unit: a group, or all images with the same pixels. So an image with
copies is in val or test as often as one without, and adding a copy changes no split.
"""

import hashlib
from collections.abc import Mapping

# Never change these: another salt would change every split of every corpus, and turn test images into training images.
_SPLIT_SALT = b"vitline split\0"
_ORDER_SALT = b"vitline order\0"


class HashedSplit(str):
    """A split drawn with these shares, not named by the source. Until the pixels are known, its text is the split drawn from
    the example id: good enough for counting, and final for a group."""

    val_fraction: float
    test_fraction: float

    def __new__(cls, key: str, val_fraction: float, test_fraction: float) -> "HashedSplit":
        drawn = super().__new__(cls, hashed_split(key, val_fraction, test_fraction))
        drawn.val_fraction, drawn.test_fraction = val_fraction, test_fraction
        return drawn


def unit_key(group: str | None, pixel_sha256: bytes) -> str:
    """The key that the split of an example is drawn from: its group, else its pixels, which are equal for all copies."""
    return pixel_sha256.hex() if group is None else group


def split_hash(key: str) -> int:
    """uint64 that decides the split of a unit; uniform, and equal on every machine."""
    return int.from_bytes(hashlib.sha256(_SPLIT_SALT + key.encode()).digest()[:8], "big")


def hashed_split(key: str, val_fraction: float, test_fraction: float) -> str:
    """train, val or test. Test takes the lowest hashes and val the next, so changing the share of val moves no test example."""
    point = split_hash(key) / 2**64
    if point < test_fraction:
        return "test"
    return "val" if point < test_fraction + val_fraction else "train"


def filled_splits(sizes: Mapping[str, int], num_val: int, num_train: int) -> dict[str, str]:
    """Assign groups to splits so that val and train have exactly the given numbers of examples; the rest is test.

    `sizes`: number of examples of each group that count (0: the group joins the split that is being filled). Groups are taken
    in the order of their hash; a group that is too large for the remaining room goes to a later split. Raises ValueError if
    the numbers cannot be met.
    """
    room = {"val": num_val, "train": num_train}
    splits: dict[str, str] = {}
    for group in sorted(sizes, key=lambda group: (split_hash(group), group)):
        fitting = (split for split in room if room[split] > 0 and sizes[group] <= room[split])
        split = next(fitting, "test")
        splits[group] = split
        if split in room:
            room[split] -= sizes[group]
    if any(room.values()):
        raise ValueError(
            f"{sum(sizes.values()):,} examples in {len(sizes):,} groups cannot give exactly {num_val:,} for val and "
            f"{num_train:,} for train; missing: {room}. Request fewer."
        )
    return splits


def order_key(seed: int, example_id: str) -> int:
    """uint64 sort key of the rows of a segment: first 8 bytes of sha256(seed, example id)."""
    return int.from_bytes(hashlib.sha256(_ORDER_SALT + f"{seed}\0{example_id}".encode()).digest()[:8], "big")
