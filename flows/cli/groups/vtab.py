"""`vitline vtab`: prepares the tasks of VTAB and other benchmarks from official files."""

from pathlib import Path
from typing import Annotated

import typer

from vitline.flows.cli.command_line import Json, Root, settings, show_one

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("files")
def vtab_files(
    task: Annotated[list[str] | None, typer.Option(help="Only this task, by its corpus name. Repeatable.")] = None,
    json: Json = False,
) -> None:
    """List the official files of VTAB's tasks, of the paper's other data sets and of those of robustness, with download pages and
    licence terms. Put the files of each data set into a folder named after it.

    Example: `vitline vtab files --task vtab-pets --task imagenet-real`
    """
    from vitline.flows.cli.vtab_corpora import show_files

    show_files(task or [], as_json=json)


@app.command("prepare")
def vtab_prepare(
    source: Annotated[str, typer.Option(help="Folder with one folder per data set: a path, or the URI of a bucket.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this task, by its corpus name, or one of the groups vtab and robustness. Repeatable. Default: VTAB's 19, the "
            "paper's 7 others, and the 19 of robustness."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Prepare every task whose files exist, and list the missing files of the others. Run it again to resume. `vtab-pets` is the
    task of VTAB, `pets` the full data set with the splits of the ViT paper.

    Example: `vitline vtab prepare --source ~/vtab --task imagenet --task cifar10`
    """
    from vitline.flows.cli.vtab_corpora import prepare_and_show

    if not prepare_and_show(settings(root), source, task or [], as_json=json):
        raise typer.Exit(1)


@app.command("splits")
def vtab_splits(
    task: Annotated[str, typer.Argument(help="A prepared task")],
    out: Annotated[Path, typer.Option(help="File to write: .csv.gz")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Write the examples of each split of a prepared task to a file, so that anyone can check what was evaluated.

    Example: `vitline vtab splits vtab-pets --out pets.csv.gz`
    """
    from vitline.flows.cli.vtab_corpora import export_splits

    show_one(export_splits(settings(root), task, out), json)
