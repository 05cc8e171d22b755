"""Reads checkpoints: the newest that is whole. Every byte is checked against its sha256."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from infra.storage import Store
from vit.training.checkpoints.manifest import CannotResume, CheckpointError, CheckpointRef, open_checkpoint
from vit.training.checkpoints.names import FOLDER, MANIFEST, MARK, CheckpointName, find_checkpoints
from vit.training.tensor_file import TensorPiece, read_tensors

log = logging.getLogger(__name__)


def read_checkpoint(
    run: Store, ref: CheckpointRef, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Tensors by name, each checked against its sha256. Raises CheckpointError naming file and tensor."""
    tensors: dict[str, Tensor] = {}
    for file in ref.manifest["files"]:
        pieces = [piece for piece in file["pieces"] if wanted(piece["name"])]
        try:
            read = read_tensors(run, file["key"], pieces)
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointError(f"{run.uri_of(file['key'])}: {error}") from error
        for piece, value in zip(pieces, read, strict=True):
            place(tensors, piece, value)
    return tensors


def place(tensors: dict[str, Tensor], piece: TensorPiece, value: Tensor) -> None:
    """Puts a piece into its tensor at its offsets. A piece that is a whole tensor is used without copying."""
    shape, offsets = piece["global_shape"], piece["offsets"]
    if list(value.shape) == shape:
        tensors[piece["name"]] = value
        return
    whole = tensors.setdefault(piece["name"], torch.empty(shape, dtype=value.dtype))
    whole[tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))] = value


def newest_checkpoint(
    run: Store, rejected: Callable[[str, CheckpointError], None]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint with its tensors, or None where there was never one. Every byte is checked.

    `rejected` is called with the prefix and the error of each damaged one. Those that are marked as damaged are read, too:
    the fault may have been on the way. Raises CannotResume where all are damaged, and for the checkpoint of another version.
    """
    found = find_checkpoints(run.list(FOLDER))
    reasons: list[str] = []
    for name in sorted({*found.committed, *found.marked}, reverse=True):
        if name not in found.committed:
            reasons.append(f"{name.prefix}: an earlier version of vitline found it damaged and deleted its manifest")
            continue
        try:
            return read_again(run, name, tries=1 if name in found.marked else 2)
        except CannotResume:
            raise
        except CheckpointError as error:
            rejected(name.prefix, error)
            reasons.append(f"{name.prefix}: {error}")
    reasons += [f"{prefix}: another version of vitline gave it this name" for prefix in found.unknown]
    if not reasons:
        return None
    raise CannotResume(
        f"None of the {len(reasons)} checkpoints of {run.uri} can be read, so the run stops instead of starting anew; nothing "
        f"was deleted. Restore one of them, or delete {run.uri_of(FOLDER.rstrip('/'))} to start at step 0. "
        + "; ".join(reasons)
    )


def read_again(run: Store, name: CheckpointName, tries: int) -> tuple[CheckpointRef, dict[str, Tensor]]:
    """A checkpoint with its tensors. One that seems damaged is read again, up to `tries` times in all."""
    for left in reversed(range(tries)):
        try:
            ref = open_checkpoint(run, name.prefix)
            return ref, read_checkpoint(run, ref)
        except CannotResume:
            raise
        except CheckpointError as error:
            if not left:
                raise
            log.warning("checkpoint %s seems damaged, reading it again: %s", run.uri_of(name.prefix), error)
    raise AssertionError("the last try returns or raises")


def mark_damaged(run: Store, prefix: str, error: CheckpointError) -> None:
    """Logs a damaged checkpoint and marks it, so that its step is saved again beside it. Its files stay as they are."""
    log.warning("checkpoint %s is damaged, trying an older one: %s", run.uri_of(prefix), error)
    if run.exists(f"{prefix}/{MANIFEST}"):  # else another attempt has deleted the checkpoint since it was listed
        run.write_json(f"{prefix}/{MARK}", {"schema_version": 1, "at": time.time(), "reason": str(error)})
