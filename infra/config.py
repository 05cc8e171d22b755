"""Frozen configs and their digests: equal configs have equal digests, on every machine and in every process."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vitline.infra.names import did_you_mean

C = TypeVar("C", bound="FrozenConfig")


class FrozenConfig(BaseModel):
    """Base class of all configs. It is immutable and refuses unknown fields. Field docstrings are the help texts of forms."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def digested_as(name: str, default: Any, *, field: str) -> Any:
    """The field `field`, which dumps and digests call `name`. A dump is read back by that name."""
    return Field(default, validation_alias=AliasChoices(field, name), serialization_alias=name)


def omitted_at_default(default: Any, **constraints: Any) -> Any:
    """A field that dumps, and so digests, leave out at its default. `constraints` are those of pydantic's `Field`."""
    return Field(default, exclude_if=lambda value: bool(value == default), **constraints)


def tree_of(value: Any) -> Any:
    """A config as nested dicts, with every field by its present name, also those that a dump leaves out or that are kept unread."""
    if isinstance(value, BaseModel):
        return {name: tree_of(getattr(value, name)) for name in type(value).model_fields} | (value.model_extra or {})
    if isinstance(value, Mapping):
        return {key: tree_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(tree_of(item) for item in value)
    return value


def replace(config: C, /, **changes: Any) -> C:
    """A copy of `config` with changed fields, validated again (`model_copy` would skip validation).

    A dotted path names a field of a nested config, or any key of a dict: `replace(config, **{"recipe.seed": 1})`.
    Raises ValueError for unknown fields and invalid values.
    """
    tree = tree_of(config)
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node, group = tree, cast(Any, config)
        for depth, parent in enumerate(parents):
            if not isinstance(node, dict) or not isinstance(node.get(parent), dict):
                raise ValueError(
                    f"{type(config).__name__} has no group {'.'.join(parents[: depth + 1])!r}, in {path!r}."
                    f"{did_you_mean(path, flatten(tree))}"
                )
            node, group = node[parent], getattr(group, parent, None)
        if leaf not in node and isinstance(group, BaseModel):
            raise ValueError(
                f"{type(config).__name__} has no field {path!r}; available fields: {', '.join(sorted(node))}."
                f"{did_you_mean(path, flatten(tree))}"
            )
        node[leaf] = tree_of(value)
    return type(config).model_validate(tree)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. NaN and infinities raise ValueError."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 of `canonical_json(value)`, 64 hex digits. `digest_of(config.recipe)` is the config digest of a
    run key (`keys.py`)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    return {k: v for key, value in tree.items() for k, v in flatten(value, f"{prefix}{key}.").items()}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
