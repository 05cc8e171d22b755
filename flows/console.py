"""Output in a terminal: lines, one live progress line, tables. Results go to stdout, everything else to stderr."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from vitline.infra.plain_text import visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console

    from vitline.infra.runs.progress import RunProgress

PLAIN_LINE_EVERY_S = 15.0
# Names of scores and accuracies, also with what tells apart whose they are: `tasks/pets/top1_from_scratch`; and of other shares
# among metrics, whose names have a slash, unlike the fields of configs.
_SHARE = re.compile(
    r"(^|[/._])(top1|patch_accuracy|mean_average_precision|majority_fraction)(_\w+)?$|/.*(_fraction|mfu)$"
)


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


def table(title: str, columns: list[str], rows: list[list[str]], *, right: tuple[int, ...] = ()) -> None:
    """Prints a table on stdout; columns in `right` are aligned to the right. Cells are plain text, never markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        title=Text(visible(title)) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        pad_edge=False,
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        drawn.add_column(Text(visible(column)), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(visible(text)) for text in row))
    out().print(drawn)


@contextmanager
def progress(title: str) -> Iterator[Callable[["RunProgress | None"], None]]:
    """A live line from the `progress.json` of a job. If the output is not a terminal, a plain line every 15 seconds."""
    started = time.monotonic()
    if err().is_terminal:
        from rich.text import Text

        with err().status(Text(visible(f"{title} ..."))) as status:
            yield lambda p: status.update(Text(visible(line(title, p, time.monotonic() - started))))
    else:
        say(f"{title} ...")
        last, at = [started], [position(None)]

        def update(p: "RunProgress | None") -> None:
            now = time.monotonic()
            if position(p) != at[0] and now - last[0] >= PLAIN_LINE_EVERY_S:
                last[0], at[0] = now, position(p)
                say(f"  {line(title, p, now - started)}")

        yield update


def position(p: "RunProgress | None") -> tuple[object, ...]:
    """How far a job is. A line that shows the same again is not worth a place in a log."""
    return () if p is None else (p.get("step"), p.get("unit"), p.get("waiting_for"), p.get("waits"))


def line(title: str, p: "RunProgress | None", elapsed_s: float) -> str:
    """`pretrain 120/600 steps, 640 images/s, loss 2.31, 1:10 left`"""
    if p is None:
        return f"{title}: waiting for the job to start ({duration(elapsed_s)})"
    if p.get("waiting_for"):
        return f"{title}: waiting for {p['waiting_for']} ({duration(elapsed_s)})"
    if "waits" in p:
        return f"{title}: no progress yet after {duration(elapsed_s)}; {p['waits']}"
    of = f"/{p['total_steps']:,}" if p["total_steps"] else ""
    parts = [f"{title}: {p['step']:,}{of} {p.get('unit', 'steps')}"]
    if p.get("images_per_s"):
        parts.append(f"{p['images_per_s']:,.0f} images/s")
    if p.get("bytes_per_s"):
        parts.append(f"{p['bytes_per_s'] / 1e6:,.1f} MB/s")
    if (loss := p.get("loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    if p.get("validation"):
        parts.append(p["validation"])
    if p.get("spikes"):
        parts.append(p["spikes"])
    if p.get("devices"):
        parts.append(f"on {p['devices']}")
    if p.get("input_wait"):
        parts.append(p["input_wait"])
    if p.get("slow_rank"):
        parts.append(p["slow_rank"])
    if p.get("refused"):
        parts.append(f"{p['refused']:,} refused")
    if (remaining_s := p.get("remaining_s")) is not None:
        parts.append(f"{duration(remaining_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """90 -> `1:30`, 8000 -> `2:13:20`, 0.4 -> `0:00`"""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def field(name: str, value: Any) -> str:
    """The value of a field or metric as a table cell: scores and shares in percent, their differences in points, and Unix times,
    whose names end in `_at`, as dates in UTC."""
    if name.rpartition(".")[2].endswith("_at") and isinstance(value, int | float):
        return utc(value)
    if isinstance(value, float) and name.endswith("/difference"):
        return f"{100 * value:+.1f} points"
    return percent(value) if isinstance(value, float) and _SHARE.search(name) else cell(value)


def cell(value: Any) -> str:
    """A value as a table cell; long lists and digests are shortened."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {field(k, v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(cell, value[:8])) + (f", ... ({len(value)})" if len(value) > 8 else "")
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text[:12] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text


def utc(unix_s: float) -> str:
    """1763690400.0 -> `2025-11-21 02:00:00 UTC`"""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def first_of(names: Sequence[str], limit: int = 5) -> str:
    """`a, b, c, d, e and 3 more`"""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


def init_text(model: str | None) -> str:
    """What a trial starts from; `model` is a URI or digest, None for the control."""
    return "pre-trained" if model else "from scratch"


_FIRST = ("peak_lr", "total_steps", "shots", "neighbours", "strength")


def setting(chosen: Mapping[str, Any]) -> str:
    """A setting with the validation score that chose it: `lr 0.03, 100 steps, val 41.0 %`. Counts of 0 and flags that are
    true are left out."""
    parts = []
    for name in sorted(chosen.keys() - {"val_top1"}, key=lambda name: (name not in _FIRST, name)):
        value, word = chosen[name], name.replace("_", " ")
        if isinstance(value, bool):
            parts += [] if value else [f"not {word}"]
        elif isinstance(value, float):
            parts.append(f"{'lr' if name == 'peak_lr' else word} {value:g}")
        elif isinstance(value, int):
            parts += [f"{value:,} {word.removeprefix('total ').removeprefix('num ')}"] if value else []
        else:
            parts.append(f"{word}: {value}")
    return ", ".join([*parts, f"val {percent(chosen['val_top1'])}"] if "val_top1" in chosen else parts)
