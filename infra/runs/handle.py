"""What a process of a job has of its run: the right to write it, the stop requests to its attempt, and its signs of life."""

import contextlib
import copy
from collections.abc import Mapping
from typing import NotRequired, Self, TypedDict

from vitline.infra.runs.journal import Journal
from vitline.infra.runs.lease import LeaseHolder, LeaseLost
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import RunState, StateDetail, StopReason, write_state
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.runs.watchdog import Watchdog, note_progress
from vitline.infra.storage import Store


class WorkerError(TypedDict):
    """`errors/a<attempt>-<milliseconds>-rank<rank>.json`: an error that ended a worker."""

    at: float
    """Unix seconds."""
    rank: int
    error: str
    stacks: NotRequired[str]
    """Key of the stacks of a worker that was killed because it made no progress."""


class Run:
    """One attempt's hold of a run. Call `check()` before each write to `store`; the other methods do so themselves.

    As a context it opens the watchdog, the heartbeat and the polling of stop requests, each if asked for. Entering raises LeaseLost
    if it writes the heartbeat and another attempt holds the lease. `check()` and the writes work without the context, too.
    """

    def __init__(
        self,
        store: Store,
        attempt: int,
        *,
        beats: bool = False,
        follows_stops: bool = True,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`beats`: this process writes the heartbeat of the lease; exactly one process of a job does. `follows_stops`: it polls stop
        requests; otherwise `stopped()` is None. `watchdog` kills this process if `progress()` is not called for too long."""
        self.store, self.attempt = store, attempt
        self._lease, self._beats = LeaseHolder(store, attempt), beats
        self._stop, self._watchdog = StopPoller(store, attempt, active=follows_stops), watchdog
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self._watchdog is not None:
                stack.enter_context(self._watchdog)
            if self._beats:
                stack.enter_context(self._lease)
            stack.enter_context(self._stop)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def part(self, store: Store) -> Self:
        """The same hold for a part of the run that is stored elsewhere, such as a trial of an evaluation."""
        part = copy.copy(self)
        part.store = store
        return part

    def check(self) -> None:
        """Raises LeaseLost if another attempt holds the lease."""
        self._lease.check()

    @property
    def is_lost(self) -> bool:
        """Whether an earlier check or heartbeat found the lease lost. Reads nothing from the store."""
        return self._lease.lost

    def stopped(self) -> StopReason | None:
        """The stop request to this attempt, as polled within the last second. Never waits."""
        return self._stop.asked()

    @property
    def stopped_by(self) -> str:
        """Who requested the stop; empty without a request."""
        return self._stop.by

    def progress(self) -> None:
        """Tells the watchdog that something was done. Never waits; any thread may call it."""
        note_progress()

    def show(self, progress: RunProgress) -> None:
        """Writes `progress.json`."""
        self.check()
        self.store.write_json("progress.json", progress)

    def journal(self, writer: str = "", from_step: int = 0, writers: int = 1) -> Journal:
        """Opens the journal of this attempt, for rank 0 or another one of so many writers, and closes those of earlier attempts."""
        return Journal(
            self.store, self.attempt, writer=writer, check_lease=self.check, from_step=from_step, writers=writers
        )

    def count_start(self, since: str, record: Mapping[str, object]) -> int:
        """Records a start of the workers from the checkpoint named `since`, or `none`. Returns the number of earlier starts from it.
        Does not check the lease."""
        starts = self.store.list(self._starts(since))
        self.store.write_json(f"{self._starts(since)}{len(starts):03d}.json", record)
        return len(starts)

    def first_error(self, since: str) -> str:
        """The first error of a worker since the first start from `since`: the cause, as later ones are peers whose connection broke."""
        errors: list[WorkerError] = [self.store.read_json(key) for key in self.store.list(f"errors/a{self.attempt}-")]
        if since != "none":  # errors before the first of these starts did not keep it from a new checkpoint
            begun = min(self.store.read_json(key)["at"] for key in self.store.list(self._starts(since)))
            errors = [error for error in errors if error["at"] >= begun]
        first = min(errors, key=lambda error: error["at"], default=None)
        return f"the first error, on rank {first['rank']}: {first['error']}" if first else "no worker left an error"

    def _starts(self, since: str) -> str:
        """What the keys of this attempt's starts from a checkpoint begin with."""
        return f"starts/a{self.attempt}-from-{since}-"

    def end(self, state: RunState, detail: StateDetail) -> RunState:
        """Writes `state.json` and returns the state that counts: the first end of an attempt is final."""
        self.check()
        return write_state(self.store, state, self.attempt, **detail)

    def holds(self) -> bool:
        """Whether this attempt holds the lease now."""
        try:
            self.check()
        except LeaseLost:
            return False
        return True
