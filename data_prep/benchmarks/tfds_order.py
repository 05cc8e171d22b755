"""The order in which TFDS stores the examples of a split, computed from their keys; the slices of VTAB refer to it.

Examples are sorted by MD5(split name + key), as in tensorflow_datasets/core/hashing.py and shuffle.py of all versions since
4.2.0. Integer keys are hashed as decimal text, without padding.
"""

import hashlib
from collections.abc import Sequence


def tfds_order(split: str, keys: Sequence[str | int]) -> list[int]:
    """Positions in `keys` of the first, second, ... example of the TFDS split `split`."""
    salted = hashlib.md5(split.encode(), usedforsecurity=False)
    digests = []
    for key in keys:
        digest = salted.copy()
        digest.update(str(key).encode())
        digests.append(digest.digest())
    return sorted(range(len(keys)), key=digests.__getitem__)


def order_prefix(split: str, key: str | int) -> int:
    """uint64 that sorts examples of a split like TFDS, independent of other keys: the first half of the digest."""
    digest = hashlib.md5(f"{split}{key}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big")
