"""Types, bounds and defaults of config fields in words."""

import json
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vitline.flows.forms import forms

from .markdown import text


def described(name: str, field: FieldInfo) -> list[str]:
    """Type, default and help of a field, as cells of a table."""
    kind = type_text(field.annotation, field).replace("integer, more than 0", "integer, at least 1")
    return [kind, default_text(field), text(field.description or "")]


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default in ((), {}, ""):
        return "empty"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, ensure_ascii=False)}`"


NAMED_CHOICES = {
    "recipes": forms.RecipeName,
    "protocols": forms.ProtocolName,
    "kinds of sources": forms.SourceKind,
}
"""Long lists of choices, which stand once at the end of the forms."""


SPELLED = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "object", type(None): "empty"}


def type_text(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type in words, with its bounds."""
    bounds = bounds_of(field.metadata) if field else ""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated
        inner, *metadata = arguments
        return type_text(inner) + bounds_of(metadata) + bounds
    if origin is Literal:
        named = next((what for what, choice in NAMED_CHOICES.items() if choice == annotation), None)
        return f"[one of the {named}](forms.md#choices)" if named else choices_text(annotation)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(part) for part in arguments if part is not type(None))) + bounds
    if origin in (tuple, list):
        return f"list of {type_text(arguments[0])}{bounds}"
    return SPELLED.get(origin or annotation, getattr(annotation, "__name__", str(annotation))) + bounds


def bounds_of(metadata: Iterable[Any]) -> str:
    """`, at least 1, less than 5`"""
    words = ""
    for limit in metadata:
        words += bounds_of(getattr(limit, "metadata", ()))
        for attribute, sign in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
            value = getattr(limit, attribute, None)
            words += "" if value is None else f", {sign} {value}"
    return words


def choices_text(choice: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(choice))
