"""`vitline vtab`: prepares the tasks of VTAB from official files, evaluates models on them, and reports scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows

if TYPE_CHECKING:
    from vitline.flows.forms.forms import EvaluateRequest

app = typer.Typer(
    help="VTAB and other tasks: prepare them, evaluate models on them, report the scores.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("files")
def vtab_files(
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task, by the name of its corpus. Repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """List the official files of VTAB's tasks and of the paper's other data sets, with download pages and licence terms. Put the
    files of each data set into a folder of its name.

    Example: `vitline vtab files --task vtab-pets --task imagenet-real`
    """
    from vitline.flows.cli.vtab_corpora import show_files

    show_files(task or [], as_json=json)


@app.command("prepare")
def vtab_prepare(
    source: Annotated[str, typer.Option(help="Folder with one folder per data set: a path, or an s3:// URI.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this task, by the name of its corpus. Repeatable. Default: VTAB's 19 and the paper's 7 others."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Prepare every task whose files exist, and report the missing files of the others. The same command resumes where it
    stopped. `vtab-pets` is the task of VTAB, `pets` the whole data set with the splits of the ViT paper.

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


Model = Annotated[
    str,
    typer.Option(
        help="Published model: NAME (its newest version), NAME/VERSION, NAME@ALIAS or URI. Or weights of another codebase, which "
        "are published first: an official .npz, or a folder or .safetensors of timm or Hugging Face."
    ),
]
Tasks = Annotated[
    list[str], typer.Option(help="Task corpus, or `vtab` for the prepared ones of VTAB's 19. Repeatable.")
]
ProtocolOption = Annotated[str, typer.Option(help="Named protocol; `vitline vtab protocols` describes them.")]
Seed = Annotated[int, typer.Option(min=0, help="The first seed.")]
NumSeeds = Annotated[int, typer.Option(min=1, help="Number of seeds, counting up from the first.")]
Control = Annotated[bool, typer.Option(help="Also train the same network from scratch, as a control.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a field of the protocol: protocol.FIELD=VALUE. The result is another protocol. No other field changes "
        "with it: with shorter protocol.total_steps, set protocol.warmup_steps, too. Repeatable.",
    ),
]


@app.command("protocols")
def vtab_protocols(json: Json = False) -> None:
    """List the protocols with their settings. Example: `vitline vtab protocols`"""
    from vitline.flows.reports.protocol_rows import protocol_rows

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
    usd_per_hour: Annotated[float | None, typer.Option(min=0, help="Price of a device per hour.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show trainings, images, device hours and cost of an evaluation, without its finished parts. Trains nothing.

    Example: `vitline vtab plan --model birds --task vtab --tflops 150 --usd-per-hour 2.5`
    """
    from vitline.flows.cli.evaluation import plan_and_show

    request = evaluation(settings(root).root, model, task, protocol, seed, num_seeds, control, set_)
    plan_and_show(settings(root), request, tflops=tflops, usd_per_hour=usd_per_hour, as_json=json)


@app.command("run")
def vtab_run(
    model: Model,
    task: Tasks,
    protocol: ProtocolOption = "vit-paper",
    seed: Seed = 0,
    num_seeds: NumSeeds = 1,
    control: Control = False,
    rescore: Annotated[
        bool, typer.Option(help="Evaluate again although there are score records; the new ones name the old ones.")
    ] = False,
    set_: Set = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Evaluate a model on tasks: choose settings on validation, train once more, read test once; or probe frozen features.

    Example: `vitline vtab run --model birds --task digits --protocol small-images --control`
    """
    from vitline.flows.cli.evaluation import score_and_show
    from vitline.infra.config import replace

    request = evaluation(settings(root).root, model, task, protocol, seed, num_seeds, control, set_)
    score_and_show(settings(root), replace(request, rescore=rescore), as_json=json)


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
    """The request of the options. Weights of another codebase are published first."""
    from vitline.flows.cli.models import published_uri
    from vitline.flows.forms.forms import EvaluateRequest
    from vitline.flows.forms.overrides import parse_overrides
    from vitline.infra.config import replace

    fields = {"model": model, "tasks": tasks, "protocol": protocol, "seed": seed, "num_seeds": num_seeds}
    fields |= {"from_scratch": control, "overrides": parse_overrides(set_ or [])}
    request = EvaluateRequest.model_validate(fields)
    return replace(request, model=published_uri(root, model))


@app.command("report")
def vtab_report(
    beside: Annotated[
        str | None,
        typer.Option(help="Published row to compare with. Default: the one of the same network and pre-training data."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--every", help="Show all published rows, also of version 1 of the paper and other networks."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write everything to this file as one HTML page.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show every stored score with the published ones: VTAB, whole data sets, your tasks, frozen features, cost.

    Example: `vitline vtab report --beside "ViT-L/16 (I21k)" --html scores.html`
    """
    from vitline.flows.reports.score_tables import show_scores

    show_scores(settings(root), beside=beside, every=every, page=html, as_json=json)
