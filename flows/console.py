"""Output in a terminal: lines and one live progress line. Results go to stdout, everything else to stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from vitline.infra.plain_text import visible, visible_lines
from vitline.infra.runs.progress import position, progress_line

if TYPE_CHECKING:
    from rich.console import Console

    from vitline.infra.runs.progress import RunProgress

PLAIN_LINE_EVERY_S = 15.0


@cache
def out() -> "Console":
    """Stdout. rich respects NO_COLOR and draws plain text if the output is not a terminal. It is imported when needed,
    because the import takes a third of the time that `--help` may take."""
    from rich.console import Console

    # In a file or pipe, tables get 160 columns; 80 would break most names.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


@cache
def err() -> "Console":
    """Stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Prints a line of progress or an error on stderr."""
    err().print(visible_lines(text), soft_wrap=True, markup=False)


def print_result(text: str) -> None:
    """Prints a line of the result on stdout."""
    out().print(visible_lines(text), soft_wrap=True, markup=False)


def emit(value: Any) -> None:
    """Prints the JSON object of `--json` on stdout."""
    sys.stdout.write(json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")


@contextmanager
def progress(title: str) -> Iterator[Callable[["RunProgress | None"], None]]:
    """A live line from the `progress.json` of a job. If the output is not a terminal, a plain line every 15 seconds."""
    started = time.monotonic()
    if err().is_terminal:
        from rich.text import Text

        with err().status(Text(visible(f"{title} ..."))) as status:
            yield lambda p: status.update(Text(visible(progress_line(title, p, time.monotonic() - started))))
    else:
        say(f"{title} ...")
        last, at = [started], [position(None)]

        def update(p: "RunProgress | None") -> None:
            now = time.monotonic()
            if position(p) != at[0] and now - last[0] >= PLAIN_LINE_EVERY_S:
                last[0], at[0] = now, position(p)
                say(f"  {progress_line(title, p, now - started)}")

        yield update
