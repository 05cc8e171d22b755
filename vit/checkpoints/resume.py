"""Restores a TrainState from a checkpoint: to resume a run, or to start a branch. Every rank restores the same one, and reads of it what
it holds."""

import logging
from collections.abc import Callable

from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import CheckpointRef, RunIdentity, WeightsError, check_same_run
from vitline.vit.checkpoints.names import DAMAGED
from vitline.vit.checkpoints.read import mark_damaged
from vitline.vit.checkpoints.search import newest_of_all, of_step, restore_agreed
from vitline.vit.checkpoints.state_tensors import local_rows, restore
from vitline.vit.training.loop import TrainState
from vitline.vit.training.world import World

log = logging.getLogger(__name__)


def resume(
    run: Store, state: TrainState, meta: RunIdentity, world: World, check_lease: Callable[[], object] = lambda: None
) -> CheckpointRef | None:
    """Restores `state` from the newest undamaged checkpoint, the same one on every rank. Returns None if there is none.

    Raises CannotResume on every rank if there are checkpoints and all are damaged, or the newest was written by another
    version of vitline or has another recipe, corpus or class map than `meta`. Before something is marked, rank 0 calls
    `check_lease`, which raises in an attempt that has lost its lease.
    """

    def rejected(prefix: str, error: WeightsError) -> None:
        check_lease()
        mark_damaged(run, prefix, error)

    read = restore_agreed(run, newest_of_all(run, rejected), world, local_rows(state), _of_run(run, meta))
    if read is None:
        return None
    ref, tensors = read
    if world.rank == 0 and run.exists(f"{ref.prefix}/{DAMAGED}"):
        log.warning("checkpoint %s is marked as damaged, but every byte is right", run.uri_of(ref.prefix))
        check_lease()
        run.delete(f"{ref.prefix}/{DAMAGED}")
    restore(state, ref, tensors)
    return ref


def start_from(run: Store, step: int, state: TrainState, meta: RunIdentity, world: World) -> CheckpointRef:
    """Restores `state` from an undamaged checkpoint of `step` of another run, the same one on every rank. Writes nothing there.

    Raises CannotResume on every rank if there is none, or it has another recipe, corpus or class map than `meta`, which is that of
    the other run.
    """
    read = restore_agreed(run, of_step(run, step), world, local_rows(state), _of_run(run, meta))
    assert read is not None  # such a search ends with a refusal
    ref, tensors = read
    restore(state, ref, tensors)
    return ref


def _of_run(run: Store, meta: RunIdentity) -> Callable[[CheckpointRef], None]:
    return lambda ref: check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)
