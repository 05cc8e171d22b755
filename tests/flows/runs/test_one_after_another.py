"""The evaluations of a request with several protocols, one after the other."""

import pytest

from vitline.flows.runs.evaluate_tasks import one_after_another
from vitline.flows.runs.services import StopRequested
from vitline.flows.runs.stage import StageFailed


def outcome(ends):
    """The protocols that were begun, and the error at the end; `ends` has the error of each, or None."""
    begun = []

    def evaluate(protocol):
        begun.append(protocol)
        if ends[protocol] is not None:
            raise ends[protocol]

    try:
        one_after_another([*ends], evaluate)
    except (StageFailed, StopRequested, ValueError) as error:
        return begun, error
    return begun, None


def test_a_failed_protocol_keeps_none_of_the_others_from_its_scores_and_is_named():
    begun, error = outcome(
        {"fewshot": None, "linear": StageFailed("no room."), "knn": ValueError("one class."), "head": None}
    )
    assert begun == ["fewshot", "linear", "knn", "head"]
    assert isinstance(error, StageFailed)
    assert error.state == "failed"
    assert str(error) == (
        "The scores of fewshot and head are recorded. The evaluation with linear failed: no room. The evaluation with knn failed: one "
        "class."
    )


@pytest.mark.parametrize("end", [StopRequested("out_of_time", "late"), StageFailed("stopped", "cancelled")])
def test_a_stop_is_the_end_of_all(end):
    assert outcome({"fewshot": end, "linear": None}) == (["fewshot"], end)


@pytest.mark.parametrize("end", [StageFailed("no room."), ValueError("one class.")])
def test_the_only_protocol_fails_with_its_own_error(end):
    assert outcome({"fewshot": end}) == (["fewshot"], end)
