"""`vitline runs`: lists, shows and compares runs, and sends them to MLflow."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows
from vitline.flows.cli.tables import show_table
from vitline.infra.html.text import field

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def runs_ls(root: Root = None, json: Json = False) -> None:
    """List runs and pipelines, active ones first, then newest first: state, step, rate, time left, score.

    Example: `vitline runs ls`
    """
    from vitline.flows.catalog.lists import list_runs_and_pipelines
    from vitline.flows.catalog.run_status import progress_text

    where = settings(root).root
    columns = ["run", "stage", "state", "progress", "val_top1", "updated_at", "reason"]
    empty = f"No run below {where} yet; `vitline demo` or `vitline pretrain run --help` shows how to start one."
    rows = list_runs_and_pipelines(where)
    show_rows("runs", rows if json else [{**row, "progress": progress_text(row)} for row in rows], columns, json, empty)


@app.command("show")
def runs_show(
    key: Annotated[str, typer.Argument(help="Key of a run or pipeline, or its first characters")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Show the state, last metrics and config of a run or pipeline. Example: `vitline runs show icons-0a1b2c3d4e5f`"""
    from vitline.flows.catalog.lists import show_work
    from vitline.flows.catalog.run_status import flattened

    shown = show_work(settings(root).root, key)
    show_one(shown if json else flattened(shown), json)


@app.command("compare")
def runs_compare(
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of pipelines or runs, or their first characters. Default: the newest pipelines."),
    ] = None,
    newest: Annotated[int, typer.Option(min=2, help="Without keys: number of newest pipelines to compare.")] = 7,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page of two to six pipelines: scores, noise, changes, curves, pictures."),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Compare the recipes and final metrics of runs. Example: `vitline runs compare icons-0a1b icons-9f8e`"""
    from vitline.flows.reports.compare_runs import compare_newest, pipelines_of

    chosen = settings(root).root
    compared = compare_newest(chosen, keys or [], newest)
    if html is not None:
        from vitline.flows.reports.comparison.page import render_comparison
        from vitline.infra.storage import open_store

        html.write_text(render_comparison(open_store(chosen), pipelines_of(chosen, keys or [], newest)))
    if json:
        console.emit(compared)
        return
    parts: dict[str, dict[str, list[Any]]] = {"Differences": compared["differences"], "Metrics": compared["metrics"]}
    for title, rows in parts.items():
        body = [[name, *(field(name, v) for v in values)] for name, values in rows.items()]
        show_table(title, ["", *compared["runs"]], body)


@app.command("send")
def runs_send(
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of runs or pipelines, or their first characters. Default: all below the root."),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Send MLflow everything it is missing about runs, as after an outage or a rebuild. Safe to repeat.

    Example: `vitline runs send`
    """
    from vitline.flows.to_mlflow.child import sync_runs

    report = sync_runs(settings(root), keys or None)
    if json:
        console.emit(report._asdict())
    else:
        console.print_result(f"{len(report.done)} done, {len(report.left)} left.")
        for why in dict.fromkeys(report.left.values()):
            console.say(f"not sent: {', '.join(key for key, reason in report.left.items() if reason == why)}: {why}")
    if report.left:
        raise typer.Exit(1)
