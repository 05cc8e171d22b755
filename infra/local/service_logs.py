"""The logs of services: kept small while the services write, and read for errors, as some servers answer although they do not
work."""

import contextlib
import ctypes
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

REPEATED = 3
"""An error that occurs this often is reported."""
RECENT = timedelta(hours=1)
CLIENT_LEFT = re.compile(r": (?:context canceled|write tcp \S+: write: (?:broken pipe|connection reset by peer))$")
"""The end of an error of SeaweedFS where a client has closed its request before, or while, the store answered. Readers close the
slower of two reads (hedged reads)."""
_TAIL_BYTES = 2_000_000
MOST_BYTES, FILES = 16_000_000, 4
"""A log that is larger is shortened; a service has this many files at most."""
_MIB = 1 << 20  # every file system takes out pieces of this size
_COLLAPSE_RANGE = 8
_TIME = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
# "19:34:30.465 | ERROR   | name - text" of Prefect, "E1122 19:34:30" of SeaweedFS, "ERROR:    text" of uvicorn.
_ERROR = re.compile(r"\| (?:ERROR|CRITICAL) +\| |^[EF]\d{4} \d\d:|\b(?:ERROR|CRITICAL):? ")
_BEGINS = re.compile(r"^\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: |$)")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
# The parts that differ between two occurrences of the same error: times, ids, addresses, durations.
_PARTICULAR = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|0x[0-9a-f]+|\d+")


def open_private(path: Path) -> int:
    """Opens a log for appending; a new one is readable by its user only."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def set_aside(log: Path, part: Path | None = None, files: int = FILES) -> None:
    """Renames a log, or `part` of it, to `<log>.1`, after `.1` to `.2` and so on; the oldest is deleted."""
    for number in range(files - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace((part or log) if number == 1 else _numbered(log, number - 1), _numbered(log, number))


def shorten(log: Path, most_bytes: int = MOST_BYTES, kept_bytes: int = _TAIL_BYTES, files: int = FILES) -> bool:
    """Moves all but the end of a log that is larger than `most_bytes` to `<log>.1`. Returns whether it did.

    Its writers, which append, go on meanwhile and lose nothing: the copied part is taken out of the file at once. Where the
    file system cannot do that (only ext4 and XFS can), the log is copied whole and emptied, and a line that is written in
    between is lost. A process that is killed here leaves lines twice, and loses none.
    """
    if not log.exists() or log.stat().st_size <= most_bytes:
        return False
    file, part = open_private(log), log.with_name(f".{log.name}.part")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = (os.fstat(file).st_size - kept_bytes) // _MIB * _MIB
        if size <= 0 or os.fstat(file).st_size <= most_bytes:  # another process has just shortened it
            return False
        part.unlink(missing_ok=True)
        copy = open_private(part)
        try:
            _copy(file, copy, 0, size)
            os.fsync(copy)
            set_aside(log, part, files)
            if not _take_out(file, size):
                _copy(file, copy, size, None)
                os.ftruncate(file, 0)
        finally:
            os.close(copy)
    finally:
        os.close(file)
        part.unlink(missing_ok=True)
    return True


def _copy(file: int, to: int, at: int, end: int | None) -> None:
    """Copies a range of bytes; without an end, everything that is there by then."""
    while end is None or at < end:
        data = os.pread(file, _MIB if end is None else min(_MIB, end - at), at)
        if not data:
            return
        at += os.write(to, data)


def _take_out(file: int, size: int) -> bool:
    """Takes the first bytes out of a file, whose rest moves to the front. False where the file system cannot do that."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    return bool(fallocate(file, _COLLAPSE_RANGE, ctypes.c_int64(0), ctypes.c_int64(size)) == 0)


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


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
    return [
        error
        for error in logged_errors(log)
        if error.times >= REPEATED
        and (error.last is None or error.last >= since)
        and not CLIENT_LEFT.search(error.text)
    ]


def log_problem(log: str) -> str:
    """The most frequent repeated error of a log as a sentence; empty if there is none."""
    errors = repeated_errors(Path(log))
    if not errors:
        return ""
    worst = max(errors, key=lambda error: error.times)
    last = f", last at {worst.last:%Y-%m-%d %H:%M:%S}" if worst.last else ""
    return f"{log} holds the same error {worst.times} times{last}: {worst.text[:200]}"


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
