import hashlib
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PositiveInt

from vitline.infra.config import FrozenConfig, canonical_json, digest_of, omitted_at_default, replace

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Inner(FrozenConfig):
    width: PositiveInt = 3
    kind: Literal["a", "b"] = "a"


class Outer(FrozenConfig):
    inner: Inner = Inner()
    names: tuple[str, ...] = ("x", "y")


def shuffled(value):
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return tuple(shuffled(v) for v in value) if isinstance(value, list) else value


@given(JSON)
def test_digest_does_not_depend_on_key_order(value):
    assert digest_of(value) == digest_of(shuffled(value))
    assert len(digest_of(value)) == 64


def test_digest_of_a_known_value_is_unchanged():
    # printf '%s' '{"a":[1,{"ü":null}],"b":0.1}' | sha256sum
    assert digest_of({"b": 0.1, "a": (1, {"ü": None})}).startswith("e27dacdf64a1")


def test_config_and_its_fields_have_the_same_digest():
    assert canonical_json(Outer()) == '{"inner":{"kind":"a","width":3},"names":["x","y"]}'
    assert digest_of({"recipe": Outer()}) == digest_of({"recipe": Outer().model_dump(mode="json")})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_of({"a": [value]})


class Grown(Inner):
    later: int | None = omitted_at_default(None, ge=1)


class GrownOuter(Outer):
    inner: Grown = Grown()


def test_a_field_omitted_at_its_default_changes_a_digest_only_where_it_is_set():
    assert digest_of(GrownOuter()) == digest_of(Outer())
    changed = replace(GrownOuter(), **{"inner.later": 2})
    assert changed.inner.later == 2
    assert digest_of(changed) != digest_of(Outer())
    assert GrownOuter.model_validate(changed.model_dump(mode="json")) == changed
    assert replace(changed, **{"inner.later": None}) == GrownOuter()
    with pytest.raises(ValueError, match="later"):
        replace(GrownOuter(), **{"inner.later": 0})


@given(st.integers(1, 10**6), st.sampled_from(["a", "b"]))
def test_replace_changes_only_the_named_fields(width, kind):
    changed = replace(Outer(), **{"inner.width": width, "inner.kind": kind})
    assert changed == Outer(inner=Inner(width=width, kind=kind))
    assert replace(changed, inner=Inner()) == Outer()
    assert replace(Outer()) == Outer()


class Free(FrozenConfig):
    options: dict[str, int] = omitted_at_default({})


def test_replace_adds_keys_of_a_dict_and_changes_them():
    changed = replace(Free(), **{"options.a": 1, "options.b": 2})
    assert replace(changed, **{"options.b": 3}).options == {"a": 1, "b": 3}
    assert (digest_of(Free()), changed.options) == (digest_of({}), {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="valid integer"):
        replace(changed, **{"options.a": "x"})


def test_replace_validates_the_new_values():
    with pytest.raises(ValueError, match="greater than 0"):
        replace(Outer(), **{"inner.width": -1})
    with pytest.raises(ValueError, match=r"no field 'inner\.depth'; available fields: kind, width"):
        replace(Outer(), **{"inner.depth": 1})
    with pytest.raises(ValueError, match="no group 'names'"):
        replace(Outer(), **{"names.width": 1})


def test_config_is_frozen_and_refuses_unknown_fields():
    with pytest.raises(ValueError, match="frozen"):
        Inner().width = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        Inner(widht=4)  # type: ignore[call-arg]


def test_digest_is_the_sha256_of_the_json():
    assert digest_of("") == hashlib.sha256(b'""').hexdigest()
