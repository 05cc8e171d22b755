"""Probes the checkpoints of a training while it runs: looks for the newest one, has it scored, and records the scores at its step."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import Journal
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.storage import Store
from vitline.vit.checkpoints.names import FOLDER, find_checkpoints
from vitline.vit.corpora.probed_corpora import is_due

log = logging.getLogger(__name__)
LOOK_S, LAST_LOOK_S = 5.0, 0.5
LAST_S = 600.0
"""How long the job waits for the scores of the last checkpoint after a training."""
WRITER = "probes"
"""Of the journal: probes and training record at the same time."""


class ProbeFollower:
    """Follows the checkpoints of one attempt. One is scored at a time, always the newest. Whatever goes wrong with a probe is logged,
    and the training continues."""

    def __init__(
        self, run: Store, attempt: int, every_steps: int, begin: Callable[[str], Future[dict[str, float]]]
    ) -> None:
        """`begin(prefix)` begins to score a checkpoint, elsewhere; the scores are by metric."""
        self._held, self._every, self._begin = Run(run, attempt), every_steps, begin
        self._journal: Journal | None = None
        self._begun = 0
        """The newest step whose scoring has begun, also in an earlier attempt."""
        self._current: tuple[int, Future[dict[str, float]]] | None = None

    def follow(self, over: threading.Event) -> None:
        """Looks every few seconds, until `over` is set. Trouble is logged once, until a look succeeds again."""
        trouble = False
        while not over.wait(LOOK_S):
            try:
                self.look()
                trouble = False
            except LeaseLost as lost:
                log.warning("checkpoints are not probed any more: %s", lost)
                return
            except Exception:
                if not trouble:
                    log.warning("the store or Ray did not answer; checkpoints are looked for again", exc_info=True)
                trouble = True

    def finish(self, given_up: Callable[[], bool]) -> None:
        """After the training: waits until its last checkpoint is scored, `given_up()`, or the time for it is over."""
        pause, end = threading.Event(), time.monotonic() + LAST_S
        with quietly():
            while self.look(is_last=True) and not given_up():
                if time.monotonic() > end:
                    log.warning("the last checkpoint is not scored after %.0f s; the run ends without it", LAST_S)
                    return
                pause.wait(LAST_LOOK_S)

    def look(self, *, is_last: bool = False) -> bool:
        """One look: takes the scores that have come, and begins with the newest checkpoint if it is due, or `is_last`. Returns
        whether one is being scored. Raises errors of the store, and LeaseLost."""
        if self._journal is None:
            self._journal = self._held.journal(WRITER)
            self._begun = self._journal.newest_step
        if self._current is not None and not self._is_over(*self._current, self._journal):
            return True
        self._current = None
        if found := find_checkpoints(self._held.store.list(FOLDER)).unmarked:
            step = found[0].step
            if step > self._begun and (is_last or is_due(step, self._begun, self._every)):
                self._begun = step
                self._current = self._started(step, found[0].prefix)
        return self._current is not None

    def _started(self, step: int, prefix: str) -> tuple[int, Future[dict[str, float]]] | None:
        try:
            return step, self._begin(prefix)
        except Exception as error:
            log.warning("step=%d: this checkpoint could not be probed: %s", step, error)
            return None

    def _is_over(self, step: int, scoring: Future[dict[str, float]], journal: Journal) -> bool:
        if not scoring.done():
            return False
        try:
            scores = scoring.result()
        except Exception as error:
            log.warning("step=%d: this checkpoint could not be probed: %s", step, error)
            return True
        log.info("step=%d %s", step, " ".join(f"{name}={value:.4f}" for name, value in scores.items()))
        journal.record(scores, step)
        return True

    def close(self) -> None:
        """Seals what was recorded."""
        if self._journal is not None:
            with quietly():
                self._journal.close()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Logs errors of the store and of Ray: they must not fail a training."""
    try:
        yield
    except LeaseLost as lost:
        log.warning("checkpoints are not probed any more: %s", lost)
    except Exception:
        log.warning("the store or Ray did not answer to a probe of a checkpoint", exc_info=True)
