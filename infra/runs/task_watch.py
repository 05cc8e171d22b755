"""Inside a job: watchdogs of the tasks of a run, and the progress of code that does not know who watches it."""

from typing import NamedTuple

from infra.runs.watchdog import Watchdog
from infra.storage import open_store

PROGRESS_TIMEOUT_S = 1_800.0
MOST_HANGS = 3


class TaskWatch(NamedTuple):
    """Who watches the tasks of an attempt. Can be pickled."""

    run_uri: str
    attempt: int
    timeout_s: float = PROGRESS_TIMEOUT_S

    def over(self, task: str) -> Watchdog:
        """The watchdog for a task, to be opened in the process that does it. `task` is part of a file name.

        Ray starts a task again whose process was killed, without limit. Raises RuntimeError with the last error if this attempt has
        killed processes of this task MOST_HANGS times.
        """
        run = open_store(self.run_uri)
        hung = [key for key in run.list(f"errors/a{self.attempt}-") if key.endswith(f"-{task}.json")]
        if len(hung) >= MOST_HANGS:
            raise RuntimeError(f"{task} hung {len(hung)} times; the last error: {run.read_json(hung[-1])['error']}")
        return Watchdog(self.run_uri, self.attempt, self.timeout_s, who=task)
