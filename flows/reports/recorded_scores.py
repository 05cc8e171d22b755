"""The recorded scores of the demo: what other machines and seeds measured, for documents and for the demo itself.

`demo_scores.json` is written by `tests/benchmarks/demo_seeds.py` and by nothing else.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from vitline.flows.console import init_text
from vitline.infra.config import FrozenConfig
from vitline.vit.vtab.evaluate import Score

RECORDS = Path(__file__).with_name("demo_scores.json")


class RecordedScore(FrozenConfig):
    """Test accuracy of one seed on one task."""

    task: str
    seed: int
    init: str
    """`pre-trained` or `from scratch`."""
    top1: float
    """Fraction of the test images."""
    peak_lr: float
    """The learning rate that validation chose."""


class Measurement(FrozenConfig):
    """One call of the program on one machine."""

    commit: str
    date: str
    machine: str
    """Class of the processor; scores differ between them as between seeds."""
    scores: tuple[RecordedScore, ...]
    baselines: dict[str, float] = Field(default_factory=dict)
    """Logistic regression on 16 x 16 pixels, by task."""


class Spread(NamedTuple):
    """What was recorded of one task and init: the range, and how far a usual run may lie from it."""

    low: float
    high: float
    margin: float
    num_runs: int


def measurements() -> list[Measurement]:
    """All of them, oldest first."""
    return [Measurement.model_validate(found) for found in json.loads(RECORDS.read_text())]


def spread(task: str, init: str) -> Spread | None:
    """None where fewer than two runs are recorded. The margin is one standard deviation of the runs."""
    values = [s.top1 for m in measurements() for s in m.scores if (s.task, s.init) == (task, init)]
    return Spread(min(values), max(values), statistics.stdev(values), len(values)) if len(values) > 1 else None


def outside(scores: Iterable[Score]) -> list[str]:
    """A sentence for each score that lies outside the recorded spread of its task."""
    found = []
    for score in scores:
        init = init_text(score.model_digest)
        known = spread(score.task, init)
        if known and not known.low - known.margin <= score.value <= known.high + known.margin:
            found.append(
                f"{score.task}, {init}: {100 * score.value:.1f} % lies outside the recorded "
                f"{100 * known.low:.1f} to {100 * known.high:.1f} % of {known.num_runs} runs."
            )
    return found
