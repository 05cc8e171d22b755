"""Restores a TrainState from a checkpoint: to resume a run, or to start a branch. Every rank restores the same one."""

import logging
from collections.abc import Callable

from torch import Tensor

from infra.storage import Store
from vit.training.checkpoints.manifest import (
    CannotResume,
    CheckpointError,
    CheckpointRef,
    RunIdentity,
    check_same_run,
)
from vit.training.checkpoints.names import FOLDER, MARK, CheckpointName, find_checkpoints, no_checkpoint, parse_prefix
from vit.training.checkpoints.read import mark_damaged, newest_checkpoint, read_again
from vit.training.checkpoints.state_tensors import restore
from vit.training.train import TrainState
from vit.training.world import World

log = logging.getLogger(__name__)


def resume(
    run: Store, state: TrainState, meta: RunIdentity, world: World, check_claim: Callable[[], object] = lambda: None
) -> CheckpointRef | None:
    """Restores `state` from the newest undamaged checkpoint, the same one on every rank. Returns None if there is none.

    Raises CannotResume on every rank if there are checkpoints and all are damaged, or the newest was written by another
    version of vitline or has another recipe, corpus or class map than `meta`. Before something is marked, rank 0 calls
    `check_claim`, which raises in an attempt that has lost its claim.
    """
    return _restore(run, state, world, lambda: _resumable(run, meta, check_claim))


def start_from(run: Store, step: int, state: TrainState, meta: RunIdentity, world: World) -> CheckpointRef:
    """Restores `state` from an undamaged checkpoint of `step` of another run, the same one on every rank. Writes nothing there.

    Raises CannotResume on every rank if there is none, or it has another recipe, corpus or class map than `meta`, which is that of
    the other run.
    """
    found = _restore(run, state, world, lambda: _of_step(run, step, meta))
    assert found is not None
    return found


def _restore(
    run: Store, state: TrainState, world: World, find: Callable[[], tuple[CheckpointRef, dict[str, Tensor]] | None]
) -> CheckpointRef | None:
    """Loads on every rank the checkpoint that `find()` returns on rank 0. Every rank raises CannotResume where it does."""
    found, refusal = None, None
    if world.rank == 0:
        try:
            found = find()
        except CannotResume as error:
            refusal = error
    if world.agree(int(refusal is not None)):
        raise refusal or CannotResume(f"rank 0 refused to resume {run.uri}; its error gives the reason.")
    name = CheckpointName(*(world.agree(part) for part in (_name(found[0]) if found else CheckpointName(-1, -1))))
    if name.step < 0:
        return None
    ref, tensors = found or read_again(run, name, tries=2)
    restore(state, ref, tensors)
    return ref


def _resumable(
    run: Store, meta: RunIdentity, check_claim: Callable[[], object]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint of a run, or None. Marks the damaged ones, and takes the mark off the one returned."""

    def rejected(prefix: str, error: CheckpointError) -> None:
        check_claim()
        mark_damaged(run, prefix, error)

    found = newest_checkpoint(run, rejected)
    if found is not None:
        ref = found[0]
        check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)
        if run.exists(f"{ref.prefix}/{MARK}"):
            log.warning("checkpoint %s is marked as damaged, but every byte is right", run.uri_of(ref.prefix))
            check_claim()
            run.delete(f"{ref.prefix}/{MARK}")
    return found


def _of_step(run: Store, step: int, meta: RunIdentity) -> tuple[CheckpointRef, dict[str, Tensor]]:
    """The newest undamaged checkpoint of a step. Raises CannotResume if there is none."""
    reasons = []
    for name in find_checkpoints(run.list(FOLDER)).unmarked:
        if name.step == step:
            try:
                ref, tensors = read_again(run, name, tries=2)
            except CannotResume:
                raise
            except CheckpointError as error:
                reasons.append(f"{name.prefix}: {error}")
                continue
            check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)
            return ref, tensors
    raise CannotResume("; ".join([no_checkpoint(run, step), *reasons]))


def _name(ref: CheckpointRef) -> CheckpointName:
    name = parse_prefix(ref.prefix)
    assert name is not None
    return name
