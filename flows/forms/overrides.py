"""Overrides: fields by their dotted names, in forms and as options of commands. Parses, refuses and lists them."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vitline.infra.config import FrozenConfig, flatten, tree_of
from vitline.vit.models.user_code import kind_of

OWN = {"recipe": "recipe.optim.peak_lr", "protocol": "protocol.total_steps"}
"""Overrides that name something user-defined in place of a field of the form, each with a field that other overrides change."""


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


def named_by(what: str, named: Any, overrides: Mapping[str, Any]) -> Any:
    """The recipe or protocol that a form names: one of vitline's, in its field, or a user-defined one, in the override of that name.
    Raises ValueError for an override that is neither file nor function."""
    own = overrides.get(what, named)
    if own != named and (not isinstance(own, str) or kind_of(own) is None):
        raise ValueError(
            f"The override {what}={own!r} is no user-defined {what}: give PACKAGE.MODULE:FUNCTION, or a path or URI that ends in .yaml. "
            f"Name a {what} of vitline in the field `{what}`, and change single fields of it by overrides such as {OWN[what]}."
        )
    return own


def user_functions(request: FrozenConfig) -> list[tuple[str, str]]:
    """The Python functions that a form names as its recipe or protocols: `recipe` or `protocol`, and PACKAGE.MODULE:FUNCTION."""
    found = {what: getattr(request, "overrides", {}).get(what) for what in OWN}
    named = [(what, name) for what, own in found.items() for name in (own if isinstance(own, list) else [own])]
    return [(what, name) for what, name in named if isinstance(name, str) and kind_of(name) == "function"]


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
    protocol = ["protocol"] + [f"protocol.{name}" for name in type(protocol_named("small-images")).model_fields]
    trained = [path for path in flatten(tree_of(training)) if path.startswith(("recipe.", "execution."))]
    prepared = [path for path in flatten(tree_of(digits())) if path.startswith(("recipe.", "execution."))]
    paths = {
        "prepare-corpus": prepared,
        "pretrain": ["recipe", *trained],
        "self-train": ["recipe", *trained],
        "branch": trained,
        "finetune": ["protocol", *trained],
        "evaluate": protocol,
        "pretrain-then-transfer": ["recipe", *trained]
        + protocol
        + [f"{PREFIX}{name}" for name in NightSettings.model_fields],
    }
    fixed = (
        *("protocol.name", "protocol.kind", "recipe.model.architecture", "recipe.seed"),
        *("recipe.loss_source", "recipe.optim.optimizer_source"),
    )
    return [path for path in paths.get(flow, []) if path not in fixed]
