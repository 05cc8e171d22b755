"""`vitline finetune`: a published model on a whole corpus."""

from typing import Annotated, Any

import typer

from vitline.flows.cli.command_line import PROTOCOL, Json, Root, settings
from vitline.flows.cli.form_options import form_command
from vitline.flows.forms.forms import FinetuneRequest
from vitline.vit.cost.estimate import PlanGpus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@form_command(
    app,
    "run",
    FinetuneRequest,
    spelled={"peak_lr": "lr", "global_batch_size": "batch", "image_size_px": "image-size"},
    without=("protocol",),
    plans=True,
)
def finetune_run(
    fields: dict[str, Any],
    plan: PlanGpus | None,
    protocol: Annotated[str | None, PROTOCOL] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Fine-tune on a corpus as in the paper: zero-initialised head, SGD with momentum 0.9, cosine schedule, gradient clipping at 1.

    Example: `vitline finetune run --model birds --corpus flowers --steps 500 --lr 0.03`
    """
    from vitline.flows.cli.training import train_or_plan, with_named
    from vitline.flows.forms.finetune_config import resolve_finetune

    chosen, found = settings(root), with_named(fields, "protocol", protocol) if protocol else fields
    training = resolve_finetune(chosen.root, FinetuneRequest.model_validate(found))
    train_or_plan(chosen, training, plan=plan, as_json=json)
