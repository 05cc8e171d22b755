"""What the commands share: options, the settings they ask for, and how results are shown."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import console

if TYPE_CHECKING:
    from infra.settings import Settings

Root = Annotated[
    str | None,
    typer.Option("--root", help="Where corpora, runs and models live: a path or URI. Default: $VITLINE_ROOT."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field: `--set recipe.optim.peak_lr=3e-4`. Repeatable.")
]


def settings(root: str | None = None) -> "Settings":
    """Those of this process, with another root where one is given."""
    from infra.settings import Settings  # `--help` needs none of it

    return Settings(root=root) if root else Settings()


def show_rows(what: str, rows: list[dict[str, Any]], columns: list[str], as_json: bool, empty: str) -> None:
    """Rows as a table, or as {what: rows}; where there are none, `empty` says how to get one."""
    if as_json:
        console.emit({what: rows})
    elif not rows:
        console.say(empty)
    else:
        console.table("", columns, [[field(column, row.get(column)) for column in columns] for row in rows])


def show_one(value: Mapping[str, Any], as_json: bool) -> None:
    """A nested dict as a two-column table of dotted fields, or as JSON."""
    if as_json:
        console.emit(value)
        return
    from infra.config import flatten

    console.table("", ["field", "value"], [[key, field(key, v)] for key, v in flatten(value).items()])


def field(name: str, value: Any) -> str:
    """The value of a field as a table shows it: Unix times as dates in UTC, by the names that they have here."""
    if name.rpartition(".")[2].endswith("_at") and isinstance(value, int | float):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return cell(value)


def cell(value: Any) -> str:
    """A value as a table shows it; long lists and digests are cut."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(cell, value[:8])) + (f", ... ({len(value)})" if len(value) > 8 else "")
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text[:12] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text
