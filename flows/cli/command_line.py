"""Shared by the commands: options, settings, and the output of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.tables import show_table
from vitline.infra.html.text import field

if TYPE_CHECKING:
    from vitline.infra.settings import Settings

Root = Annotated[
    str | None,
    typer.Option("--root", help="Where corpora, runs and models are stored: a path or URI. Default: $VITLINE_ROOT."),
]
Mfu = Annotated[float, typer.Option(help="Fraction of the GPU's peak FLOP/s that is reached.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Recipe = Annotated[
    str,
    typer.Option(
        help="Model and training settings: a name (`vitline pretrain recipes`), a YAML file, or a Python function, PACKAGE.MODULE:FUNCTION."
    ),
]
PROTOCOL = typer.Option(
    help="Resolution, steps, rates and schedule: a name (`vitline evaluate protocols`), a YAML file, or a Python function, "
    "PACKAGE.MODULE:FUNCTION."
)


def settings(root: str | None = None) -> "Settings":
    """The settings of this process, with the given root if there is one."""
    from vitline.infra.settings import (  # imported here because `--help` does not need it
        Settings,
        import_nothing_from_here,
    )

    import_nothing_from_here()
    return Settings(root=root) if root else Settings()


def check_page(option: str, file: Path) -> None:
    """Raises ValueError unless a page can be written to the file of an option."""
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"{option} {str(file)!r} is not a file in an existing folder. Name one, such as page.html.")


def show_rows(
    what: str,
    rows: Sequence[Mapping[str, Any]],
    columns: list[str],
    as_json: bool,
    empty: str,
    unreadable: Sequence[Exception] = (),
) -> None:
    """Prints rows as a table, or as {what: rows}. If there are none, prints `empty`, which says how to get some.

    `unreadable` are the errors of unreadable records: they are printed at the end, and the exit code is 1.
    """
    if as_json:
        console.emit({what: rows})
    elif not rows and not unreadable:
        console.say(empty)
    else:
        show_table("", columns, [[field(column, row.get(column)) for column in columns] for row in rows])
    for each in unreadable:
        console.say(f"error: {each}")
    if unreadable:
        raise typer.Exit(1)


def show_one(value: Mapping[str, Any], as_json: bool) -> None:
    """Prints a nested dict as a two-column table of dotted fields, or as JSON."""
    if as_json:
        console.emit(value)
        return
    from vitline.infra.config import flatten

    show_table("", ["field", "value"], [[key, field(key, v)] for key, v in flatten(value).items()])
