"""What the networks of pipelines look at: the figures of their pre-trainings (arXiv:2010.11929, Sec. 4.5), beside each other."""

from collections.abc import Sequence
from typing import NamedTuple

from vitline.flows.catalog.records import PipelineRecord
from vitline.infra.html.page import data_uri
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import Store

ROLLOUT = "attention-rollout.png"
FIGURES = {ROLLOUT: "Attention on validation images", "attention-distance.png": "Attention distance by layer"}


class Figure(NamedTuple):
    """A figure of one pipeline."""

    key: str
    uri: str
    """The picture as a data URI."""
    images_sha256: str | None
    """The images in it; None if it shows none."""


class Beside(NamedTuple):
    """One figure of several pipelines."""

    heading: str
    figures: list[Figure]

    @property
    def same_images(self) -> list[Figure]:
        """Those that show the images of the first, at the same places: the page lays each over the first, too."""
        first, *others = self.figures
        return [each for each in others if each.images_sha256 and each.images_sha256 == first.images_sha256]


def attention_beside(root: Store, records: Sequence[PipelineRecord]) -> list[Beside]:
    """The figures that at least two of the pipelines have."""
    found = []
    for name, heading in FIGURES.items():
        figures = [figure for record in records if (figure := _figure(root, record, name))]
        if len(figures) > 1:
            found.append(Beside(heading, figures))
    return found


def _figure(root: Store, record: PipelineRecord, name: str) -> Figure | None:
    if (run := record.training(root)) is None:
        return None
    key = next((key for key in (read_state(run) or NO_STATE).get("inspection", ()) if key.endswith(f"/{name}")), None)
    if key is None:
        return None
    try:
        uri = data_uri(run.read(key))
    except FileNotFoundError:  # deleted since
        return None
    numbers = run.read_json_or_none(f"{key.rpartition('/')[0]}/inspection.json") if name == ROLLOUT else None
    return Figure(record.key, uri, (numbers or {}).get("images_sha256"))
