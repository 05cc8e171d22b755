"""`vitline pretrain`: plans, recipes, trainings and their branches."""

import re
from typing import Annotated, Any, Literal

import typer

from vitline.flows.cli.command_line import ClassMap, Json, Plan, Recipe, Root, Set, settings, show_one, show_rows

app = typer.Typer(help="Pre-training: run, plan, branch.", no_args_is_help=True, rich_markup_mode=None)

Corpora = Annotated[
    list[str],
    typer.Option(
        help="Corpus to train on: NAME, NAME/VERSION or URI. Repeat it for a mixture, with weights: `--corpus birds --corpus "
        "city=0.5`; a weight that is not given is 1."
    ),
]
InitFrom = Annotated[
    str | None,
    typer.Option(
        help="Weights to start from: a published model (NAME, NAME/VERSION, NAME@ALIAS, URI), the key of a finished run, a .npz file, "
        "or a folder of timm or Hugging Face. The head is new where the classes differ."
    ),
]


@app.command("recipes")
def pretrain_recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, to show what is expected of it.")] = None,
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


@app.command("run")
def pretrain_run(
    corpus: Corpora,
    recipe: Recipe,
    class_map: ClassMap = None,
    init_from: InitFrom = None,
    set_: Set = None,
    plan: Plan = False,
    gpu: Annotated[str, typer.Option(help="For `--plan`: the GPU of each worker: H200, H100, A100, ...")] = "H200",
    mfu: Annotated[float, typer.Option(help="For `--plan`: fraction of the GPU's peak FLOP/s that is reached.")] = 0.35,
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, help="For `--plan`: price of one GPU for an hour, in any currency.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Pre-train on a corpus. The same request finds the same run: it resumes, or is reused when it is finished.

    Example: `vitline pretrain run --corpus birds --recipe vit-s16-i21k`

    Example: `vitline pretrain run --corpus birds --recipe vit-s16-i21k --plan --gpu H100 --gpu-hour-price 2.5`
    """
    from vitline.flows.cli.training import requested_training, show_plan, train_and_show
    from vitline.flows.plans.training_plan import training_plan

    chosen = settings(root)
    training = requested_training(chosen.root, corpus, recipe, set_ or [], class_map, init_from)
    if plan:
        found = training_plan(training, gpu=gpu, mfu=mfu, gpu_hour_price=gpu_hour_price)
        show_plan(found, training, recipe, set_ or [], json)
    else:
        train_and_show(chosen, training, as_json=json)


@app.command("self-train")
def pretrain_self_train(
    teacher: Annotated[str, typer.Argument(help="Model that labels: NAME (its newest version), NAME/VERSION or URI")],
    corpus: Annotated[str, typer.Option(help="Corpus of labelled images: NAME, NAME/VERSION or URI.")],
    unlabelled: Annotated[str, typer.Option(help="Corpus of the images to label: NAME, NAME/VERSION or URI.")],
    recipe: Recipe,
    split: Annotated[
        list[str] | None, typer.Option(help="Split of the images to label; may be repeated. Default: train.")
    ] = None,
    labels: Annotated[
        Literal["soft", "hard"], typer.Option(help="Probabilities of the --top-k classes, or the most probable class.")
    ] = "soft",
    top_k: Annotated[int, typer.Option(min=1, help="Classes that are stored for each image.")] = 10,
    min_score: Annotated[
        float, typer.Option(min=0, max=1, help="Images whose most probable class has less are left out.")
    ] = 0.3,
    max_per_class: Annotated[
        int | None, typer.Option(min=1, help="Images of each most probable class, those of the highest probability.")
    ] = None,
    predicted_weight: Annotated[
        float, typer.Option(help="Weight of the images that the teacher labels; that of --corpus is 1.")
    ] = 1.0,
    set_: Set = None,
    plan: Plan = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Train a student on labelled images and on others that a teacher labels (noisy student). What is finished is reused.

    Example: `vitline pretrain self-train birds --corpus birds --unlabelled city --recipe vit-b16-i21k-medium2`
    """
    from vitline.flows.cli.training import recipe_fields, train_on
    from vitline.flows.forms.forms import SelfTrainRequest
    from vitline.flows.forms.self_training_plan import resolve_self_train
    from vitline.flows.plans.training_plan import self_training_cost
    from vitline.flows.runs.engines import open_engines
    from vitline.flows.runs.self_train import self_train

    fields: dict[str, Any] = {
        "teacher": teacher,
        "corpus": corpus,
        "unlabelled": unlabelled,
        "labels": labels,
    }
    fields |= recipe_fields(recipe, set_ or []) | {
        "top_k": top_k,
        "min_score": min_score,
        "max_per_class": max_per_class,
    }
    fields |= {"predicted_weight": predicted_weight}
    chosen = settings(root)
    stages = resolve_self_train(
        chosen.root, SelfTrainRequest.model_validate(fields | ({"splits": split} if split else {}))
    )
    if plan:
        show_one(self_training_cost(chosen.root, stages), json)
        return
    with open_engines(chosen) as engines:
        self_train(stages, engines, lambda student: train_on(engines, student, as_json=json))


@app.command("branch")
def pretrain_branch(
    parent: Annotated[str, typer.Argument(help="Key of the parent run, or its first characters")],
    step: Annotated[int, typer.Option(min=1, help="Step of its checkpoint; `vitline runs show` lists those kept.")],
    cooldown_images: Annotated[
        int | None,
        typer.Option(min=1, help="Train on so many images more, in which the learning rate falls linearly to zero."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="First part of the run's name. Default: PARENT-branch.")] = None,
    set_: Set = None,
    plan: Plan = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Start a new run from a kept checkpoint of another: with its network, optimizer, averages and position in the reading order,
    and its config but for what `--set` names. The parent may go on meanwhile.

    Example: `vitline pretrain branch birds-0a1b2c3d4e5f --step 60000 --set recipe.optim.peak_lr=3e-4`
    """
    from vitline.flows.cli.training import train_and_show
    from vitline.flows.forms.forms import BranchRequest
    from vitline.flows.forms.overrides import parse_overrides
    from vitline.flows.forms.training_config import resolve_branch
    from vitline.flows.plans.training_plan import training_plan

    fields = {"parent": parent, "step": step, "cooldown_images": cooldown_images, "name": name}
    request = BranchRequest.model_validate(fields | {"overrides": parse_overrides(set_ or [])})
    chosen = settings(root)
    training = resolve_branch(chosen.root, request)
    if plan:
        show_one(training_plan(training), json)
    else:
        train_and_show(chosen, training, as_json=json)
