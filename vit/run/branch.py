"""New runs from a kept checkpoint of another run: what may differ, and how the checkpoint is kept meanwhile.

Imports no torch, so that forms, plans and flows can check a branch on any machine.
"""

import time
from collections.abc import Mapping
from typing import Any

from vitline.infra.config import flatten, tree_of
from vitline.infra.names import known_names_text
from vitline.infra.records import reading
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.names import FOLDER, checkpoint_steps, find_checkpoints, no_checkpoint, pin_key
from vitline.vit.config import ParentCheckpoint, TrainRecipe

BRANCHES = "branches/"
"""In the folder of a run: one record for every branch of it."""
_POSITION = "the position in the reading order could not be kept"
_WEIGHTS = "the checkpoint holds the weights of the parent's network"
_MOMENTS = "the checkpoint holds the moments of the parent's optimizer"
_FIXED = {
    "recipe.model": _WEIGHTS,
    "recipe.input.global_batch_size": _POSITION,
    "recipe.input.num_lanes": _POSITION,
    "recipe.input.shuffle_window": _POSITION,
    "recipe.seed": _POSITION,
    "recipe.optim.optimizer": _MOMENTS,
    "recipe.optim.optimizer_options": _MOMENTS,
    "recipe.optim.optimizer_scope": _MOMENTS,
    "recipe.optim.frozen": _MOMENTS,
}
"""Fields and groups that never differ from the parent's, and why."""
_WITHOUT_WEIGHTS = ("recipe.model.dropout_rate", "recipe.model.stochastic_depth_rate")
"""Fields of these groups that may differ."""
_OF_SCORES = ("val_split",)
"""Inputs that no weight depends on."""


def check_branch(
    parent: ParentCheckpoint,
    recipe: TrainRecipe,
    inputs: Mapping[str, str],
    theirs: TrainRecipe,
    had: Mapping[str, str],
) -> None:
    """Raises ValueError for what a branch may not change of its parent: fields that `parent.allow` does not name, and those that
    never differ, each with its reason. `theirs` and `had` are recipe and inputs of the parent."""
    key = parent.run.rstrip("/").rpartition("/")[2]
    ours, before = _fields(recipe), _fields(theirs)
    for allowed in parent.allow:
        if not any(_within(field, allowed) for field in ours | before):
            raise ValueError(
                f"allow names {allowed!r}, which is no field of a recipe; {known_names_text(allowed, ours | before)}"
            )
    changed = {f: (before.get(f), ours.get(f)) for f in sorted(ours | before) if before.get(f) != ours.get(f)}
    for field, (old, new) in changed.items():
        if why := _why_fixed(field, old, new):
            raise ValueError(
                f"{field} of a branch of {key} must stay {old!r}, not {new!r}: {why}. Start a run of its own for it."
            )
    for name in sorted({*inputs, *had} - {*_OF_SCORES}):
        if inputs.get(name) != had.get(name):
            old, new = str(had.get(name))[:12], str(inputs.get(name))[:12]
            raise ValueError(
                f"The {name} of a branch of {key} must stay {old}, not {new}: {_POSITION}. Start a run of its own for it, for example "
                "from the parent's published model (`vitline pretrain run --init-from`)."
            )
    refused = [f for f in changed if not any(_within(f, allowed) for allowed in parent.allow)]
    if refused:
        raise ValueError(
            f"The recipe differs from that of {key} in {differences(theirs, recipe, refused)}. Restore these fields, or allow them "
            "to differ: `allow` names them."
        )


def differences(theirs: TrainRecipe, ours: TrainRecipe, only: list[str] | None = None) -> str:
    """The fields in which two recipes differ, with both values, as one line; empty if they are equal."""
    old, new = _fields(theirs), _fields(ours)
    names = [f for f in sorted(old | new) if old.get(f) != new.get(f) and (only is None or f in only)]
    return "; ".join(f"{f}: {old.get(f)} -> {new.get(f)}" for f in names)


def _fields(recipe: TrainRecipe) -> dict[str, Any]:
    return flatten(tree_of({"recipe": recipe}))


def _within(field: str, group: str) -> bool:
    return field == group or field.startswith(f"{group}.")


def _why_fixed(field: str, old: Any, new: Any) -> str:
    """Why a field never differs from the parent's; empty if it may."""
    if field == "recipe.average_decay" and None in (old, new):
        return "the checkpoint has averaged weights only where the parent keeps an average"
    if field in _WITHOUT_WEIGHTS:
        return ""
    return next((why for group, why in _FIXED.items() if _within(field, group)), "")


def pin_parent(parent: ParentCheckpoint, branch: str) -> None:
    """Keeps the parent's checkpoint until the branch, a run key, has one of its own, and records the branch with the parent.

    Raises ValueError that lists the parent's checkpoints if it has none of that step.
    """
    run, keys = open_store(parent.run), list[str]()
    for name in find_checkpoints(run.list(FOLDER)).unmarked:
        if name.step == parent.step:
            keys.append(pin_key(name, branch))
            run.write_json(keys[-1], {"schema_version": 1, "branch": branch, "at": time.time()})
    # The parent may be at work: one that it deleted while the pin was written is refused.
    if parent.step not in checkpoint_steps(run):
        for key in keys:
            run.delete(key)
        raise ValueError(no_checkpoint(run, parent.step))
    run.write_json(f"{BRANCHES}{branch}.json", {"schema_version": 1, "step": parent.step, "at": time.time()})


def unpin_parent(parent: ParentCheckpoint, branch: str) -> None:
    """Lets the parent's checkpoint go: the branch has one of its own."""
    run = open_store(parent.run)
    for name in find_checkpoints(run.list(FOLDER)).pins.get(branch, ()):
        run.delete(pin_key(name, branch))


def branches_of(run: Store) -> dict[str, int]:
    """The branches of a run: the step of each by its run key. Raises UnreadableRecord."""
    found = {}
    for key in run.list(BRANCHES):
        with reading(run.uri_of(key)):
            found[key.removeprefix(BRANCHES).removesuffix(".json")] = int(run.read_json(key)["step"])
    return found
