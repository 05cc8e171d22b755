"""Scenarios as parameters of a test."""

from collections.abc import Iterable, Mapping

import pytest

from flows.chaos.scenario import Scenario


def marked_repeats(found: Iterable[object], repeated: Mapping[str, str]) -> list:
    """The scenarios among `found`, by name. `repeated`: those whose promise another test of a whole flow keeps as well, and that test;
    they carry the mark `repeats`."""
    scenarios = {each.name: each for each in found if isinstance(each, Scenario)}
    assert repeated.keys() <= scenarios.keys()
    return [
        pytest.param(each, id=name, marks=[pytest.mark.repeats(repeated[name])] if name in repeated else [])
        for name, each in scenarios.items()
    ]
