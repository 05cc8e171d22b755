"""Goes back to a checkpoint before a spike (`recipe.spike_guard.action=rewind`).

Checkpoints behind the first update that is left out belong to a course of the training that is given up. They are deleted once
the older state is there. A process that is killed in between resumes from one of them, meets the same spike and goes back again.
"""

import logging
from collections.abc import Callable

from vitline.infra.storage import Store
from vitline.vit.checkpoints.names import FOLDER, MANIFEST, parse_prefix
from vitline.vit.checkpoints.search import before_step, restore_agreed
from vitline.vit.checkpoints.state_tensors import load_state_tensors, local_rows, restore, state_tensors
from vitline.vit.training.loop import TrainState
from vitline.vit.training.world import World

log = logging.getLogger(__name__)


def rewind(
    run: Store,
    state: TrainState,
    initial: Callable[[], TrainState],
    world: World,
    check_lease: Callable[[], object] = lambda: None,
) -> None:
    """Makes `state` that of the newest checkpoint before the first update that the last spike leaves out, the same on every rank,
    or the one that the run begins with, `initial()`, where there was no checkpoint yet. All spikes stay known.

    No save may be in flight. Rank 0 calls `check_lease` before it deletes the later checkpoints. Raises CannotResume on every rank
    where the earlier checkpoints are damaged.
    """
    spikes, first = list(state.guard.spikes), state.guard.spikes[-1]["first"]
    read = restore_agreed(run, before_step(run, first), world, local_rows(state))
    state.optimizer.state.clear()
    if read is None:
        begun = initial()
        load_state_tensors(state, state_tensors(begun))
        state.step = begun.step
        state.guard.load(begun.guard.record())
    else:
        restore(state, *read)
    state.guard.spikes = spikes
    if world.rank == 0:
        log.warning("step %d is a spike: the training goes back to step %d", spikes[-1]["step"], state.step)
        check_lease()
        _delete_from(run, first)
    world.broadcast_int(0)  # no rank saves a step again before its older files are gone


def _delete_from(run: Store, first: int) -> None:
    """Deletes the checkpoints of `first` and later steps, of each its manifest first."""
    keys = [key for key in run.list(FOLDER) if (name := parse_prefix(key.rpartition("/")[0])) and name.step >= first]
    for key in sorted(keys, key=lambda key: not key.endswith(MANIFEST)):
        run.delete(key)
