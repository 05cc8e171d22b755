"""Whether a training keeps waiting for room, and starts its workers again.

Ray Train's controller reports here what becomes of each start of the worker group. Ray itself would count such failures over
the whole attempt, which may take weeks; here only those without a new checkpoint count.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vitline.infra.runs.handle import Run
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.progress import RunProgress
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.run.run_spec import read_progress

log = logging.getLogger(__name__)


class NoRoom(Exception):
    """The cluster could not place the workers of a run that has no checkpoint within the time that the run may wait."""


class StartsFailed(Exception):
    """Too many starts of the worker group failed without a new checkpoint."""


@dataclass
class StartPolicy:
    """The starts of the worker group in one attempt."""

    run_uri: str
    attempt: int
    total_steps: int
    workers: str
    """The workers as in messages, such as `2 workers`."""
    queue_s: float
    """Seconds that a run without a checkpoint waits for room, at most."""
    most_failures: int
    """Failed starts from one checkpoint after which the attempt fails."""
    have_room: Callable[[], bool]
    """Whether the nodes that are up would have room for the workers if nothing else ran there."""
    clock: Callable[[], float] = time.monotonic
    _waits_since: float | None = field(default=None, init=False)
    _placed: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)
    _newest: int | None = field(default=None, init=False)

    @property
    def _run(self) -> Store:
        return open_store(self.run_uri)

    def begin(self) -> None:
        """The workers are to be placed."""
        if self._waits_since is None:
            self._waits_since = self.clock()

    def placed(self) -> None:
        """The workers run."""
        if self._waits_since is not None:
            self._waits_since, self._placed = None, True
            with _unless_store_is_away():
                clear_waiting(self._run, self.attempt)

    def unplaced(self) -> None:
        """The cluster has had no room for some time. Raises NoRoom if the run has no checkpoint and has waited long enough."""
        self.begin()
        assert self._waits_since is not None
        waited_s = self.clock() - self._waits_since
        with _unless_store_is_away():
            if waited_s >= self.queue_s and newest_step(self._run) is None:
                raise NoRoom(f"the cluster had no room for {self.workers} within {self.queue_s:g} s")
            log.warning("no room for %s for %.0f s; waiting", self.workers, waited_s)
            report_waiting(
                self._run, self.attempt, self.total_steps, f"room for {self.workers}", no_room=self.have_room()
            )

    def failed(self, error: BaseException) -> None:
        """Workers were placed, but did not start. Raises StartsFailed after too many times without a new checkpoint."""
        with _unless_store_is_away():
            newest = newest_step(self._run)
            if newest is not None and (self._newest is None or newest > self._newest):
                self._newest, self._failures = newest, 0
        self._failures += 1
        if self._failures > self.most_failures:
            raise StartsFailed(
                f"{self.most_failures} restarts of the workers failed without a new checkpoint; the last error: {error}"
            )


def report_waiting(run: Store, attempt: int, total_steps: int, what: str, *, no_room: bool = False) -> None:
    """Writes into `progress.json` what the worker group waits for; `no_room`: it is what other jobs have. Raises LeaseLost where another
    attempt holds the lease."""
    before = read_progress(run) or {"step": 0}
    waits: RunProgress = {"step": before["step"], "total_steps": total_steps, "waiting_for": what}
    if no_room:
        waits["no_room"] = attempt
    Run(run, attempt).show(waits)


def clear_waiting(run: Store, attempt: int) -> None:
    """Takes out of `progress.json` what the worker group waited for. Raises LeaseLost where another attempt holds the lease."""
    progress = read_progress(run)
    if progress and progress.pop("waiting_for", None):
        progress.pop("no_room", None)
        Run(run, attempt).show(progress)


def waits(run: Store) -> bool:
    """Whether there are no workers yet, or no workers any more, because the cluster has no room."""
    return bool((read_progress(run) or {}).get("waiting_for"))


@contextlib.contextmanager
def _unless_store_is_away() -> Iterator[None]:
    """A store that does not answer must not end a training; what is left out is done the next time. The driver ends an attempt
    that has lost its lease."""
    try:
        yield
    except LeaseLost as lost:
        log.warning("%s", lost)
    except (OSError, RuntimeError):
        log.warning("the store did not answer", exc_info=True)
