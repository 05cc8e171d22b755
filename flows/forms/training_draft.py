"""The config of a pre-training whose corpus is not known yet, and the rules that all configs of trainings share."""

import re
from typing import Any

from vitline.data_prep.shard_format import Manifest
from vitline.flows.forms.forms import PipelineRequest, PretrainRequest, SelfTrainRequest
from vitline.flows.forms.overrides import named_by, refuse_form_fields
from vitline.flows.forms.user_code import with_user_code
from vitline.infra.config import replace
from vitline.vit.config import TrainConfig, TrainRecipe
from vitline.vit.models.user_code import kind_of
from vitline.vit.recipes import recipe_named
from vitline.vit.recipes.own import title_of

_OF_THE_FORM = ("corpus", "mixture", "name", "stage", "init_model", "parent")


def draft_training(name: str, request: PretrainRequest | PipelineRequest) -> TrainConfig:
    """The config of a pre-training whose corpus is not known yet; refuses what would be wrong with any corpus."""
    recipe, execution = recipe_named(recipe_of(request)).make()
    changes: dict[str, Any] = {"seed": request.seed}
    if request.train_images is not None:
        steps = steps_of(request.train_images, recipe, "train_images")
        changes |= with_steps(recipe, steps)
    config = TrainConfig(name=name, corpus="not prepared yet", recipe=replace(recipe, **changes), execution=execution)
    overrides: dict[str, Any] = {path: value for path, value in request.overrides.items() if path != "recipe"}
    if isinstance(request, PipelineRequest):
        overrides = {k: v for k, v in overrides.items() if k.partition(".")[0] not in ("protocol", "nights")}
    elif request.peak_lr is not None:
        overrides = {"recipe.optim.peak_lr": request.peak_lr, **overrides}
    refuse_form_fields({path for path in overrides if path.partition(".")[0] in _OF_THE_FORM})
    if request.num_workers is not None:  # with the overrides, which may make more lanes
        overrides = {"execution.num_workers": request.num_workers, **overrides}
    return with_user_code(replace(config, **overrides))


def recipe_of(request: PretrainRequest | SelfTrainRequest | PipelineRequest) -> str:
    """The recipe that a form names."""
    return str(named_by("recipe", request.recipe, request.overrides))


def recipe_title(reference: str) -> str:
    """The name of a recipe as part of other names; of a user-defined one that of its function, or of its file without the suffix."""
    return reference if kind_of(reference) is None else title_of(reference) or "recipe"


def steps_of(images: int, recipe: TrainRecipe, field: str) -> int:
    """The whole batches of so many images, which a field of a form names. Refuses less than one."""
    batch = recipe.input.global_batch_size
    if images < batch:
        raise ValueError(
            f"{field}={images:,} is less than one batch of {batch:,} images. Set it to at least that number."
        )
    return images // batch


def with_steps(recipe: TrainRecipe, steps: int) -> dict[str, Any]:
    """The changes for another number of steps: warmup is shortened in proportion, and never lengthened."""
    warmup = min(recipe.optim.warmup_steps, recipe.optim.warmup_steps * steps // recipe.total_steps)
    return {"total_steps": steps, "optim.warmup_steps": warmup}


def check_loss(config: TrainConfig, uri: str, manifest: Manifest) -> None:
    """Refuses a loss that does not suit the labels of a corpus."""
    if config.recipe.masked_patches is not None:  # labels play no part
        return
    if config.recipe.loss == "softmax" and not (manifest.single_label or manifest.soft_labels):
        raise ValueError(
            f"{uri} has several labels per image, but the training {config.name!r} uses a softmax loss. "
            'Set the override {"recipe.loss": "sigmoid"} (`--set recipe.loss=sigmoid`).'
        )


def training_name(corpus: str, what: str) -> str:
    """A valid name for a training: names of corpora may also hold dots and underscores."""
    return f"{re.sub('[._]', '-', corpus)}-{what}"[:63]
