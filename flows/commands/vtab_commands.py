"""`vitline vtab`: the tasks of VTAB from their official files, scores on them, and the paper's rows beside."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.command_line import Json, Root, settings, show_one, show_rows

if TYPE_CHECKING:
    from flows.requests.forms import EvaluateRequest

app = typer.Typer(
    help="VTAB: prepare its tasks, score models on them by the VTAB-1k protocol.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("files")
def vtab_files(
    task: Annotated[list[str] | None, typer.Option(help="Of these tasks only, by their corpora. Repeatable.")] = None,
    json: Json = False,
) -> None:
    """Which files the tasks of VTAB and the paper's other data sets are made of, where to get them, and on which terms. Put
    those of each data set into a folder of its name.

    Example: `vitline vtab files --task vtab-pets --task imagenet-real`
    """
    from flows.commands.vtab_corpora import show_files

    show_files(task or [], as_json=json)


@app.command("prepare")
def vtab_prepare(
    source: Annotated[str, typer.Option(help="Folder with a folder for every data set: a path, or an s3:// URI.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Of these tasks only, by their corpora. Repeatable. Default: VTAB's 19 and the paper's 7 others."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Prepare every task whose files are there, and say of the others what is missing. Goes on where it stopped. `vtab-pets`
    is the task of VTAB, `pets` the whole data set with the splits of the ViT paper.

    Example: `vitline vtab prepare --source ~/vtab --task imagenet --task cifar10`
    """
    from flows.commands.vtab_corpora import prepare_and_show

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

    Example: `vitline vtab splits vtab-pets --out pets.csv.gz`
    """
    from flows.commands.vtab_corpora import export_splits

    show_one(export_splits(settings(root), task, out), json)


Model = Annotated[
    str,
    typer.Option(
        help="Published model (NAME, which is its newest version, NAME/VERSION, NAME@ALIAS or URI), or weights of another "
        "codebase, which are published first: "
        "an official .npz, or a folder or .safetensors of timm or Hugging Face."
    ),
]
Tasks = Annotated[
    list[str], typer.Option(help="Task corpus, or `vtab` for those of the 19 that are prepared. Repeatable.")
]
ProtocolOption = Annotated[str, typer.Option(help="Named protocol; `vitline vtab protocols` describes them.")]
Seed = Annotated[int, typer.Option(min=0, help="The first seed.")]
NumSeeds = Annotated[int, typer.Option(min=1, help="Runs with seeds counting up from the first.")]
Control = Annotated[bool, typer.Option(help="Also train the same network from scratch.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="protocol.FIELD=VALUE; another protocol, then. No other field follows: with shorter protocol.total_steps set "
        "protocol.warmup_steps, too. Repeatable.",
    ),
]


@app.command("protocols")
def vtab_protocols(json: Json = False) -> None:
    """The named protocols with their settings. Example: `vitline vtab protocols`"""
    from flows.reports.protocol_rows import protocol_rows

    show_rows("protocols", protocol_rows(), ["protocol", "splits", "image side", "settings", "pictures"], json, "")


@app.command("plan")
def vtab_plan(
    model: Model,
    task: Tasks,
    protocol: ProtocolOption = "vit-paper",
    seed: Seed = 0,
    num_seeds: NumSeeds = 1,
    control: Control = False,
    set_: Set = None,
    tflops: Annotated[
        float | None, typer.Option(min=1e-3, help="Sustained TFLOP/s of a device. Default: measured on this machine.")
    ] = None,
    usd_per_hour: Annotated[float | None, typer.Option(min=0, help="Price of a device.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Trainings, images, device hours and cost of an evaluation, less what is finished. Trains nothing.

    Example: `vitline vtab plan --model birds --task vtab --tflops 150 --usd-per-hour 2.5`
    """
    from flows.requests.plan_evaluation import plan_and_show

    asked = evaluation(settings(root).root, model, task, protocol, seed, num_seeds, control, set_)
    plan_and_show(settings(root), asked, tflops=tflops, usd_per_hour=usd_per_hour, as_json=json)


@app.command("run")
def vtab_run(
    model: Model,
    task: Tasks,
    protocol: ProtocolOption = "vit-paper",
    seed: Seed = 0,
    num_seeds: NumSeeds = 1,
    control: Control = False,
    rescore: Annotated[bool, typer.Option(help="Score again what has a record; the new one names the old.")] = False,
    set_: Set = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Score a model on tasks: select on validation, train once more, read test once; or read its frozen features.

    Example: `vitline vtab run --model birds --task digits --protocol small-images --control`
    """
    from flows.stages.evaluate_tasks import score_and_show
    from infra.config import replace

    asked = evaluation(settings(root).root, model, task, protocol, seed, num_seeds, control, set_)
    score_and_show(settings(root), replace(asked, rescore=rescore), as_json=json)


def evaluation(
    root: str,
    model: str,
    tasks: list[str],
    protocol: str,
    seed: int,
    num_seeds: int,
    control: bool,
    set_: list[str] | None,
) -> "EvaluateRequest":
    """What the options ask for, its model published."""
    from flows.commands.models import published_uri
    from flows.requests.forms import EvaluateRequest
    from flows.requests.overrides import parse_overrides
    from infra.config import replace

    asked = {"model": model, "tasks": tasks, "protocol": protocol, "seed": seed, "num_seeds": num_seeds}
    asked |= {"from_scratch": control, "overrides": parse_overrides(set_ or [])}
    request = EvaluateRequest.model_validate(asked)
    return replace(request, model=published_uri(root, model))


@app.command("report")
def vtab_report(
    beside: Annotated[
        str | None,
        typer.Option(help="Published row to subtract. Default: the one of the same network and pre-training data."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="All published rows, also of version 1 of the paper and other networks.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write everything as one self-contained page.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Every stored score beside the published ones: VTAB, whole data sets, your tasks, frozen features, cost.

    Example: `vitline vtab report --beside "ViT-L/16 (I21k)" --html scores.html`
    """
    from flows.reports.score_tables import show_scores

    show_scores(settings(root), beside=beside, every=every, page=html, as_json=json)
