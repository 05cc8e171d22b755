"""Reads a checkpoint, each tensor as a whole or the rows that a rank holds. Every byte that is read is checked against its sha256."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import CheckpointRef, WeightsError
from vitline.vit.checkpoints.tensor_file import DTYPES, TensorPiece, read_tensors

Held = Callable[[TensorPiece], range | None]
"""The rows (of the first dimension) that a reader needs of the tensor of a piece; None for the whole tensor."""
_STORE_THREADS, _FILE_THREADS = 8, 2


def everything(piece: TensorPiece) -> None:
    """Whole tensors."""


def read_checkpoint(
    run: Store, ref: CheckpointRef, wanted: Callable[[str], bool] = lambda name: True, held: Held = everything
) -> dict[str, Tensor]:
    """Tensors by name, several range requests at a time. Pieces without a row that is needed are not read. Raises WeightsError
    naming file and tensor."""
    tensors: dict[str, Tensor] = {}
    lock = threading.Lock()

    def read(job: tuple[str, TensorPiece]) -> None:
        key, piece = job
        rows = held(piece)
        if rows is not None and not _overlap(piece, rows):
            with lock:
                _target(tensors, piece, rows)  # a rank may hold no row of a tensor
            return
        try:
            (value,) = read_tensors(run, key, [piece])
        except (FileNotFoundError, ValueError) as error:
            raise WeightsError(f"{run.uri_of(key)}: {error}") from error
        with lock:
            place(tensors, piece, value, rows)

    files = ref.manifest["files"]
    jobs = [(file["key"], piece) for file in files for piece in file["pieces"] if wanted(piece["name"])]
    with ThreadPoolExecutor(_STORE_THREADS if run.high_latency else _FILE_THREADS, "checkpoint") as threads:
        for _ in threads.map(read, jobs):
            pass
    return tensors


def place(tensors: dict[str, Tensor], piece: TensorPiece, value: Tensor, rows: range | None = None) -> None:
    """Puts a piece into its tensor at its offsets, or the `rows` of it. A piece that is a whole tensor is used without copying."""
    if rows is None and list(value.shape) == piece["global_shape"]:
        tensors[piece["name"]] = value
        return
    target, offsets = _target(tensors, piece, rows), piece["offsets"]
    if rows is not None:
        both = _overlap(piece, rows)
        value = value[both.start - offsets[0] : both.stop - offsets[0]]
        offsets = [both.start - rows.start, *offsets[1:]]
    target[tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))] = value


def _target(tensors: dict[str, Tensor], piece: TensorPiece, rows: range | None) -> Tensor:
    shape = piece["global_shape"] if rows is None else [len(rows), *piece["global_shape"][1:]]
    if (found := tensors.get(piece["name"])) is None:
        found = tensors[piece["name"]] = torch.empty(shape, dtype=DTYPES[piece["dtype"]])
    return found


def _overlap(piece: TensorPiece, rows: range) -> range:
    """The rows of the whole tensor that are in both."""
    first = piece["offsets"][0]
    return range(max(first, rows.start), min(first + piece["shape"][0], rows.stop))
