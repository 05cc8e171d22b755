"""`vitline plan`: what machines a training needs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Mfu, Recipe, Root, check_page, settings
from vitline.flows.cli.form_options import form_command
from vitline.flows.cli.groups.pretrain import Corpora
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.forms import PretrainRequest
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.estimate import GPU, TRAINING_MFU, PlanGpus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


class ClusterOptions(ClusterAssumptions, PretrainRequest):
    """A training, and what is assumed of the nodes."""


@form_command(app, "cluster", ClusterOptions, without=("corpus", "corpus_weight", "mix_with", "recipe"))
def plan_cluster(
    fields: dict[str, Any],
    corpus: Corpora,
    recipe: Recipe,
    gpu: Annotated[str, typer.Option(help="The GPU of each worker: H200, A100-80GB, ..., or 150TFLOPS-48GB.")] = GPU,
    mfu: Mfu = TRAINING_MFU,
    images_per_s: Annotated[
        float | None,
        typer.Option(help="Images per second of a worker that waits for nothing. Default: by GPU and MFU."),
    ] = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measured", help="The speed of a worker is that of the newest run of the same network, batch, precision."
        ),
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page that draws the rows.")] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Simulate a training on 1, 2, 4 ... 1,024 nodes: images/s, days, price, lost work, goodput, what limits, and the knee. Starts nothing.

    Takes a training as `vitline pretrain run --plan` does; each row has as many workers as its nodes. What is assumed of nodes, network,
    store and failures is an option each.

    Example: `vitline plan cluster --corpus birds --recipe vit-b16-i21k --gpu H100 --node-hour-price 20 --page cluster.html`
    """
    from vitline.flows.cli.training import requested_training
    from vitline.flows.plans.cluster_plan import cluster_plan

    assumed = ClusterAssumptions.model_validate(
        {n: fields.pop(n) for n in ClusterAssumptions.model_fields if n in fields}
    )
    if page is not None:
        check_page("--page", page)
    training = requested_training(settings(root).root, corpus, recipe, fields)
    plan = cluster_plan(training, assumed, PlanGpus(gpu, mfu), images_per_s, measured=measured)
    if page is not None:
        from vitline.vit.pages.cluster import cluster_html

        html = cluster_html(plan.name, plan.what, plan.twin, plan.table(), plan.sentences(), assumed)
        page.write_text(html, encoding="utf-8")
        console.say(f"written to {page.absolute()}")
    if json:
        console.emit(plan.to_json())
        return
    if table := plan.table():
        show_table(f"{plan.name}: {plan.what}", [*table[0]], [[*row.values()] for row in table])
    for sentence in plan.sentences():
        console.print_result(sentence)
    values = assumed.model_dump(exclude_none=True)
    console.print_result(
        f"Assumed (--help has the sources): {', '.join(f'{name} {value:g}' for name, value in values.items())}."
    )
