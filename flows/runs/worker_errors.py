"""What the workers of a job left in the store about their own failures: errors, and the stacks of those that hung."""

import contextlib
import time

from vitline.infra.redact import cleaned
from vitline.infra.storage import Store

LOOK_S = 30.0
_MOST_OF_ONE = 8_000
_MOST_CHARACTERS = 40_000


class WorkerErrors:
    """The errors of one attempt's workers, which start again by themselves: for the log of the flow."""

    def __init__(self, run: Store, attempt: int) -> None:
        self._run, self._prefix = run, f"errors/a{attempt}-"
        self._seen: set[str] = set()
        self._next_look = time.monotonic() + LOOK_S

    def news(self) -> list[str]:
        """A line for each error that was not returned before. Looks into the store every 30 s, else returns nothing."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + LOOK_S
        lines = []
        with contextlib.suppress(OSError, RuntimeError):  # the store did not answer
            for key in (key for key in self._run.list(self._prefix) if key not in self._seen):
                self._seen.add(key)
                with contextlib.suppress(ValueError, LookupError, TypeError):  # an odd record says nothing
                    error = self._run.read_json(key)["error"]
                    lines.append(cleaned(f"{_who(key.removesuffix('.json'))} ended: {error}"))
        return lines


def last_stacks(run: Store, attempt: int) -> str:
    """The last stacks of each worker of an attempt that made no progress, cut to what a page can show; empty without any."""
    with contextlib.suppress(OSError, RuntimeError):
        keys = {_who(key.removesuffix(".txt")): key for key in run.list(f"stacks/a{attempt}-")}
        shown = [
            f"\n\n{who} made no progress. Its stacks ({run.uri_of(key)}):\n{run.read(key).decode()[:_MOST_OF_ONE]}"
            for who, key in sorted(keys.items())
        ]
        return cleaned("".join(shown)[:_MOST_CHARACTERS])
    return ""


def _who(key: str) -> str:
    """`errors/a1-1764000000000-rank0` -> `rank0`"""
    return key.split("-", 2)[-1]
