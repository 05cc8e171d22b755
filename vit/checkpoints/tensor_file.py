"""safetensors files on any store: written as a stream with hashes, read by byte ranges.

The safetensors library writes to memory or to a local path only. Building a file in memory and uploading it takes several
times as long as a raw write, so this module streams the public format (8 bytes of length, JSON, data) and reads by offsets.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from vitline.infra.storage import Store
from vitline.vit.training.sharding.slices import ShardPlace, local_shard

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Large enough to make the cost of a write call small, small enough to bound memory.
CHUNK_BYTES = 16 * 2**20


class TensorPiece(TypedDict):
    """Where a tensor, or a part of one, is in a file."""

    name: str
    dtype: str
    """A key of DTYPES."""
    global_shape: list[int]
    """Shape of the whole tensor."""
    shape: list[int]
    offsets: list[int]
    """Place of the piece in the whole tensor."""
    start: int
    """First byte in the file."""
    end: int
    sha256: str


class _HeaderEntry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_tensors(
    store: Store,
    key: str,
    tensors: Mapping[str, Tensor],
    progress: Callable[[], None] = lambda: None,
    places: Mapping[str, ShardPlace] | None = None,
) -> list[TensorPiece]:
    """Streams CPU tensors to one safetensors file, which becomes visible only when complete. One piece per tensor.

    `progress` is called after each chunk of at most CHUNK_BYTES. `places` are those of slices in whole tensors.
    """
    header: dict[str, _HeaderEntry] = {}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": (position, position + tensor.nbytes),
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    pieces = list[TensorPiece]()
    with store.writer(key) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            data, digest = raw_bytes(tensor), hashlib.sha256()
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                progress()
            begin, end = header[name]["data_offsets"]
            place = (places or {}).get(name) or local_shard(tensor)[1]
            pieces.append(
                {
                    "name": name,
                    "dtype": NAMES[tensor.dtype],
                    "global_shape": list(place.shape),
                    "shape": list(tensor.shape),
                    "offsets": list(place.offsets),
                    "start": base + begin,
                    "end": base + end,
                    "sha256": digest.hexdigest(),
                }
            )
    return pieces


def read_tensors(store: Store, key: str, pieces: Sequence[TensorPiece]) -> list[Tensor]:
    """Reads the tensors of `pieces`, with one range read each. Raises ValueError naming a tensor whose bytes differ."""
    tensors = []
    for piece in pieces:
        data = (
            bytearray(store.read(key, piece["start"], piece["end"])) if piece["end"] > piece["start"] else bytearray()
        )
        found = hashlib.sha256(data).hexdigest()
        if found != piece["sha256"]:
            raise ValueError(f"{piece['name']} has sha256 {found[:12]}, but was written with {piece['sha256'][:12]}.")
        dtype = DTYPES[piece["dtype"]]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        if flat.numel() != math.prod(piece["shape"]):
            raise ValueError(f"{piece['name']} has {flat.numel():,} numbers, but its shape is {piece['shape']}.")
        tensors.append(flat.reshape(piece["shape"]))
    return tensors
