"""The lines of JSON that a process and its shipper, or the child of a sync, write to each other."""

from typing import TypedDict


class ParentLine(TypedDict, total=False):
    """A line to the shipper: a run or a pipeline to follow, or the request to close."""

    run: str
    pipeline: str
    close: float
    """Seconds that are left to send the rest."""


class SyncAnswer(TypedDict):
    """The answer of a sync: keys of runs and pipelines by outcome."""

    sent: list[str]
    unchanged: list[str]
    absent: list[str]
    deleted: list[str]
    """Deleted in MLflow by a user."""
    left: dict[str, str]
    """Why a run or pipeline is left unsent, by key."""
