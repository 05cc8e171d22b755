"""`vitline evaluate`: evaluates models on tasks, and reports the scores."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import PROTOCOL, Json, Root, settings, show_rows
from vitline.flows.cli.form_options import REQUIRED, form_command
from vitline.flows.forms.forms import EvaluateRequest
from vitline.vit.cost.estimate import PlanGpus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NO_SCORES = (
    "There are no scores yet: `vitline evaluate run --model NAME --task CORPUS` makes them. A task is a corpus with the splits "
    "train800, val200, train800val200 and test (the 19 of VTAB are named vtab-<task>), or train, val, trainval and test."
)


@app.command("protocols")
def evaluate_protocols(root: Root = None, json: Json = False) -> None:
    """List the protocols with their settings: those of vitline, and user-defined ones with the newest evaluation of each.

    `vitline runs show KEY` prints the whole protocol of an evaluation.

    Example: `vitline evaluate protocols`
    """
    from vitline.flows.reports.protocol_rows import COLUMNS, protocol_rows, user_protocol_rows

    unreadable = list[Exception]()
    rows = [{**row, "from": "vitline"} for row in protocol_rows()]
    rows += user_protocol_rows(settings(root).root, unreadable.append)
    show_rows("protocols", rows, [*COLUMNS, "from"], json, "", unreadable)


@form_command(
    app,
    "run",
    EvaluateRequest,
    spelled={"tasks": "task"},
    without=("protocol",),
    defaults={"tasks": REQUIRED},
    plans=True,
)
def evaluate_run(
    fields: dict[str, Any],
    plan: PlanGpus | None,
    protocol: Annotated[list[str], PROTOCOL] = ["vit-paper"],  # noqa: B006
    root: Root = None,
    json: Json = False,
) -> None:
    """Evaluate a model on tasks: select settings on validation, retrain once, read the test split once; or probe frozen features.

    Weights of another codebase are published first: an official .npz, or a folder or .safetensors of timm or Hugging Face.

    Example: `vitline evaluate run --model birds --task digits --protocol small-images --from-scratch`

    Example: `vitline evaluate run --model birds --task vtab --plan --gpu H100 --gpu-hour-price 2.5`

    Example: `vitline evaluate run --model birds --task vtab --protocol fewshot --protocol mine.yaml`
    """
    from vitline.flows.cli.evaluation import plan_and_show, score_and_show
    from vitline.flows.cli.models import published_uri
    from vitline.flows.cli.training import with_named
    from vitline.infra.config import replace

    chosen, request = settings(root), EvaluateRequest.model_validate(with_named(fields, "protocol", *protocol))
    request = replace(request, model=published_uri(chosen.root, request.model))
    if plan:
        plan_and_show(chosen, request, plan, as_json=json)
    else:
        score_and_show(chosen, request, as_json=json)


@app.command("report")
def evaluate_report(
    compare_with: Annotated[
        str | None,
        typer.Option(
            help="Published result to compare with. Default: the one with the same network and pre-training data."
        ),
    ] = None,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Show all published results, including version 1 of the paper and other networks."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write everything to this file as one HTML page.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show all stored scores with the published ones: VTAB, full data sets, your own tasks, probes of frozen features, cost.

    Example: `vitline evaluate report --compare-with "ViT-L/16 (I21k)" --html scores.html`
    """
    from vitline.flows.cli.tables import draw
    from vitline.flows.reports.score_lines import text_tables
    from vitline.flows.reports.score_report import as_data, read_report
    from vitline.flows.reports.score_tables import write_page

    where = settings(root).root
    report = read_report(where, compare_with)
    if html is not None:
        write_page(report, html, where)
    if json:
        console.emit(as_data(report))
        return
    for table in text_tables(report, "every" if all_ else "usual"):
        draw(table)
        console.print_result("")
    if not report.models:
        console.print_result(NO_SCORES)
    if report.num_left_out:
        console.print_result(
            f"{report.num_left_out} older records of the same model, protocol, task and seed are not shown: they were made on "
            "another version of the corpus, or by other code."
        )
    if html is not None:
        console.say(f"written: {html}")
