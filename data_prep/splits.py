"""Keyed hashes that place an example: in which split it is, whatever the seed, and where in the order of the rows.

A split that no source names is drawn for a unit: a group, or else all pictures with the same pixels. So a picture with
copies is in val or test as often as one without, and a copy that is added moves nothing.
"""

import hashlib
from collections.abc import Mapping

# Fixed for ever: with another salt every split of every corpus would change, and test pictures would become train ones.
_SPLIT_SALT = b"vitline split\0"
_ORDER_SALT = b"vitline order\0"


class DrawnSplit(str):
    """The split of an example that is drawn with these shares, not named by the source. Until its pixels are known the
    text is the split that its id draws: as good as any for counting, and final for a group."""

    val_fraction: float
    test_fraction: float

    def __new__(cls, key: str, val_fraction: float, test_fraction: float) -> "DrawnSplit":
        drawn = super().__new__(cls, hashed_split(key, val_fraction, test_fraction))
        drawn.val_fraction, drawn.test_fraction = val_fraction, test_fraction
        return drawn


def unit_key(group: str | None, pixel_sha256: bytes) -> str:
    """What the split of an example is drawn from: its group, or else its pixels, equal for every copy of a picture."""
    return pixel_sha256.hex() if group is None else group


def split_hash(key: str) -> int:
    """uint64 that decides the split of a unit; uniform, equal on every machine."""
    return int.from_bytes(hashlib.sha256(_SPLIT_SALT + key.encode()).digest()[:8], "big")


def hashed_split(key: str, val_fraction: float, test_fraction: float) -> str:
    """train, val or test. Test takes the lowest hashes and val the next, so another val size moves no test example."""
    point = split_hash(key) / 2**64
    if point < test_fraction:
        return "test"
    return "val" if point < test_fraction + val_fraction else "train"


def filled_splits(sizes: Mapping[str, int], num_val: int, num_train: int) -> dict[str, str]:
    """The split of every group, so that val and train hold exactly so many examples; the rest is test.

    `sizes` gives the examples that count for each group (0: it goes where the counting then stands). Groups come in
    the order of their hash; one too large for the room left in a split goes to a later one. Raises ValueError where
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
            f"{sum(sizes.values()):,} examples in {len(sizes):,} groups cannot give {num_val:,} for val and "
            f"{num_train:,} for train exactly; {room} are missing. Ask for fewer."
        )
    return splits


def order_key(seed: int, example_id: str) -> int:
    """uint64 by which the rows of a segment are sorted: first 8 bytes of sha256(seed, example id)."""
    return int.from_bytes(hashlib.sha256(_ORDER_SALT + f"{seed}\0{example_id}".encode()).digest()[:8], "big")
