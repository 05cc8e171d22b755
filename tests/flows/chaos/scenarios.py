"""Scenarios as parameters of a test."""

from types import ModuleType

import pytest

from vitline.flows.chaos.scenario import Scenario


def scenarios_in(family: ModuleType) -> list:
    """Those of a module of `vitline.flows.chaos.faults`, each by its name."""
    return [pytest.param(each, id=each.name) for each in vars(family).values() if isinstance(each, Scenario)]
