"""The page of the Python API."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import BaseModel

import vitline.data_prep.decode
import vitline.data_prep.shard_format
import vitline.infra.stores.store
import vitline.vit.evaluation.protocols
import vitline.vit.published.models
from vitline.infra.storage import open_store
from vitline.vit.models.config import network_config
from vitline.vit.models.variants import network_variant

from .markdown import joined, table, text
from .types_in_words import described

API: dict[str, Sequence[Any]] = {
    "Published models": (
        vitline.vit.published.models.load_model,
        vitline.vit.published.models.PublishedModel,
        vitline.vit.published.models.verify_model,
        vitline.vit.published.models.publish,
    ),
    "Corpora": (
        open_store,
        vitline.data_prep.shard_format.load_manifest,
        vitline.data_prep.shard_format.load_class_names,
        vitline.data_prep.shard_format.Manifest,
        vitline.data_prep.shard_format.ShardReader,
        vitline.data_prep.shard_format.read_row_group,
        vitline.data_prep.decode.decode,
    ),
    "Stores": (vitline.infra.stores.store.Store,),
    "Networks, recipes, protocols": (
        network_config,
        network_variant,
        vitline.vit.recipes.recipe_named,
        vitline.vit.evaluation.protocols.protocol_named,
    ),
}


def python_page() -> str:
    parts = [
        "# Python",
        "What other programs use. Everything else may move between releases.",
    ]
    for title, members in API.items():
        parts.append(f"## {title}")
        for member in members:
            parts += class_lines(member) if inspect.isclass(member) else function_lines(member)
    return joined(parts)


def function_lines(function: Callable[..., Any]) -> list[str]:
    shown = f"from {public_module(function)} import {function.__name__}\n\n{signature(function)}"
    return [f"### {function.__name__}", f"```python\n{shown}\n```", text(doc_of(function))]


def class_lines(cls: type) -> list[str]:
    shown = f"from {public_module(cls)} import {cls.__name__}"
    lines = [f"### {cls.__name__}", f"```python\n{shown}\n```", text(doc_of(cls))]
    if issubclass(cls, BaseModel):
        rows = [[f"`{name}`", *described(name, field)[::2]] for name, field in cls.model_fields.items()]
        lines.append(table(["field", "type", "what it is"], rows))
    elif hasattr(cls, "__dataclass_fields__"):
        rows = [[f"`{name}`", f"`{kind}`"] for name, kind in annotations(cls).items()]
        lines.append(table(["field", "type"], rows))
    for name, member in vars(cls).items():
        function = inspect.unwrap(member) if inspect.isfunction(member) else None
        if function and not name.startswith("_") and inspect.getdoc(function):
            lines += [f"#### {cls.__name__}.{name}", f"```python\n{signature(function)}\n```", text(doc_of(function))]
    return lines


def public_module(member: Any) -> str:
    """Where others import it from: the package that exports it, else its own module."""
    package = member.__module__.rpartition(".")[0]
    exported = member.__name__ in getattr(sys.modules.get(package), "__all__", ())
    return package if exported else str(member.__module__)


def annotations(cls: type) -> dict[str, str]:
    return {name: annotation_text(kind) for name, kind in inspect.get_annotations(cls).items()}


def signature(function: Callable[..., Any]) -> str:
    """`load_model(model: str | PathLike[str]) -> PublishedModel`, one parameter a line where it is long."""
    found = inspect.signature(function)
    parameters = [plain_names(str(p)) for p in found.parameters.values() if p.name != "self"]
    keyword_only = [i for i, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY]
    if keyword_only:
        parameters.insert(keyword_only[0], "*")
    answer = found.return_annotation
    ending = "" if answer is found.empty else f" -> {annotation_text(answer)}"
    line = f"{function.__name__}({', '.join(parameters)}){ending}"
    if len(line) <= 100:
        return line
    return f"{function.__name__}(\n    " + ",\n    ".join(parameters) + f",\n){ending}"


def annotation_text(annotation: Any) -> str:
    whole = isinstance(annotation, type) and not get_args(annotation)
    return plain_names(f"{annotation.__module__}.{annotation.__qualname__}" if whole else str(annotation)).replace(
        "builtins.", ""
    )


def plain_names(code: str) -> str:
    """`vitline.vit.published.models.PublishedModel` -> `PublishedModel`."""
    unquoted = re.sub(r"'([A-Za-z_][\w.]*)'", r"\1", code).replace("numpy.", "np.")
    return re.sub(r"\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", unquoted)


def doc_of(thing: Any) -> str:
    return inspect.getdoc(thing) or ""
