"""Which checkpoint to read: every rank reads the same one, and one that any rank cannot read is passed over by all.

A search runs on rank 0. It yields the names of checkpoints and is sent why one cannot be read; every byte is checked by the rank that
holds it.
"""

import logging
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import CannotResume, CheckpointRef, WeightsError, open_checkpoint
from vitline.vit.checkpoints.names import FOLDER, CheckpointName, find_checkpoints, no_checkpoint, parse_prefix
from vitline.vit.checkpoints.read import Held, everything, read_checkpoint
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

Search = Generator[CheckpointName, WeightsError, None]
"""Ends where there is no checkpoint, and raises CannotResume where none of those that there are can be read."""
_REFUSED = "refused: "


def newest_of_all(run: Store, rejected: Callable[[str, WeightsError], None]) -> Search:
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


def of_step(run: Store, step: int) -> Search:
    """Those of a step, the newest attempt first. Raises CannotResume, too, where there is none."""
    reasons = []
    for name in find_checkpoints(run.list(FOLDER)).unmarked:
        if name.step == step:
            error = yield from _tried(run, name, tries=2)
            reasons.append(f"{name.prefix}: {error}")
    raise CannotResume("; ".join([no_checkpoint(run, step), *reasons]))


def before_step(run: Store, step: int) -> Search:
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


def restore_agreed(
    run: Store,
    search: Search,
    world: World,
    held: Held = everything,
    check: Callable[[CheckpointRef], object] = lambda ref: None,
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The first checkpoint of the search of rank 0 that every rank can read: of each tensor what `held` says that this rank needs.
    None where there is none. Every rank must call it, with a search of its own. Raises CannotResume on every rank; `check` may do so
    before a tensor is read.
    """
    error = None
    while (name := _next_name(search, error, world)) is not None:
        read, failure = None, ""
        try:
            ref = open_checkpoint(run, name.prefix)
            check(ref)
            read = ref, read_checkpoint(run, ref, held=held)
        except CannotResume as refusal:
            failure = f"{_REFUSED}{refusal}"
        except WeightsError as damage:
            failure = str(damage)
        failures = [text for text in world.gather(failure) if text]
        if not failures:
            return read
        _raise_refusal(failures)
        error = WeightsError(failures[0])
    return None


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


def newest_checkpoint(
    run: Store, rejected: Callable[[str, WeightsError], None]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint with its tensors, or None where there was never one, for one reader. Every byte is checked."""
    return restore_agreed(run, newest_of_all(run, rejected), World())
