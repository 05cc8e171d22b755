"""Finds errors in the logs of services: some servers answer although they do not work."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

REPEATED = 3
"""An error that occurs this often is reported."""
RECENT = timedelta(hours=1)
KNOWN = (
    # Prefect's background tasks block each other in SQLite, and Prefect retries them (its issue 23051).
    "database is locked",
)
"""Texts of tracebacks of other programs that need no action."""
_TAIL_BYTES = 2_000_000
_TIME = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
# "19:34:30.465 | ERROR   | name - text" of Prefect, "E1122 19:34:30" of SeaweedFS, "ERROR:    text" of uvicorn.
_ERROR = re.compile(r"\| (?:ERROR|CRITICAL) +\| |^[EF]\d{4} \d\d:|\b(?:ERROR|CRITICAL):? ")
_BEGINS = re.compile(r"^\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: |$)")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
# The parts that differ between two occurrences of the same error: times, ids, addresses, durations.
_PARTICULAR = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|0x[0-9a-f]+|\d+")


class LoggedError(NamedTuple):
    """An error in a log."""

    text: str
    """The last line of its traceback, or the logged line."""
    times: int
    last: datetime | None
    """The time of its last occurrence; None if the log has no dates."""
    traceback: bool


def logged_errors(log: Path) -> list[LoggedError]:
    """The different errors in the last 2 MB of a log, in the order of their first occurrence.

    Occurrences that differ only in numbers and ids count as one error. A missing log has no errors.
    """
    found: dict[str, LoggedError] = {}
    for text, when, traceback in _occurrences(_tail(log)):
        kind = _PARTICULAR.sub("#", text)
        before = found.get(kind)
        found[kind] = LoggedError(text, before.times + 1 if before else 1, when or (before and before.last), traceback)
    return list(found.values())


def repeated_errors(log: Path, now: datetime | None = None) -> list[LoggedError]:
    """The errors that occur at least `REPEATED` times, the last time within the last hour."""
    since = (now or datetime.now(UTC)) - RECENT
    return [e for e in logged_errors(log) if e.times >= REPEATED and (e.last is None or e.last >= since)]


def unexplained_tracebacks(folder: Path) -> list[str]:
    """One line for each traceback in the logs of `folder` that matches none of `KNOWN`."""
    return [
        f"{log.name}: {error.times} x {error.text}"
        for log in sorted(folder.glob("*.log*"))
        for error in logged_errors(log)
        if error.traceback and not any(known in error.text for known in KNOWN)
    ]


def _occurrences(text: str) -> Iterator[tuple[str, datetime | None, bool]]:
    """Text, time, and whether it has a traceback, of each error. Chained tracebacks count as one error, the last."""
    when: datetime | None = None
    announced: str | None = None  # a line with ERROR; a traceback directly below it belongs to it
    ended: str | None = None  # the last line of a traceback that may be the cause of the next one
    inside = group = False
    for line in text.splitlines():
        if found := _TIME.search(line):
            when = datetime.fromisoformat("{}-{}-{} {}:{}:{}+00:00".format(*found.groups()))
        if _BEGINS.match(line):
            if ended and not inside:
                yield ended, when, True
            inside, group, announced, ended = True, group or line.lstrip().startswith("+"), None, None
            continue
        if inside:
            bare = line.strip(" |+-")
            if line.startswith((" ", "|", "+")) or not bare:
                # In an exception group every line is indented; the innermost exception comes last.
                ended = bare if group and _EXCEPTION.match(bare) else ended
                continue
            inside, ended = False, ended if group else bare
            if not group:
                continue
            group = False
        if line.startswith(_CHAINED):
            ended = None
        elif line.strip():
            if ended:
                yield ended, when, True
            if announced:
                yield announced, when, False
            ended, announced = None, line.strip() if _ERROR.search(line) else None
    if ended:
        yield ended, when, True
    if announced:
        yield announced, when, False


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
