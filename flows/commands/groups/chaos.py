"""`vitline ops chaos`: faults on purpose, and a report of the promises that held."""

from typing import TYPE_CHECKING, Annotated

import typer

from vitline.flows import console
from vitline.flows.commands.command_line import Json, Root, settings

if TYPE_CHECKING:
    from vitline.flows.chaos.scenario import Result

app = typer.Typer(
    help="Inject faults into trainings of its own, and report which promises hold on this store and stack.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def chaos_list(json: Json = False) -> None:
    """List the scenarios: fault, promise, what each needs and about how long it takes.

    Example: `vitline ops chaos list`
    """
    from vitline.flows.chaos.suite import SCENARIOS

    rows = [[each.name, each.fault, each.promise, each.needs, f"{each.about_s} s"] for each in SCENARIOS.values()]
    columns = ["name", "fault", "promise", "needs", "about"]
    if json:
        console.emit({"scenarios": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        console.table("", columns, rows)


@app.command("run")
def chaos_run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Scenarios of `vitline ops chaos list`; default: all.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder or URI for the report. Default: chaos/ below the root.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Run scenarios one after another and say which promises were kept. The exit code is 1 if one was broken.

    Faults befall only what this command has made: trainings in a folder of its own below the root, its own processes, and its
    own connection to the store. It kills nothing else and deletes its work at the end.

    Example: `vitline ops chaos run killed-process two-starters`
    """
    from vitline.flows.chaos.suite import choose, run_suite

    def show(result: "Result") -> None:
        console.say(f"{result.verdict:9}  {result.name} ({result.seconds:.0f} s): {result.promise}")
        if result.verdict != "kept":
            console.say(f"{'':9}  {result.found}")

    report = run_suite(settings(root), choose(names or []), out, show)
    if json:
        console.emit({"results": [result._asdict() for result in report.results], "report": report.uri})
    else:
        console.print_result(f"{report.summary}. Report: {report.uri}/report.md")
    if not report.is_kept:
        raise typer.Exit(1)
