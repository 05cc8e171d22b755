"""What the networks of pipelines look at: the figures of their pre-trainings (arXiv:2010.11929, Sec. 4.5), beside each other."""

import base64
from collections.abc import Sequence
from typing import NamedTuple

from flows.records import PipelineRecord
from infra.runs.run_state import NO_STATE, read_state
from infra.storage import Store

ROLLOUT = "attention-rollout.png"
FIGURES = {ROLLOUT: "Attention on validation images", "attention-distance.png": "Attention distance by layer"}


class Beside(NamedTuple):
    """One figure of several pipelines."""

    heading: str
    pictures: list[tuple[str, str]]
    """Key and data URI of each."""
    overlaid: bool
    """True if the page also lays them over each other: the rollouts show images, mostly the same ones."""


def attention_beside(root: Store, records: Sequence[PipelineRecord]) -> list[Beside]:
    """The figures that at least two of the pipelines have."""
    found = []
    for name, heading in FIGURES.items():
        pictures = [(record.key, uri) for record in records if (uri := _figure(root, record, name))]
        if len(pictures) > 1:
            found.append(Beside(heading, pictures, overlaid=name == ROLLOUT))
    return found


def _figure(root: Store, record: PipelineRecord, name: str) -> str | None:
    stage = record.first_stages.get("pretrain")
    if stage is None or stage.run_key is None:
        return None
    run = root.child(f"runs/{stage.run_key}")
    key = next((key for key in (read_state(run) or NO_STATE).get("inspection", ()) if key.endswith(f"/{name}")), None)
    try:
        return f"data:image/png;base64,{base64.b64encode(run.read(key)).decode()}" if key else None
    except FileNotFoundError:  # deleted since
        return None
