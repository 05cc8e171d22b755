"""Frozen configs and their canonical digests: equal configs hash alike, on every machine and in every process."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from infra.names import did_you_mean

C = TypeVar("C", bound="FrozenConfig")


class FrozenConfig(BaseModel):
    """Base of every config: immutable, refuses unknown fields, field docstrings are the help text of forms."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def replace(config: C, /, **changes: Any) -> C:
    """A copy of `config` with fields changed, validated again (`model_copy` would skip validation).

    A field of a nested config is named by a dotted path: `replace(config, **{"recipe.seed": 1})`.
    Raises ValueError for a name that does not exist and for values that break a rule.
    """
    tree = config.model_dump()
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node = tree
        for depth, parent in enumerate(parents):
            if not isinstance(node, dict) or not isinstance(node.get(parent), dict):
                raise ValueError(
                    f"{type(config).__name__} has no group {'.'.join(parents[: depth + 1])!r}, in {path!r}."
                    f"{did_you_mean(path, flatten(tree))}"
                )
            node = node[parent]
        if leaf not in node:
            raise ValueError(
                f"{type(config).__name__} has no field {path!r}; here are: {', '.join(sorted(node))}."
                f"{did_you_mean(path, flatten(tree))}"
            )
        node[leaf] = value.model_dump() if isinstance(value, BaseModel) else value
    return type(config).model_validate(tree)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; the same text for equal values. NaN and infinities raise ValueError."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 of `canonical_json(value)`, 64 hex digits; `config_digest` of DESIGN 3.3 is `digest_of(config.recipe)`."""
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
