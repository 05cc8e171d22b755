"""Inside a job: watchdogs of the tasks of a run, and the progress of code that does not know who watches it."""

import math
from typing import NamedTuple

from vitline.infra.runs.watchdog import Watchdog
from vitline.infra.storage import open_store

PROGRESS_TIMEOUT_S = 1_800.0
MOST_ENDS = 3
"""How often the process of a task may end before the task is done."""


class TaskWatch(NamedTuple):
    """Who watches the tasks of an attempt. Can be pickled."""

    run_uri: str
    attempt: int
    timeout_s: float = PROGRESS_TIMEOUT_S

    def over(self, task: str, hangs: bool = True) -> Watchdog:
        """The watchdog for a task, to be opened in the process that does it. `task` is part of a file name.

        Not `hangs`: for a task that does not say what it has done; only the end of its process is noted. Ray starts a task again,
        without limit, whose process has ended: it was killed because it hung, or it crashed. Raises RuntimeError with the last
        error if that has happened MOST_ENDS times to this task in this attempt.
        """
        run = open_store(self.run_uri)
        ended = [key for key in run.list(f"errors/a{self.attempt}-") if key.split("-", 2)[-1] == f"{task}.json"]
        if len(ended) >= MOST_ENDS:
            error = run.read_json(ended[-1])["error"]
            raise RuntimeError(
                f"{task} was tried {len(ended)} times, and its process ended each time; the last error: {error}"
            )
        timeout_s = self.timeout_s if hangs else math.inf
        return Watchdog(self.run_uri, self.attempt, timeout_s, who=task, notes_end=True)
