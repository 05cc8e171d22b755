"""Goes back to a checkpoint before a spike (`recipe.spike_guard.action=rewind`).

Checkpoints behind the first update that is left out belong to a course of the training that is given up. They are deleted once
the older state is there. A process that is killed in between resumes from one of them, meets the same spike and goes back again.
"""

import logging
from collections.abc import Callable

from torch import Tensor

from infra.storage import Store
from vit.training.checkpoints.manifest import CannotResume, CheckpointError, CheckpointRef
from vit.training.checkpoints.names import FOLDER, MANIFEST, CheckpointName, find_checkpoints, parse_prefix
from vit.training.checkpoints.read import read_again
from vit.training.checkpoints.state_tensors import load_state_tensors, restore, state_tensors
from vit.training.train import TrainState
from vit.training.world import World

log = logging.getLogger(__name__)


def rewind(
    run: Store,
    state: TrainState,
    initial: Callable[[], TrainState],
    world: World,
    check_claim: Callable[[], object] = lambda: None,
) -> None:
    """Makes `state` that of the newest checkpoint before the first update that the last spike leaves out, the same on every rank,
    or the one that the run begins with, `initial()`, where there was no checkpoint yet. All spikes stay known.

    No save may be in flight. Rank 0 calls `check_claim` before it deletes the later checkpoints. Raises CannotResume on every rank
    where the earlier checkpoints are damaged.
    """
    spikes, first = list(state.guard.spikes), state.guard.spikes[-1]["first"]
    found, refusal = None, None
    if world.rank == 0:
        try:
            found = _checkpoint_before(run, first)
        except CannotResume as error:
            refusal = error
    if world.agree(int(refusal is not None)):
        raise refusal or CannotResume(f"rank 0 could not go back in {run.uri}; its error gives the reason.")
    name = CheckpointName(*(world.agree(part) for part in (found[0] if found else CheckpointName(-1, -1))))
    state.optimizer.state.clear()
    if name.step < 0:
        begun = initial()
        load_state_tensors(state, state_tensors(begun))
        state.step = begun.step
        state.guard.load(begun.guard.record())
    else:
        restore(state, *(found[1] if found else read_again(run, name, tries=2)))
    state.guard.spikes = spikes
    if world.rank == 0:
        log.warning("step %d is a spike: the training goes back to step %d", spikes[-1]["step"], state.step)
        check_claim()
        _delete_from(run, first)
    world.agree(0)  # no rank saves a step again before its older files are gone


def _checkpoint_before(run: Store, first: int) -> tuple[CheckpointName, tuple[CheckpointRef, dict[str, Tensor]]] | None:
    """The newest undamaged checkpoint of a step before `first`, read; None where there is none."""
    names = [name for name in find_checkpoints(run.list(FOLDER)).unmarked if name.step < first]
    for name in names:
        try:
            return name, read_again(run, name, tries=2)
        except CheckpointError as error:
            log.warning("checkpoint %s is damaged, trying an older one: %s", run.uri_of(name.prefix), error)
    if names:
        raise CannotResume(
            f"None of the {len(names)} checkpoints of {run.uri} before step {first:,}, to which the spike guard goes back, can be read. "
            "Restore one of them, or start a new run with recipe.spike_guard.action=skip, which needs none."
        )
    return None


def _delete_from(run: Store, first: int) -> None:
    """Deletes the checkpoints of `first` and later steps, of each its manifest first."""
    keys = [key for key in run.list(FOLDER) if (name := parse_prefix(key.rpartition("/")[0])) and name.step >= first]
    for key in sorted(keys, key=lambda key: not key.endswith(MANIFEST)):
        run.delete(key)
