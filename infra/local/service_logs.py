"""Errors that the logs of services hold: what a server that answers, but does not do its work, says of itself."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

REPEATED = 3
"""An error that a log holds this often is no accident."""
RECENT = timedelta(hours=1)
KNOWN = (
    # Prefect's own background tasks meet each other in SQLite, and Prefect tries them again (its issue 23051).
    "database is locked",
)
"""Tracebacks of other people's programs that heal by themselves."""
_TAIL_BYTES = 2_000_000
_TIME = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
# "19:34:30.465 | ERROR   | name - text" of Prefect, "E1122 19:34:30" of SeaweedFS, "ERROR:    text" of uvicorn.
_ERROR = re.compile(r"\| (?:ERROR|CRITICAL) +\| |^[EF]\d{4} \d\d:|\b(?:ERROR|CRITICAL):? ")
_BEGINS = re.compile(r"^\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: |$)")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
# What differs between two occurrences of one error: times, ids, addresses, durations.
_PARTICULAR = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|0x[0-9a-f]+|\d+")


class LoggedError(NamedTuple):
    """An error as a log holds it."""

    text: str
    """The last line of its traceback, or the line that was logged."""
    times: int
    last: datetime | None
    """When it was logged last; None where the log gives no dates."""
    traceback: bool


def logged_errors(log: Path) -> list[LoggedError]:
    """The different errors in the last 2 MB of a log, in the order of their first occurrence; occurrences that differ in
    numbers and ids only are one. A log that is not there holds none."""
    found: dict[str, LoggedError] = {}
    for text, when, traceback in _occurrences(_tail(log)):
        kind = _PARTICULAR.sub("#", text)
        before = found.get(kind)
        found[kind] = LoggedError(text, before.times + 1 if before else 1, when or (before and before.last), traceback)
    return list(found.values())


def repeated_errors(log: Path, now: datetime | None = None) -> list[LoggedError]:
    """Those that a log holds at least `REPEATED` times, the last time within the last hour."""
    since = (now or datetime.now(UTC)) - RECENT
    return [e for e in logged_errors(log) if e.times >= REPEATED and (e.last is None or e.last >= since)]


def unexplained_tracebacks(folder: Path) -> list[str]:
    """A line for each traceback in the logs of `folder` that is not one of `KNOWN`."""
    return [
        f"{log.name}: {error.times} x {error.text}"
        for log in sorted(folder.glob("*.log*"))
        for error in logged_errors(log)
        if error.traceback and not any(known in error.text for known in KNOWN)
    ]


def _occurrences(text: str) -> Iterator[tuple[str, datetime | None, bool]]:
    """Text, time and kind of each error; chained tracebacks are one error, that of the last."""
    when: datetime | None = None
    announced: str | None = None  # a line that says ERROR; a traceback right below it belongs to it
    ended: str | None = None  # the last line of a traceback that may be the cause of the next
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
                # In a group of exceptions every line is indented; the innermost exception stands last.
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
