"""`vitline nights`: the verdicts of nights."""

from datetime import date
from typing import Annotated

import typer

from flows import console
from flows.commands.command_line import Json, Root, settings, show_rows

app = typer.Typer(help="Nights: their verdicts.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str | None, typer.Option(help="Name in the request of the nights, where there are several series.")]


@app.command("list")
def nights_list(name: Name = None, root: Root = None, json: Json = False) -> None:
    """List the nights, newest first, each with its verdict in one sentence. Example: `vitline nights list`"""
    from flows.nights.from_records import known_nights
    from flows.nights.night_page import NIGHT_COLUMNS, night_row
    from infra.records import UnreadableRecord
    from infra.storage import open_store

    odd: list[UnreadableRecord] = []
    chosen = settings(root).root
    rows = [night_row(night) for night in known_nights(open_store(chosen), odd.append) if name in (None, night.name)]
    empty = f"No night below {chosen} yet; the schedule of pretrain-then-transfer/nightly starts one."
    show_rows("nights", rows, list(NIGHT_COLUMNS), json, empty, odd)


@app.command("show")
def nights_show(
    night: Annotated[str, typer.Argument(help="UTC date of the night, such as 2026-11-23, or `last`.")],
    name: Name = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show the verdict of a night, made again from the records: differences, noise, and what has changed.

    Example: `vitline nights show last`
    """
    from flows.nights.show import chosen_night, made_again, print_night
    from infra.storage import open_store

    store = open_store(settings(root).root)
    wanted = None if night == "last" else parsed(night)
    shown = made_again(store, chosen_night(store, wanted, name))
    if json:
        console.emit(shown.model_dump(mode="json"))
    else:
        print_night(shown)


def parsed(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date; write it as 2026-11-23, or `last`.") from error
