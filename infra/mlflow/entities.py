"""What a run in MLflow is made of: points, data sets and models. Imports no MLflow, so that run snapshots can use them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One value of a metric. MLflow stores nan as nan, and an infinity as the largest float."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class DatasetUse:
    """A corpus that a run reads or prepares."""

    name: str
    digest: str
    uri: str
    context: str
    """train, val, test or prepared."""
    profile: Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A published model. MLflow gets a pointer to it, not the weights."""

    name: str
    version: str
    uri: str
    digest: str
    finished_at: float
    """End of the training in Unix seconds; the newest version is the candidate."""
    step: int
    tags: Mapping[str, str]
    params: Mapping[str, Any]
    files: Mapping[str, bytes]
    summary: str
    """One line, shown in the list of versions."""
    points: Sequence[Point] = field(default=())
