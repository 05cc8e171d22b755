"""`vitline nights`: verdicts of nights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_rows
from vitline.flows.cli.tables import show_table
from vitline.infra.night import night_text

if TYPE_CHECKING:
    from vitline.flows.nights.night_record import NightRecord

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Series = Annotated[str | None, typer.Option("--name", help="Name of the series, if there are several.")]


@app.command("ls")
def nights_ls(
    name: Series = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page: scores over time, with noise, data and cost.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """List the nights, newest first, each with its verdict in one sentence.

    Example: `vitline nights ls --html nights.html`
    """
    from vitline.flows.nights.from_records import known_nights
    from vitline.flows.nights.night_page import NIGHT_COLUMNS, night_row
    from vitline.infra.records import UnreadableRecord
    from vitline.infra.storage import open_store

    unreadable: list[UnreadableRecord] = []
    chosen = settings(root).root
    rows = [
        night_row(night) for night in known_nights(open_store(chosen), unreadable.append) if name in (None, night.name)
    ]
    empty = f"No night below {chosen} yet; the schedule of pretrain-then-transfer/nightly starts one."
    if html is not None and rows:
        from vitline.flows.nights.trend.page import render_trend
        from vitline.flows.nights.trend.trend import all_series

        html.write_text(render_trend(chosen, all_series(open_store(chosen), name, lambda seen: None)))
        console.say(f"written to {html.absolute()}")
    show_rows("nights", rows, list(NIGHT_COLUMNS), json, empty, unreadable)


@app.command("show")
def nights_show(
    night: Annotated[
        str, typer.Argument(help="Scheduled start, such as 2026-11-23T02:00 (UTC), or the date alone, or `last`.")
    ],
    name: Series = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show the verdict of a night, recomputed from the records: score differences, noise, and what changed.

    Example: `vitline nights show 2026-11-23T02:00`
    """
    from vitline.flows.nights.show import chosen_night, made_again
    from vitline.infra.storage import open_store

    store = open_store(settings(root).root)
    shown = made_again(store, chosen_night(store, night, name))
    if json:
        console.emit(shown.model_dump(mode="json"))
    else:
        print_night(shown)


def print_night(night: "NightRecord") -> None:
    """Prints the sentence of a night, a table for each comparison, and what has changed."""
    from vitline.flows.nights.night_page import (
        COLUMNS,
        OTHER_COLUMNS,
        OTHERS,
        change_rows,
        difference_rows,
        footnote,
        notes,
        other_rows,
        title,
    )

    console.print_result(f"{night_text(night.night)}  {night.name}  {night.pipeline or ''}".rstrip())
    console.print_result(night.sentence)
    if night.gate is not None:
        console.print_result(night.gate.reason)
    for against in night.verdict.against if night.verdict else ():
        if against.differences:
            show_table(title(against), COLUMNS, difference_rows(against))
        for line in notes(against):
            console.print_result(line)
        if rows := change_rows(against.changes):
            show_table("Changed", ["", "there", "here"], rows)
    if night.others:
        show_table(OTHERS, OTHER_COLUMNS, other_rows(night))
    if text := footnote(night):
        console.print_result(text.replace("`", ""))
