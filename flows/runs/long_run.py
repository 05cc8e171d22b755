"""One long pre-training that continues for a part each night. Each night a branch from its
newest checkpoint is scored, whose learning rate falls to zero, so that scores of unfinished schedules can be compared."""

import dataclasses

from vitline.flows.forms.training_config import cooldown_changes
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import StageResult, run_store
from vitline.infra.config import replace
from vitline.infra.storage import Store
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.config import ParentCheckpoint, TrainRecipe
from vitline.vit.run.resolved import ResolvedTraining
from vitline.vit.run.run_spec import RunSpec


def next_step(recipe: TrainRecipe, images: int, run: Store) -> int:
    """The step up to which the long run is to be trained tonight: the first whole number of parts of so many images after its newest
    checkpoint. The last part goes to the end, with a cooldown that the recipe itself has."""
    steps, done = images // recipe.input.global_batch_size, newest_step(run) or 0
    step = (done // steps + 1) * steps
    return step if step <= recipe.total_steps - recipe.optim.cooldown_steps else recipe.total_steps


def train_part(training: ResolvedTraining, services: Services, step: int) -> tuple[RunSpec, StageResult]:
    """Trains the long run up to a step, where it pauses with a checkpoint. At its last step it publishes its model."""
    is_part = step < training.config.recipe.total_steps
    return train_model(training, services, pause_at_step=step if is_part else None)


def train_cooldown(
    training: ResolvedTraining, services: Services, long_run: RunSpec, step: int, images: int
) -> tuple[RunSpec, StageResult]:
    """Trains the branch of the long run at a step, on so many images more, to its published model."""
    recipe = training.config.recipe
    changes = cooldown_changes(recipe, step, images // recipe.input.global_batch_size)
    parent = ParentCheckpoint(
        run=run_store(services.root, long_run.run_key).uri, step=step, allow=tuple(sorted(changes))
    )
    config = replace(training.config, parent=parent.model_dump(), **changes)
    return train_model(dataclasses.replace(training, config=config, initial=None, parent=long_run), services)
