"""`vitline pretrain`: plans, recipes, trainings and their branches."""

import re
from typing import Annotated, Any

import typer

from vitline.flows.cli.command_line import Json, Recipe, Root, settings, show_one, show_rows
from vitline.flows.cli.form_options import form_command
from vitline.flows.forms.forms import BranchRequest, PretrainRequest, SelfTrainRequest
from vitline.vit.cost.estimate import PlanGpus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Corpora = Annotated[
    list[str],
    typer.Option(
        help="Corpus to train on: NAME, NAME/VERSION or URI. Repeat it for a mixture, with weights: `--corpus birds --corpus "
        "city=0.5`; the default weight is 1."
    ),
]


@app.command("recipes")
def pretrain_recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to show.")] = None,
    json: Json = False,
) -> None:
    """List the recipes, or show one: the published result, its source, hardware and cost.

    Example: `vitline pretrain recipes vit-b16-i21k`
    """
    from vitline.vit.recipes import RECIPES, recipe_named

    if name is not None:
        recipe = recipe_named(name)
        show_one({"recipe": name, "what": recipe.what, **header_fields(recipe.header)}, json)
        return
    rows = [{"recipe": name, "what": recipe.what} for name, recipe in RECIPES.items()]
    show_rows("recipes", rows, ["recipe", "what"], json, "")


def header_fields(header: str) -> dict[str, str]:
    """`Expected: ...`, `Source: ...` of the header of a recipe, by name."""
    text = " ".join(header.split())
    found = re.split(r"(?:^| )(Expected|Source|Hardware|Cost): ", text)
    return {name.lower(): value for name, value in zip(found[1::2], found[2::2], strict=True)}


@form_command(app, "run", PretrainRequest, without=("corpus", "corpus_weight", "mix_with", "recipe"), plans=True)
def pretrain_run(
    fields: dict[str, Any],
    corpus: Corpora,
    recipe: Recipe,
    plan: PlanGpus | None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Pre-train on a corpus. The same command again resumes the run, or reuses its result.

    `--init-from` also takes weights of another codebase, which are published first: an official .npz, or a folder of timm or
    Hugging Face.

    Example: `vitline pretrain run --corpus birds --recipe vit-s16-i21k`

    Example: `vitline pretrain run --corpus birds --recipe vit-s16-i21k --plan --gpu H100 --gpu-hour-price 2.5`
    """
    from vitline.flows.cli.training import requested_training, show_plan, train_or_plan
    from vitline.flows.plans.training_plan import training_plan

    chosen = settings(root)
    training = requested_training(chosen.root, corpus, recipe, fields)
    if plan:
        show_plan(training_plan(training, plan), training, recipe, json)
    else:
        train_or_plan(chosen, training, plan=None, as_json=json)


@form_command(
    app,
    "self-train",
    SelfTrainRequest,
    arguments=("teacher",),
    spelled={"splits": "split"},
    without=("recipe",),
    plans=True,
)
def pretrain_self_train(
    fields: dict[str, Any], recipe: Recipe, plan: PlanGpus | None, root: Root = None, json: Json = False
) -> None:
    """Train a student on labelled images and on images that a teacher labels (noisy student). Finished stages are reused.

    Example: `vitline pretrain self-train birds --corpus birds --unlabelled city --recipe vit-b16-i21k-medium2`
    """
    from vitline.flows.cli.training import train_on, with_named
    from vitline.flows.forms.self_training_plan import resolve_self_train
    from vitline.flows.plans.training_plan import self_training_cost
    from vitline.flows.runs.self_train import self_train
    from vitline.flows.runs.services import open_services

    chosen = settings(root)
    stages = resolve_self_train(chosen.root, SelfTrainRequest.model_validate(with_named(fields, "recipe", recipe)))
    if plan:
        show_one(self_training_cost(chosen.root, stages, plan), json)
        return
    with open_services(chosen) as services:
        self_train(stages, services, lambda student: train_on(services, student, as_json=json))


@form_command(app, "branch", BranchRequest, arguments=("parent",), plans=True)
def pretrain_branch(fields: dict[str, Any], plan: PlanGpus | None, root: Root = None, json: Json = False) -> None:
    """Start a new run from a checkpoint of another, with the same network, optimizer state, weight averages, position in the data and
    config, except for what the options change. The parent run is not affected.

    Example: `vitline pretrain branch birds-0a1b2c3d4e5f --step 60000 --set recipe.optim.peak_lr=3e-4`
    """
    from vitline.flows.cli.training import train_or_plan
    from vitline.flows.forms.training_config import resolve_branch

    chosen = settings(root)
    train_or_plan(chosen, resolve_branch(chosen.root, BranchRequest.model_validate(fields)), plan=plan, as_json=json)
