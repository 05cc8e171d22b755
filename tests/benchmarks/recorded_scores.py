"""The recorded scores of the demo: what several machines and seeds measured, for the tables of documents.

`demo_scores.json` is written by `demo_seeds.py` and by nothing else.
"""

import json
from pathlib import Path

from pydantic import Field

from vitline.infra.config import FrozenConfig

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


def measurements() -> list[Measurement]:
    """All of them, oldest first."""
    return [Measurement.model_validate(found) for found in json.loads(RECORDS.read_text())]
