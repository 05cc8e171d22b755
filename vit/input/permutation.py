"""Keyed randomness: every random number is a function of (seed, purpose, counters), so there is no generator state."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitline.infra.config import canonical_json

Words: TypeAlias = NDArray[np.uint64]

# Constants of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# A Feistel network with tiny halves mixes slowly: with 16 rounds some orders of 8 elements are more frequent, with 20 none
# is (see the tests). A batch of 4,096 indices takes about a millisecond.
_NUM_ROUNDS = 20
# The halves of the network are at most 2^24, so `_below` can scale 32 random bits with negligible bias.
_MAX_SIZE = 2**48


def derive_key(seed: int, *purpose: str | int) -> int:
    """A 64-bit key for one purpose: first 8 bytes of sha256 of the canonical JSON of [seed, *purpose]."""
    return int.from_bytes(hashlib.sha256(canonical_json([seed, *purpose]).encode()).digest()[:8], "big")


def hash64(key: ArrayLike, *counters: ArrayLike) -> Words:
    """64 random bits per element, a pure function of key and counters. All arguments broadcast as integer arrays."""
    h = _as_uint64(key)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        for counter in counters:
            h = _mix(h + _GOLDEN * (_as_uint64(counter) + np.uint64(1)))
    return h


def uniforms(key: ArrayLike, *counters: ArrayLike, count: int) -> NDArray[np.floating]:
    """`count` uniform numbers in [0, 1) for every element of the broadcast counters; shape (*broadcast, count)."""
    stream = hash64(key, *counters)[..., None]
    return (hash64(stream, np.arange(count)) >> np.uint64(11)) * 2.0**-53


class KeyedPermutation:
    """A pseudorandom permutation of [0, size), computed per index. Both directions take and return integer arrays.

    `size` and `key` are numbers or arrays that broadcast against the indices, so one call can use many permutations.
    It is a Feistel network over a * b >= size, with a about sqrt(size) and addition modulo the size of the half, and
    cycle walking: an image outside [0, size) is mapped again until it falls inside. (Black, Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002.) a * b exceeds size by less than a, so few indices are mapped twice.
    """

    def __init__(self, size: ArrayLike, key: ArrayLike) -> None:
        self._size = _as_uint64(size)
        if self._size.size and not 0 < int(self._size.min()) <= int(self._size.max()) <= _MAX_SIZE:
            raise ValueError(
                f"A keyed permutation has 1 to 2^48 elements, not {int(self._size.min())} to {int(self._size.max())}."
            )
        half = np.ceil(np.sqrt(self._size.astype(np.float64))).astype(np.uint64)
        # Even, because two odd halves would give only even permutations.
        self._a = half + half % np.uint64(2)
        self._b = (self._size + self._a - np.uint64(1)) // self._a
        self._round_keys = [hash64(key, i) for i in range(_NUM_ROUNDS)]

    def __call__(self, index: ArrayLike) -> NDArray[np.int64]:
        """The images of the indices, same shape. Raises IndexError for an index outside [0, size)."""
        return self._walk(index, self._forward)

    def inverse(self, image: ArrayLike) -> NDArray[np.int64]:
        """The indices of the given images, same shape. Raises IndexError for an image outside [0, size)."""
        return self._walk(image, self._backward)

    def _walk(
        self, index: ArrayLike, step: Callable[[Words, Words, Words, Sequence[Words]], Words]
    ) -> NDArray[np.int64]:
        given = np.asarray(index)
        shape = np.broadcast_shapes(given.shape, self._size.shape, self._round_keys[0].shape)
        size, a, b = (np.broadcast_to(v, shape).ravel() for v in (self._size, self._a, self._b))
        keys = [np.broadcast_to(k, shape).ravel() if k.ndim else k for k in self._round_keys]
        x = np.broadcast_to(given, shape).ravel()
        if x.size and (int(x.min()) < 0 or (x.astype(np.uint64) >= size).any()):
            raise IndexError(
                f"Indices {x.min()} to {x.max()} are not all inside a permutation of {size.max()} elements."
            )
        x = x.astype(np.uint64)
        with np.errstate(over="ignore"):
            x = step(x, a, b, keys)
            outside = np.flatnonzero(x >= size)
            while outside.size:
                x[outside] = step(x[outside], a[outside], b[outside], [k[outside] if k.ndim else k for k in keys])
                outside = outside[x[outside] >= size[outside]]
        return x.astype(np.int64).reshape(shape)

    @staticmethod
    def _forward(x: Words, a: Words, b: Words, keys: Sequence[Words]) -> Words:
        left, right = x // b, x % b
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + _below(key, right, a)) % a
            else:
                right = (right + _below(key, left, b)) % b
        return left * b + right

    @staticmethod
    def _backward(x: Words, a: Words, b: Words, keys: Sequence[Words]) -> Words:
        left, right = x // b, x % b
        for i in reversed(range(len(keys))):
            if i % 2 == 0:
                left = (left + a - _below(keys[i], right, a)) % a
            else:
                right = (right + b - _below(keys[i], left, b)) % b
        return left * b + right


def _below(key: Words, x: Words, bound: Words) -> Words:
    """A keyed number in [0, bound) for every x; bound is less than 2^25."""
    h = _mix(key + _GOLDEN * (x + np.uint64(1)))
    return ((h >> np.uint64(32)) * bound) >> np.uint64(32)


def _mix(x: Words) -> Words:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _as_uint64(value: ArrayLike) -> Words:
    if isinstance(value, int):  # an int of 2^63 or more does not fit into int64
        return np.array(value, dtype=np.uint64)
    return np.asarray(value).astype(np.uint64)
