"""Overrides: fields by their dotted names, in forms and as options of commands. Parses, refuses and lists them."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from vitline.infra.config import flatten, tree_of


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """["recipe.seed=1"] -> {"recipe.seed": 1}; a value that is not JSON is a string. Raises ValueError."""
    return parse_assignments(items, "--set", "path.to.field=value")


def parse_assignments(items: Sequence[str], option: str, form: str) -> dict[str, Any]:
    """Names and values of a repeatable option. Raises ValueError for an item that is not of the form."""
    assigned = {}
    for item in items:
        name, sign, text = item.partition("=")
        if not sign or not name:
            raise ValueError(f"{option} {item!r} does not have the form {form}.")
        try:
            assigned[name] = json.loads(text)
        except json.JSONDecodeError:
            assigned[name] = text
        except RecursionError as error:
            raise ValueError(f"{option} {name}=...: the value is nested too deeply.") from error
    return assigned


def refuse_form_fields(paths: Collection[str]) -> None:
    """Raises ValueError if overrides name fields that the form itself has."""
    if paths:
        raise ValueError(f"{min(paths)!r} cannot be overridden: the form's own fields determine it.")


def override_paths(flow: str) -> list[str]:
    """The paths that `overrides` of a flow's form accepts, in the order of the configs; empty if the form has no overrides.
    Fields of other architectures and kinds of sources are not listed."""
    from vitline.data_prep.examples.presets import digits
    from vitline.flows.forms.nights import PREFIX, NightSettings
    from vitline.vit.config import TrainConfig
    from vitline.vit.evaluation.protocols import protocol_named
    from vitline.vit.recipes import recipe_named

    recipe, execution = recipe_named("digits").make()
    training = TrainConfig(name="n", corpus="c", recipe=recipe, execution=execution)
    protocol = [f"protocol.{name}" for name in type(protocol_named("small-images")).model_fields]
    trained = [path for path in flatten(tree_of(training)) if path.startswith(("recipe.", "execution."))]
    prepared = [path for path in flatten(tree_of(digits())) if path.startswith(("recipe.", "execution."))]
    paths = {
        "prepare-corpus": prepared,
        "pretrain": ["recipe", *trained],
        "self-train": ["recipe", *trained],
        "branch": trained,
        "finetune": trained,
        "evaluate": protocol,
        "pretrain-then-transfer": ["recipe", *trained]
        + protocol
        + [f"{PREFIX}{name}" for name in NightSettings.model_fields],
    }
    fixed = ("protocol.name", "protocol.kind", "recipe.model.architecture", "recipe.loss_source", "recipe.seed")
    return [path for path in paths.get(flow, []) if path not in fixed]
