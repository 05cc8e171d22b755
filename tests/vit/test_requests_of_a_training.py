"""What a training asks of its store while it trains."""

import pytest

from ..counted import counted
from ..trainings import finish, tiny_config


def requests_of(steps, corpus, root):
    """How many lists, and how many requests of every kind, apart from those for data."""
    with counted() as found:
        finish(tiny_config("counted", corpus, steps=steps, save_every_steps=1000), root)
    asked = {what: number for what, number in found.items() if not what.endswith(" data")}
    return sum(number for what, number in asked.items() if what.startswith(("list", "scan"))), sum(asked.values())


@pytest.mark.slow
def test_more_steps_cost_no_list_and_no_request_for_each(digits, root):
    (lists, few), (more_lists, many) = (requests_of(steps, digits.uri, root) for steps in (5, 105))
    assert lists == more_lists
    assert many < few + 25, "time alone asks for some"
