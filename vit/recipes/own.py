"""User-defined recipes: a Python function that returns configs, or a YAML file with their fields. Protocols of a user, in
`vit/evaluation/own.py`, are read alike.

A recipe is only where a config comes from. Its run key is that of the config, so equal configs share a run.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vitline.infra.config import FrozenConfig, flatten, replace
from vitline.infra.names import did_you_mean
from vitline.infra.records import flaw
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.models.user_code import imported
from vitline.vit.recipes.yaml_file import read_yaml

Configs = tuple[TrainRecipe, ExecutionConfig]


class _Whole(FrozenConfig):
    """Both parts of a recipe."""

    recipe: TrainRecipe
    execution: ExecutionConfig = ExecutionConfig()


def title_of(reference: str) -> str:
    """The name of a function, or of a file without its suffix, as a part of other names."""
    last = re.sub(r"\.ya?ml$", "", re.split("[/:]", reference)[-1])
    return re.sub("[^a-z0-9]+", "-", last.lower()).strip("-")


def made_by(reference: str, what: str) -> Any:
    """What PACKAGE.MODULE:FUNCTION returns. Raises ValueError for what cannot be imported or called."""
    function = imported(reference, what)
    try:
        return function()
    except Exception as error:
        raise ValueError(f"The {what} {reference!r} failed: {type(error).__name__}: {error}") from error


def configs_of_function(reference: str) -> Configs:
    """What PACKAGE.MODULE:FUNCTION returns: a TrainRecipe, or one and an ExecutionConfig. The current folder is searched last.

    Raises ValueError for what cannot be imported or called, or returns something else.
    """
    made = made_by(reference, "recipe")
    recipe, execution = made if isinstance(made, tuple) and len(made) == 2 else (made, ExecutionConfig())
    if not isinstance(recipe, TrainRecipe) or not isinstance(execution, ExecutionConfig):
        raise ValueError(
            f"The recipe {reference!r} returned {type(made).__name__}. It must return a TrainRecipe, or a TrainRecipe and an "
            "ExecutionConfig, of vitline.vit.config."
        )
    return recipe, execution


def configs_of_file(reference: str, base_named: Mapping[str, Any]) -> Configs:
    """The configs of a YAML file at a path or URI, by its keys: `base`, the name of a recipe to start from; `recipe` and `execution`,
    what differs from it. Without `base`, `recipe` is whole. `base_named` has the recipes by name.

    Raises ValueError naming the file for one that is missing, or whose content is not that.
    """
    tree = read_yaml(reference, "recipe", ("base", "recipe", "execution")).tree
    base = tree.pop("base", None)
    if base is None and "recipe" not in tree:
        raise ValueError(
            f"{reference} has neither `base` nor `recipe`. Name a recipe to start from, as in `base: vit-s16-i21k`."
        )
    if base is not None and (not isinstance(base, str) or base not in base_named):
        raise ValueError(f"{reference} starts from {base!r}, which is no recipe.{did_you_mean(str(base), base_named)}")
    try:
        if base is None:
            whole = _Whole.model_validate(tree)
        else:
            recipe, execution = base_named[base].make()
            whole = _changed(recipe, execution, tree)
    except ValueError as error:
        raise ValueError(f"{reference}: {flaw_of_file(error)}.") from error
    return whole.recipe, whole.execution


def _changed(recipe: TrainRecipe, execution: ExecutionConfig, tree: dict[str, Any]) -> _Whole:
    model = tree.get("recipe", {}).get("model") if isinstance(tree.get("recipe"), dict) else None
    changes = {path: value for path, value in flatten(tree).items() if value != {}}
    if isinstance(model, dict) and "architecture" in model:  # its fields are those of another kind of network
        changes = {path: value for path, value in changes.items() if not path.startswith("recipe.model.")}
        changes["recipe.model"] = model
    return replace(_Whole(recipe=recipe, execution=execution), **changes)


def flaw_of_file(error: ValueError) -> str:
    """What is wrong with a file whose content is no config: field, expectation, value."""
    given = error.errors()[0]["input"] if isinstance(error, ValidationError) else {}
    text = flaw(error).replace(": Value error, ", ": ")
    return text if isinstance(given, Mapping | FrozenConfig) else f"{text}, not {given!r:.100}"
