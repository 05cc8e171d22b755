"""`vitline vtab`: the tasks of VTAB from their official files, scores on them, and the paper's rows beside."""

from pathlib import Path
from typing import Annotated

import typer

from flows.command_line import Json, Root, settings, show_one

app = typer.Typer(
    help="VTAB: prepare its tasks, score models on them by the VTAB-1k protocol.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("files")
def vtab_files(
    task: Annotated[list[str] | None, typer.Option(help="Of these tasks only. Repeatable.")] = None,
    json: Json = False,
) -> None:
    """Which files the tasks are made of, where to get them, and on which terms. Put those of each data set into a folder
    of its name.

    Example: `vitline vtab files --task pets`
    """
    from flows.vtab_corpora import TASK_NAMES, show_files

    show_files(task or TASK_NAMES, as_json=json)


@app.command("prepare")
def vtab_prepare(
    source: Annotated[str, typer.Option(help="Folder with a folder for every data set: a path, or an s3:// URI.")],
    task: Annotated[list[str] | None, typer.Option(help="Of these tasks only. Repeatable. Default: all 19.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Prepare every task whose files are there, and say of the others what is missing. Goes on where it stopped.

    Example: `vitline vtab prepare --source ~/vtab`
    """
    from flows.vtab_corpora import prepare_and_show

    if not prepare_and_show(settings(root), source, task or [], as_json=json):
        raise typer.Exit(1)


@app.command("splits")
def vtab_splits(
    task: Annotated[str, typer.Argument(help="A prepared task")],
    out: Annotated[Path, typer.Option(help="The file to write: .csv.gz")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Write which examples are in which split of a prepared task, so that anyone can check what was evaluated.

    Example: `vitline vtab splits pets --out pets.csv.gz`
    """
    from flows.vtab_corpora import export_splits

    show_one(export_splits(settings(root), task, out), json)


@app.command("run")
def vtab_run(
    model: Annotated[str, typer.Option(help="Published model: NAME, NAME/VERSION or URI.")],
    task: Annotated[list[str], typer.Option(help="Task corpus with the splits of the 1k protocol. Repeatable.")],
    protocol: Annotated[str, typer.Option(help="Named protocol.")] = "vit-paper",
    seed: int = 0,
    control: Annotated[bool, typer.Option(help="Also train the same network from scratch.")] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Select on 800 -> 200 examples, train once on 1,000, read test once.

    Example: `vitline vtab run --model birds --task digits --protocol small-images --control`
    """
    from flows.evaluate_tasks import score_and_show
    from flows.requests import EvaluateRequest

    asked = {"model": model, "tasks": task, "protocol": protocol, "seed": seed, "from_scratch": control}
    score_and_show(settings(root), EvaluateRequest.model_validate(asked), as_json=json)


@app.command("report")
def vtab_report(root: Root = None, json: Json = False) -> None:
    """Every stored score, group means where they are whole, and the paper's rows. Example: `vitline vtab report`"""
    from flows.evaluate_tasks import show_scores

    show_scores(settings(root), as_json=json)
