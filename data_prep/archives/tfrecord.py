"""Reads TFRecord files and the tf.train.Example in their records, without TensorFlow or protobuf.

A record is: length of the payload (uint64, little-endian), masked CRC-32C of these 8 bytes, payload, masked CRC-32C of the
payload. Mask: rotate right by 15, add 0xA282EAD8. (TensorFlow, core/lib/io/record_writer.h.)
"""

import functools
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitline.data_prep.archives.archive_bytes import RangeReader, Source
from vitline.infra.storage import Store

MAX_RECORD_BYTES = 128 * 1024 * 1024
"""Larger payloads are skipped without reading them."""
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_GZIP = b"\x1f\x8b\x08"


class DamagedFile(ValueError):
    """Later records of a file cannot be found. The message has file and byte."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A record: bytes [offset, offset + length) of its file."""

    offset: int
    length: int
    payload: bytes = b""
    damage: str = ""
    """Why there is no payload; later records are not affected."""


def frames(store: Store, key: str) -> Iterator[Frame]:
    """Every record of a file in order, with both checksums verified; memory holds a window of the file and one record.

    A payload that is too large or does not match its checksum becomes a frame with `damage`. Raises DamagedFile if the file is
    truncated or a length does not match its checksum, ValueError for a compressed file.
    """
    source = RangeReader(store, key)
    yield from frames_inside(source, source.archive, source.end)


def frames_inside(source: Source, name: str, num_bytes: int) -> Iterator[Frame]:
    """As `frames`, for a file that is the next `num_bytes` of an archive; offsets count from its first byte.

    Raises CorruptArchive as well.
    """
    first, position = source.position, 0
    while position < num_bytes:
        source.skip_to(first + position)
        if position + _HEADER_BYTES > num_bytes:
            raise DamagedFile(
                f"{name} ends within a record header at byte {position}. The file is truncated. Copy it again."
            )
        start, length = position + _HEADER_BYTES, _length(_taken(source, _HEADER_BYTES, name), position, name)
        position = start + length + _FOOTER_BYTES
        if position > num_bytes:
            raise DamagedFile(
                f"{name}: the record at byte {start} has {length:,} bytes, but the file ends at byte {num_bytes}. "
                "The file is truncated. Copy it again."
            )
        if length > MAX_RECORD_BYTES:
            yield Frame(start, length, damage=f"{length:,} bytes, limit {MAX_RECORD_BYTES:,}")
            continue
        payload = _taken(source, length, name)
        if _unmasked(_taken(source, _FOOTER_BYTES, name)) == crc32c(payload):
            yield Frame(start, length, payload)
        else:
            yield Frame(start, length, damage=f"{name}: checksum of the record at byte {start} does not match")


def _length(header: bytes, position: int, name: str) -> int:
    """Length of the payload after a header."""
    if _unmasked(header[8:]) != crc32c(header[:8]):
        if position == 0 and header.startswith(_GZIP):
            raise ValueError(f"{name} is compressed, which is not supported. Decompress it with gunzip.")
        raise DamagedFile(
            f"{name}: the length at byte {position} does not match its checksum. The file is damaged or not a "
            "TFRecord file. Copy it again."
        )
    return int(struct.unpack_from("<Q", header)[0])


def _taken(source: Source, count: int, name: str) -> bytes:
    data = source.take(count)
    if len(data) < count:
        raise DamagedFile(f"{name} became shorter while it was read: byte {source.position} is missing. Start again.")
    return data


def _unmasked(masked: bytes) -> int:
    rotated = (int(struct.unpack("<I", masked)[0]) - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated << 15) | (rotated >> 17)) & 0xFFFFFFFF


# The checksum is linear, so the contribution of every byte of a block is looked up by position and value, for all bytes at once,
# and blocks are combined one by one. This reaches 500 MB/s on one core; a loop over bytes reaches 8. Of block sizes from 256 to
# 2048 bytes, 1024 is the fastest, because the table of 1 MB stays in the cache.
_BLOCK_BYTES, _BLOCKS_AT_ONCE = 1024, 32
_SHORT_BYTES = 128
_PLACES = np.arange(_BLOCK_BYTES, dtype=np.intp) * 256


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli; reflected polynomial 0x82F63B78, RFC 3720 B.4)."""
    if len(data) < _SHORT_BYTES:
        table, state = _byte_table(), 0xFFFFFFFF
        for byte in data:
            state = (state >> 8) ^ table[(state ^ byte) & 0xFF]
        return state ^ 0xFFFFFFFF
    places, (by_0, by_1, by_2, by_3) = _place_table(), _block_tables()
    rows = -(-len(data) // _BLOCK_BYTES)
    first = rows * _BLOCK_BYTES - len(data)
    padded = np.zeros(rows * _BLOCK_BYTES, np.uint8)  # leading zeros do not change a state of zero
    padded[first:] = np.frombuffer(data, np.uint8)
    padded[first : first + 4] ^= 0xFF  # equivalent to an initial state of all ones
    blocks = padded.reshape(rows, _BLOCK_BYTES)
    state = 0
    for row in range(0, rows, _BLOCKS_AT_ONCE):
        shares = places.take(blocks[row : row + _BLOCKS_AT_ONCE] + _PLACES)
        for share in np.bitwise_xor.reduce(shares, axis=1).tolist():
            state = by_0[state & 0xFF] ^ by_1[state >> 8 & 0xFF] ^ by_2[state >> 16 & 0xFF] ^ by_3[state >> 24] ^ share
    return state ^ 0xFFFFFFFF


@functools.cache
def _byte_table() -> list[int]:
    """The state after one byte, from a state of zero."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return [int(state) for state in table]


@functools.cache
def _place_table() -> np.ndarray:
    """At 256 * position + byte: the state after a block of zeros that has only this byte at this position."""
    rows = np.empty((_BLOCK_BYTES, 256), np.uint32)
    rows[-1] = _byte_table()
    for place in range(_BLOCK_BYTES - 2, -1, -1):
        rows[place] = _with_a_zero(rows[place + 1])
    return rows.reshape(-1)


@functools.cache
def _block_tables() -> list[list[int]]:
    """For each byte of a state: what it contributes after a block of zeros."""
    tables = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])
    for _ in range(_BLOCK_BYTES):
        tables = _with_a_zero(tables)
    return [table.tolist() for table in tables]


def _with_a_zero(states: np.ndarray) -> np.ndarray:
    after: np.ndarray = (states >> np.uint32(8)) ^ np.array(_byte_table(), np.uint32)[states & 0xFF]
    return after


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a tf.train.Example. Values are numbers or, for bytes, slices of the payload."""

    kind: Literal["bytes", "float", "int64", ""]
    values: list[Any]


_KINDS: dict[int, Literal["bytes", "float", "int64"]] = {1: "bytes", 2: "float", 3: "int64"}
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def read_example(payload: bytes, wanted: Container[str]) -> dict[str, Feature]:
    """The wanted features of a serialized tf.train.Example, by name. Raises ValueError with the byte if it is not valid.

    The wire format is protobuf; the messages are Example, Features, Feature, BytesList, FloatList and Int64List of
    tensorflow/core/example. Repeated numbers may be packed or not; if a name occurs twice, the last feature counts.
    """
    found: dict[str, Feature] = {}
    for number, features in _fields(payload, 0, len(payload)):
        if number != 1 or not isinstance(features, slice):
            continue
        for entry_number, entry in _fields(payload, features.start, features.stop):
            if entry_number == 1 and isinstance(entry, slice):
                name, feature = _entry(payload, entry)
                if name in wanted:
                    found[name] = _feature(payload, feature)
    return found


def _entry(payload: bytes, entry: slice) -> tuple[str, list[slice]]:
    """A map entry: the name, and the slices of the feature."""
    name, parts = "", []
    for number, value in _fields(payload, entry.start, entry.stop):
        if number == 1 and isinstance(value, slice):
            name = payload[value].decode(errors="replace")
        elif number == 2 and isinstance(value, slice):
            parts.append(value)
    return name, parts


def _feature(payload: bytes, parts: list[slice]) -> Feature:
    feature = Feature("", [])
    for part in parts:
        for number, values in _fields(payload, part.start, part.stop):
            kind = _KINDS.get(number)
            if kind is None or not isinstance(values, slice):
                continue
            if kind != feature.kind:
                feature = Feature(kind, [])
            for value_number, value in _fields(payload, values.start, values.stop):
                if value_number == 1:
                    feature.values.extend(_values(payload, kind, value))
    return feature


def _values(payload: bytes, kind: str, value: slice | int) -> list[Any]:
    if kind == "int64":
        if isinstance(value, int):
            return [_signed(value)]
        numbers, at = [], value.start
        while at < value.stop:
            number, at = _varint(payload, at, value.stop)
            numbers.append(_signed(number))
        return numbers
    if isinstance(value, int):
        raise ValueError(f"a number where {kind} values are expected")
    if kind == "bytes":
        return [value]
    if (value.stop - value.start) % 4:
        raise ValueError(f"byte {value.start}: {value.stop - value.start} bytes are not a list of floats")
    floats: list[float] = np.frombuffer(payload[value], "<f4").tolist()
    return floats


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(payload: bytes, at: int, stop: int) -> Iterator[tuple[int, slice | int]]:
    """Number and value of every field of a message: the value of a varint; the slice of any other field."""
    while at < stop:
        tag, at = _varint(payload, at, stop)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(payload, at, stop)
            yield number, value
            continue
        if wire == _LENGTH:
            size, at = _varint(payload, at, stop)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if wire == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"byte {at}: unknown wire type {wire}")
        if at + size > stop:
            raise ValueError(f"byte {at}: a field of {size:,} bytes exceeds its message, which ends at byte {stop}")
        yield number, slice(at, at + size)
        at += size


def _varint(payload: bytes, at: int, stop: int) -> tuple[int, int]:
    """A varint of up to 10 bytes, reduced to 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise ValueError(f"byte {at}: a number exceeds its message")
        byte = payload[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError(f"byte {at}: a number has more than 10 bytes")
