"""`vitline finetune`: a published model on a whole corpus."""

from typing import Annotated, Any

import typer

from vitline.flows.cli.command_line import Json, Plan, Root, Set, settings, show_one

app = typer.Typer(help="Fine-tune a published model on a whole corpus.", no_args_is_help=True, rich_markup_mode=None)


@app.command("run")
def finetune_run(
    model: Annotated[str, typer.Option(help="Published model: NAME, NAME/VERSION or URI.")],
    corpus: Annotated[str, typer.Option(help="Corpus to train on: NAME, NAME/VERSION or URI.")],
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Take steps, batch, resolution, crop and schedule from this protocol, such as vit-paper-transfer."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps; default: the protocol's, or 500. Warmup shrinks with them."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; default: the protocol's, or 0.03.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step; default: the protocol's, or 512.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Input side in px; default: the protocol's, or the model's own.")
    ] = None,
    set_: Set = None,
    plan: Plan = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Fine-tune on a corpus as the paper does: new zero head, SGD with momentum 0.9, cosine, clip 1.

    Example: `vitline finetune run --model birds --corpus flowers --steps 500 --lr 0.03`
    """
    from vitline.flows.cli.training import train_and_show
    from vitline.flows.forms.finetune_config import resolve_finetune
    from vitline.flows.forms.forms import FinetuneRequest
    from vitline.flows.forms.overrides import parse_overrides
    from vitline.flows.plans.training_plan import training_plan

    fields: dict[str, Any] = {"model": model, "corpus": corpus, "protocol": protocol, "steps": steps, "peak_lr": lr}
    fields |= {"global_batch_size": batch, "image_size_px": image_size, "overrides": parse_overrides(set_ or [])}
    request = FinetuneRequest.model_validate(fields)
    chosen = settings(root)
    training = resolve_finetune(chosen.root, request)
    if plan:
        show_one(training_plan(training), json)
    else:
        train_and_show(chosen, training, as_json=json)
