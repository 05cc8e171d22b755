"""Numbers, times and lists as people read them: in terminals, on pages and in messages."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

# Names of scores and accuracies, also with what tells apart whose they are: `tasks/pets/top1_from_scratch`; and of other shares
# among metrics, whose names have a slash, unlike the fields of configs.
_SHARE = re.compile(
    r"(^|[/._])(top1|ece|mce|patch_accuracy|mean_average_precision|majority_fraction)(_\w+)?$|/.*(_fraction|mfu)$"
)


def percent(fraction: float) -> str:
    """0.413 -> `41.3 %`"""
    return f"{100 * fraction:.1f} %"


def points(fraction: float) -> str:
    """A difference in percentage points: `+1.2`, `-0.3`."""
    return f"{100 * fraction:+.1f}"


def clock(seconds: float) -> str:
    """90 -> `1:30`, 8000 -> `2:13:20`, 0.4 -> `0:00`"""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def num_bytes(number: float) -> str:
    """Formats bytes, such as 1.5 MB."""
    return short(number, "B")


def short(number: float, unit: str = "") -> str:
    """Formats a number to three digits, such as 20k, or 1.5 MB with a unit."""
    prefixes = iter(("", "k", "M", "G", "T"))
    while (prefix := next(prefixes, "P")) != "P" and number >= 999.5:
        number /= 1000
    return f"{number:.3g}{' ' if unit else ''}{prefix}{unit}"


def duration(seconds: float) -> str:
    """Formats seconds, such as 0.8 s, 12 min or 3.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def utc(unix_s: float) -> str:
    """1763690400.0 -> `2025-11-21 02:00:00 UTC`"""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def shortened_list(names: Sequence[str], limit: int = 5) -> str:
    """`a, b, c, d, e and 3 more`"""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


def and_list(names: Sequence[str]) -> str:
    """`digits, emoji and pets`"""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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
    return text[:12] if len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text) else text


def short_json(value: Any) -> str:
    """A value as JSON, cut after 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
