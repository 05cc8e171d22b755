"""Scores of the demo recorded on other machines: scores outside their spread are reported, and documents show them."""

import sys
from pathlib import Path

import pytest

from vitline.flows.reports import recorded_scores
from vitline.flows.reports.recorded_scores import Measurement, RecordedScore, measurements, outside, spread

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import figures


@pytest.fixture
def recorded(monkeypatch):
    """Two runs of 40 and 42 %: one standard deviation is 1.4 points."""
    runs = tuple(
        RecordedScore(task="emoji", seed=seed, init="pre-trained", top1=top1, peak_lr=0.1)
        for seed, top1 in enumerate((0.40, 0.42))
    )
    found = Measurement(commit="abc", date="2026-01-01", machine="a processor", scores=runs)
    monkeypatch.setattr(recorded_scores, "measurements", lambda: [found])


class Scored:
    task, model_digest = "emoji", "0123"

    def __init__(self, value: float):
        self.value = value


def test_score_outside_the_recorded_spread_is_reported(recorded):
    assert outside([Scored(0.40), Scored(0.433), Scored(0.387)]) == []
    (sentence,) = outside([Scored(0.35)])
    assert sentence == "emoji, pre-trained: 35.0 % lies outside the recorded 40.0 to 42.0 % of 2 runs."


def test_task_without_recorded_scores_has_no_spread(recorded):
    assert spread("emoji", "from scratch") is None
    assert spread("birds", "pre-trained") is None


def test_recorded_scores_have_several_seeds_and_documents_show_them():
    assert {score.seed for found in measurements() for score in found.scores} >= {0, 1, 2}
    shown = figures.documents()
    assert {path.name for path in shown} == {"README.md"}, shown
    for path in shown:
        assert figures.with_figures(path.read_text()) == path.read_text(), (
            f"{path}: its figures are not those that were measured; run tests/benchmarks/figures.py --write"
        )
