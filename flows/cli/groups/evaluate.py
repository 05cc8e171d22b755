"""`vitline evaluate`: evaluates models on tasks, and reports the scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitline.flows.cli.command_line import Json, Plan, Root, settings, show_rows

if TYPE_CHECKING:
    from vitline.flows.forms.forms import EvaluateRequest

app = typer.Typer(
    help="Evaluate models on VTAB and other tasks; report the scores.", no_args_is_help=True, rich_markup_mode=None
)

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
ProtocolOption = Annotated[str, typer.Option(help="Named protocol; `vitline evaluate protocols` describes them.")]
Seed = Annotated[int, typer.Option(min=0, help="The first seed.")]
NumSeeds = Annotated[int, typer.Option(min=1, help="Number of seeds, counting up from the first.")]
FromScratch = Annotated[bool, typer.Option(help="Also train the same network from scratch, as a control.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a field of the protocol: protocol.FIELD=VALUE. The result is another protocol. No other field changes "
        "with it: with shorter protocol.total_steps, set protocol.warmup_steps, too. Repeatable.",
    ),
]


@app.command("protocols")
def evaluate_protocols(json: Json = False) -> None:
    """List the protocols with their settings. Example: `vitline evaluate protocols`"""
    from vitline.flows.reports.protocol_rows import protocol_rows

    show_rows("protocols", protocol_rows(), ["protocol", "splits", "image side", "settings", "pictures"], json, "")


@app.command("run")
def evaluate_run(
    model: Model,
    task: Tasks,
    protocol: ProtocolOption = "vit-paper",
    seed: Seed = 0,
    num_seeds: NumSeeds = 1,
    from_scratch: FromScratch = False,
    rescore: Annotated[
        bool, typer.Option(help="Evaluate again although there are score records; the new ones name the old ones.")
    ] = False,
    set_: Set = None,
    plan: Plan = False,
    tflops: Annotated[
        float | None,
        typer.Option(min=1e-3, help="For `--plan`: sustained TFLOP/s of a GPU. Default: measured on this machine."),
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="For `--plan`: price of one GPU for an hour.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Evaluate a model on tasks: choose settings on validation, train once more, read test once; or probe frozen features.

    Example: `vitline evaluate run --model birds --task digits --protocol small-images --from-scratch`

    Example: `vitline evaluate run --model birds --task vtab --plan --tflops 150 --usd-per-hour 2.5`
    """
    from vitline.flows.cli.evaluation import plan_and_show, score_and_show
    from vitline.infra.config import replace

    request = evaluation(settings(root).root, model, task, protocol, seed, num_seeds, from_scratch, set_)
    if plan:
        plan_and_show(settings(root), request, tflops=tflops, usd_per_hour=usd_per_hour, as_json=json)
    else:
        score_and_show(settings(root), replace(request, rescore=rescore), as_json=json)


def evaluation(
    root: str,
    model: str,
    tasks: list[str],
    protocol: str,
    seed: int,
    num_seeds: int,
    from_scratch: bool,
    set_: list[str] | None,
) -> "EvaluateRequest":
    """The request of the options. Weights of another codebase are published first."""
    from vitline.flows.cli.models import published_uri
    from vitline.flows.forms.forms import EvaluateRequest
    from vitline.flows.forms.overrides import parse_overrides
    from vitline.infra.config import replace

    fields = {"model": model, "tasks": tasks, "protocol": protocol, "seed": seed, "num_seeds": num_seeds}
    fields |= {"from_scratch": from_scratch, "overrides": parse_overrides(set_ or [])}
    request = EvaluateRequest.model_validate(fields)
    return replace(request, model=published_uri(root, model))


@app.command("report")
def evaluate_report(
    compare_with: Annotated[
        str | None,
        typer.Option(help="Published row to compare with. Default: the one of the same network and pre-training data."),
    ] = None,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Show all published rows, also of version 1 of the paper and other networks."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write everything to this file as one HTML page.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show every stored score with the published ones: VTAB, whole data sets, your tasks, frozen features, cost.

    Example: `vitline evaluate report --compare-with "ViT-L/16 (I21k)" --html scores.html`
    """
    from vitline.flows.reports.score_tables import show_scores

    show_scores(settings(root), beside=compare_with, every=all_, page=html, as_json=json)
