"""A form for a branch -> the config of the new run, or a refusal in one sentence (ValueError). Starts nothing."""

from typing import Any

from flows.catalog import find_run
from flows.requests.forms import BranchRequest
from flows.requests.overrides import refuse_form_fields
from infra.config import replace
from infra.storage import open_store
from vit.config import ParentCheckpoint, TrainConfig
from vit.run_spec import RunSpec, make_spec, parent_spec
from vit.training.checkpoint_names import kept_steps, newest_step, no_checkpoint


def resolve_branch(root: str, request: BranchRequest) -> TrainConfig:
    """The config of a run that goes on from a kept checkpoint: that of its parent but for what the request names, which is what
    `allow` of the parent lists. A request whose run has begun needs the checkpoint no longer."""
    run = find_run(root, request.parent)
    parent = ParentCheckpoint(run=run.uri, step=request.step)
    spec = parent_spec(parent)
    changes: dict[str, Any] = dict(request.overrides)
    refuse_form_fields({path for path in changes if path.partition(".")[0] not in ("recipe", "execution", "val_split")})
    if request.cooldown_images is not None:
        changes = _cooldown(spec, request) | changes
    if request.num_workers is not None:
        changes["execution.num_workers"] = request.num_workers
    allow = tuple(sorted(path for path in changes if path.startswith("recipe.")))
    name = request.name or f"{spec.config.name}-branch"[:63]
    config = replace(spec.config, name=name, parent=replace(parent, allow=allow).model_dump(), **changes)
    key = make_spec(config, root).run_key  # raises for what a branch may not change
    own = run.uri.rpartition("/")[0]
    if request.step not in kept_steps(run) and newest_step(open_store(f"{own}/{key}")) is None:
        raise ValueError(no_checkpoint(run, request.step))
    return config


def _cooldown(spec: RunSpec, request: BranchRequest) -> dict[str, Any]:
    """The changes for a cooldown: the schedule stays that of the parent up to the checkpoint, and then falls to zero."""
    recipe = spec.config.recipe
    steps = int(request.cooldown_images or 0) // recipe.input.global_batch_size
    if steps < 1:
        raise ValueError(
            f"cooldown_images={request.cooldown_images:,} is less than one batch of {recipe.input.global_batch_size:,} images. Set it "
            "to at least that number."
        )
    begun = recipe.total_steps - recipe.optim.cooldown_steps
    if recipe.optim.cooldown_steps and request.step > begun:
        raise ValueError(
            f"{spec.run_key} is in its cooldown at step {request.step:,}, which began at step {begun:,}. Branch from a checkpoint up "
            "to there, or without cooldown_images."
        )
    return {
        "recipe.total_steps": request.step + steps,
        "recipe.optim.cooldown_steps": steps,
        "recipe.optim.decay_steps": recipe.optim.decay_steps or recipe.total_steps,
    }
