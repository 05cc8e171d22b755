"""Commands whose options are the fields of a form: help, type, default and smallest value are those of the field."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

import typer

from vitline.flows.forms.overrides import parse_overrides
from vitline.infra.config import FrozenConfig
from vitline.vit.cost.estimate import GPU, TRAINING_MFU, PlanGpus

REQUIRED = inspect.Parameter.empty
PLAN_OPTIONS: dict[str, tuple[Any, Any, Any]] = {  # type, default, option
    "plan": (bool, False, typer.Option("--plan", help="Show what this would take without starting anything.")),
    "gpu": (
        str,
        GPU,
        typer.Option(help="For `--plan`: the GPU of each worker: H200, A100-80GB, ..., or 150TFLOPS-48GB."),
    ),
    "mfu": (float, TRAINING_MFU, typer.Option(help="For `--plan`: fraction of the GPU's peak FLOP/s that is reached.")),
    "gpu_hour_price": (
        float | None,
        None,
        typer.Option(min=0, help="For `--plan`: price of one GPU for an hour, in USD."),
    ),
}
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool}


def form_command(
    app: typer.Typer,
    name: str,
    form: type[FrozenConfig],
    *,
    arguments: Collection[str] = (),
    spelled: Mapping[str, str] = {},
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = {},
    plans: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a function a command with an option for each field of `form`, and `--set` for its `overrides`. The
    function gets the values of these fields as a dict, without empty ones, and its own further options, which it declares as for typer.

    `arguments` are fields that are given by position, `spelled` are fields whose option has another name, `without` are fields
    that have no option, `defaults` are defaults of the command other than those of the form, REQUIRED for none. A command that `plans`
    has `--plan` and the options of its GPUs: its function gets `plan`, the GPUs, or None without `--plan`.
    """
    schemas = form.model_json_schema()["properties"]
    fields = [field for field in schemas if field not in {*without, "overrides"}]
    spellings = {field: f"--{spelled.get(field, field.replace('_', '-'))}" for field in schemas}
    spellings |= {field: field.upper() for field in arguments}

    def parameter(field: str) -> inspect.Parameter:
        default = defaults.get(field, REQUIRED if form.model_fields[field].is_required() else schemas[field]["default"])
        schema = schemas[field].get("anyOf", [schemas[field]])[0]
        kind, text = _type(schema), _help(schemas[field]["description"], spellings)
        if default is None or default == []:
            kind, default = kind | None, None
        if field in arguments:
            return _parameter(field, kind, default, typer.Argument(help=text, metavar=spellings[field]))
        text += " Repeatable." * (schema.get("type") == "array")
        return _parameter(field, kind, default, typer.Option(spellings[field], help=text, min=schema.get("minimum")))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(function).parameters.values() if each.name not in {"fields", "plan"}]
        generated = [parameter(field) for field in fields]
        if "overrides" in schemas:
            text = f"{_help(schemas['overrides']['description'], spellings)} Repeatable."
            generated.append(_parameter("set_", list[str] | None, None, typer.Option("--set", help=text)))
        if plans:
            generated += [_parameter(option, *facts) for option, facts in PLAN_OPTIONS.items()]
        parameters = [*generated, *(_parameter(each.name, each.annotation, each.default) for each in own)]

        def command(**given: Any) -> None:
            found = {field: value for field in fields if (value := given.pop(field)) is not None}
            if "overrides" in schemas:
                found["overrides"] = parse_overrides(given.pop("set_") or [])
            if plans:
                gpus = PlanGpus(given.pop("gpu"), given.pop("mfu"), given.pop("gpu_hour_price"))
                given["plan"] = gpus if given["plan"] else None
            function(found, **given)

        command.__doc__ = function.__doc__
        required_first = sorted(parameters, key=lambda each: each.default is not REQUIRED)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
        app.command(name)(command)
        return function

    return decorate


def _parameter(name: str, kind: Any, default: Any, info: Any = None) -> inspect.Parameter:
    annotation = kind if info is None else Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(description: str, spellings: Mapping[str, str]) -> str:
    """The help of a form's field in the words of a command line: options in place of fields, `--set` in place of JSON."""
    text, _, _ = " ".join(description.split()).partition(" The deployment's description")
    text = re.sub(r"`(\w+)`", lambda found: f"`{spellings.get(found[1], found[1])}`", text)
    text = re.sub(r'\{"([\w.]+)": "?([^",}]+)[^}]*\}', r"`--set \1=\2`", text)
    return text.replace("Empty:", "Default:")


def _type(schema: Mapping[str, Any]) -> Any:
    """The type of an option, from the JSON schema of its field."""
    if "enum" in schema:
        return Literal[*schema["enum"]]
    if schema["type"] != "array":
        return _TYPES[schema["type"]]
    items = schema["items"]
    # Of the choices of a list, typer takes an enumeration only.
    choices = "enum" in items and StrEnum("Choice", {choice: choice for choice in items["enum"]})
    return list[choices or _type(items)]  # type: ignore[misc]
