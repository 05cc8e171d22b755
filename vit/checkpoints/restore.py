"""Restores a checkpoint: to resume a run, to start a branch, or to go back before a spike.

Every rank restores the same one. Of a network that is split it reads the rows that it holds; of whole tensors each is read by one rank,
which sends it to the others. One that any rank cannot read is passed over by all. Rank 0 searches: a search yields the names of checkpoints
and is sent why one cannot be read.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import (
    CannotResume,
    CheckpointRef,
    RunIdentity,
    WeightsError,
    check_same_run,
    open_checkpoint,
)
from vitline.vit.checkpoints.names import (
    DAMAGED,
    FOLDER,
    MANIFEST,
    CheckpointName,
    find_checkpoints,
    no_checkpoint,
    parse_prefix,
)
from vitline.vit.checkpoints.read import Held, everything, read_checkpoint
from vitline.vit.checkpoints.shares import owners
from vitline.vit.checkpoints.state_tensors import load_state_tensors, local_rows, restore, state_tensors
from vitline.vit.checkpoints.tensor_file import DTYPES
from vitline.vit.training.loop import TrainState
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

Search = Generator[CheckpointName, WeightsError, None]
"""Ends where there is no checkpoint, and raises CannotResume where none of those that there are can be read."""
_REFUSED = "refused: "


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
        _mark_damaged(run, prefix, error)

    read = _read_agreed(run, _newest_of_all(run, rejected), world, local_rows(state), _of_run(run, meta))
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
    read = _read_agreed(run, _of_step(run, step), world, local_rows(state), _of_run(run, meta))
    assert read is not None  # such a search ends with a refusal
    ref, tensors = read
    restore(state, ref, tensors)
    return ref


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

    The later checkpoints belong to a course of the training that is given up. They are deleted once the older state is there. A process
    that is killed in between resumes from one of them, meets the same spike and goes back again.
    """
    spikes, first = list(state.guard.spikes), state.guard.spikes[-1]["first"]
    read = _read_agreed(run, _before_step(run, first), world, local_rows(state))
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


def newest_checkpoint(
    run: Store, rejected: Callable[[str, WeightsError], None]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint with its tensors, or None where there was never one, for one reader. Every byte is checked."""
    return _read_agreed(run, _newest_of_all(run, rejected), World())


def _newest_of_all(run: Store, rejected: Callable[[str, WeightsError], None]) -> Search:
    """From the newest to the oldest. `rejected` is called with the prefix and the error of each that is damaged. Those that are marked
    as damaged are read, too: the fault may have been on the way."""
    found = find_checkpoints(run.list(FOLDER))
    reasons: list[str] = []
    for name in found.committed:
        error = yield from _tried(run, name, tries=1 if name in found.marked else 2)
        rejected(name.prefix, error)
        reasons.append(f"{name.prefix}: {error}")
    reasons += [f"{prefix}: another version of vitline gave it this name" for prefix in found.unknown]
    if reasons:
        raise CannotResume(
            f"None of the {len(reasons)} checkpoints of {run.uri} can be read, so the run stops instead of starting anew; nothing "
            f"was deleted. Restore one of them, or delete {run.uri_of(FOLDER.rstrip('/'))} to start at step 0. "
            + "; ".join(reasons)
        )


def _of_step(run: Store, step: int) -> Search:
    """Those of a step, the newest attempt first. Raises CannotResume, too, where there is none."""
    reasons = []
    for name in find_checkpoints(run.list(FOLDER)).unmarked:
        if name.step == step:
            error = yield from _tried(run, name, tries=2)
            reasons.append(f"{name.prefix}: {error}")
    raise CannotResume("; ".join([no_checkpoint(run, step), *reasons]))


def _before_step(run: Store, step: int) -> Search:
    """Those of earlier steps, the newest first, for the spike guard."""
    names = [name for name in find_checkpoints(run.list(FOLDER)).unmarked if name.step < step]
    for name in names:
        error = yield from _tried(run, name, tries=2)
        log.warning("checkpoint %s is damaged, trying an older one: %s", run.uri_of(name.prefix), error)
    if names:
        raise CannotResume(
            f"None of the {len(names)} checkpoints of {run.uri} before step {step:,}, to which the spike guard goes back, can be read. "
            "Restore one of them, or start a new run with recipe.spike_guard.action=skip, which needs none."
        )


def _tried(run: Store, name: CheckpointName, tries: int) -> Generator[CheckpointName, WeightsError, WeightsError]:
    """A checkpoint, up to `tries` times; the last error."""
    error = yield name
    for _ in range(tries - 1):
        log.warning("checkpoint %s seems damaged, reading it again: %s", run.uri_of(name.prefix), error)
        error = yield name
    return error


def _read_agreed(
    run: Store,
    search: Search,
    world: World,
    held: Held = everything,
    check: Callable[[CheckpointRef], object] = lambda ref: None,
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The first checkpoint of the search of rank 0 whose tensors the ranks can read: of each what `held` says that this rank needs.
    None where there is none. Every rank must call it, with a search of its own. Raises CannotResume on every rank; `check` may do so
    before a tensor is read.
    """
    error = None
    while (name := _next_name(search, error, world)) is not None:
        failure = ""
        try:
            ref = open_checkpoint(run, name.prefix)
            check(ref)
            readers = _readers(ref, held, world.size)
            tensors = read_checkpoint(run, ref, _is_read_by(world.rank, readers), held)
        except CannotResume as refusal:
            failure = f"{_REFUSED}{refusal}"
        except WeightsError as damage:
            failure = str(damage)
        failures = [text for text in world.gather(failure) if text]
        if not failures:
            return ref, tensors | _sent(ref, tensors, readers, world)
        _raise_refusal(failures)
        error = WeightsError(failures[0])
    return None


def _readers(ref: CheckpointRef, held: Held, num_ranks: int) -> dict[str, int]:
    """The rank that reads each tensor that every rank needs whole."""
    sizes = Counter[str]()
    for piece in ref.pieces:
        if held(piece) is None:
            sizes[piece["name"]] += piece["end"] - piece["start"]
    return owners(sizes, num_ranks)


def _is_read_by(rank: int, readers: Mapping[str, int]) -> Callable[[str], bool]:
    return lambda name: readers.get(name, rank) == rank


def _sent(
    ref: CheckpointRef, tensors: Mapping[str, Tensor], readers: Mapping[str, int], world: World
) -> dict[str, Tensor]:
    """The tensors of all readers."""
    kinds = {piece["name"]: (piece["global_shape"], DTYPES[piece["dtype"]]) for piece in ref.pieces}
    found = dict[str, Tensor]()
    for name, reader in readers.items():
        shape, dtype = kinds[name]
        own = tensors[name] if reader == world.rank else torch.empty(shape, dtype=dtype)
        found[name] = world.broadcast(own, reader)
    return found


def _next_name(search: Search, error: WeightsError | None, world: World) -> CheckpointName | None:
    """The next name of the search of rank 0, on every rank; None at its end."""
    text = ""
    if world.rank == 0:
        try:
            text = (next(search) if error is None else search.send(error)).prefix
        except StopIteration:
            pass
        except CannotResume as refusal:
            text = f"{_REFUSED}{refusal}"
    text = world.gather(text)[0]
    _raise_refusal([text])
    return parse_prefix(text)


def _raise_refusal(texts: Sequence[str]) -> None:
    """Raises CannotResume for the first text that is a refusal."""
    for text in texts:
        if text.startswith(_REFUSED):
            raise CannotResume(text.removeprefix(_REFUSED))


def _of_run(run: Store, meta: RunIdentity) -> Callable[[CheckpointRef], None]:
    return lambda ref: check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)


def _mark_damaged(run: Store, prefix: str, error: WeightsError) -> None:
    """Logs a damaged checkpoint and marks it, so that its step is saved again beside it. Its files stay as they are."""
    log.warning("checkpoint %s is damaged, trying an older one: %s", run.uri_of(prefix), error)
    if run.exists(f"{prefix}/{MANIFEST}"):  # else another attempt has deleted the checkpoint since it was listed
        run.write_json(f"{prefix}/{DAMAGED}", {"schema_version": 1, "at": time.time(), "reason": str(error)})
