"""Pipelines beside each other, for a page: scores with their noise, what changed, curves, cost, and pictures that only one gets right.

The first pipeline is the reference; every other one is compared with it as a night is with the champion (`flows/nights/compare.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitline.data_prep.shard_format import Manifest, load_class_names
from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.nights.compare import MEAN, Difference, Differences, compare
from vitline.flows.nights.from_records import earlier_scores, read_predictions, scores_of, scores_of_models
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE, changes, short_name
from vitline.flows.nights.night_scores import NightScores
from vitline.flows.reports.comparison.corpora import CorporaByDigest
from vitline.infra.storage import Store
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.top_losses import Shown, load_shown
from vitline.vit.training.predictions import Predictions

MAX_PIPELINES = 6
MAX_PICTURES = 12
"""Pictures in each list of a task."""


@dataclass(frozen=True)
class Other:
    """A pipeline beside the reference."""

    key: str
    compared: Differences | None
    """None where one of the two has no scores."""
    changed: Mapping[str, tuple[Any, Any]]
    """What the scores may depend on and what differs, by dotted name: reference, this one."""

    def difference(self, name: str) -> Difference | None:
        found = self.compared.differences if self.compared else ()
        return next((each for each in found if each.name == name), None)


@dataclass(frozen=True)
class Picture:
    """A test image that one pipeline gets right and another wrong."""

    shown: Shown
    label: str
    right: str
    """Key of the pipeline that gets it right."""
    predicted: str
    """What the other one predicts."""


@dataclass(frozen=True)
class TaskPictures:
    """The pictures of one task on which the reference and another pipeline differ."""

    task: str
    other: str
    both: int
    """Test images that both get right."""
    only_reference: int
    only_other: int
    lost: Sequence[Picture]
    """Right in the reference only."""
    won: Sequence[Picture]


def compare_with_first(root: Store, records: Sequence[PipelineRecord]) -> tuple[list[NightScores | None], list[Other]]:
    """The scores of every pipeline, and each but the first compared with it."""
    scores = [scores_of(root, record, predictions=True) for record in records]
    first = scores[0]
    others = []
    for record, ours in zip(records[1:], scores[1:], strict=True):
        if ours is None or first is None:
            others.append(Other(record.key, None, {}))
            continue
        earlier = earlier_scores(root, record.name, record.night) if record.night else []
        compared = compare(ours, first, earlier, level=FALSE_POSITIVE_RATE / (len(records) - 1), wanted=0.0)
        others.append(Other(record.key, compared, changes(first.facts, ours.facts)))
    return scores, others


def task_pictures(root: Store, corpora: CorporaByDigest, records: Sequence[PipelineRecord]) -> list[TaskPictures]:
    """For every task whose test images are equal, pictures on which the reference and another pipeline differ."""
    known = [scores_by_task(root, record) for record in records]
    found = []
    for record, theirs in zip(records[1:], known[1:], strict=True):
        for name, reference in known[0].items():
            other = theirs.get(name)
            if other is None or other.split_digest != reference.split_digest or reference.corpus_digest not in corpora:
                continue
            before, now = read_predictions(root, reference), read_predictions(root, other)
            if before is not None and now is not None and np.array_equal(before.row, now.row):
                pair = (records[0].key, before), (record.key, now)
                found.append(
                    differing(short_name(name), *pair, *corpora[reference.corpus_digest], reference.split_digest)
                )
    return found


def scores_by_task(root: Store, record: PipelineRecord) -> dict[str, Score]:
    """The scores of the first seed's model, by name of the metric."""
    stage = record.first_stages.get("evaluate")
    if stage is None or stage.run_key is None:
        return {}
    return {score.metric_name: score for score in scores_of_models(root, stage.run_key)}


def differing(
    task: str,
    reference: tuple[str, Predictions],
    other: tuple[str, Predictions],
    corpus: Store,
    manifest: Manifest,
    split_digest: str,
) -> TaskPictures:
    """The pictures that only one of two pipelines gets right, those first of which it is surest."""
    split = next(name for name, info in manifest.splits.items() if info.digest == split_digest)
    names = load_class_names(corpus)
    (before_key, before), (now_key, now) = reference, other
    lost, won = np.flatnonzero(before.right & ~now.right), np.flatnonzero(now.right & ~before.right)
    surest = {
        "lost": lost[np.argsort(-before.probability[lost], kind="stable")][:MAX_PICTURES],
        "won": won[np.argsort(-now.probability[won], kind="stable")][:MAX_PICTURES],
    }
    shown = load_shown(corpus, manifest, split, before.row[np.concatenate([*surest.values()])].tolist())

    def pictures(places: np.ndarray, right: str, wrong: Predictions) -> list[Picture]:
        return [
            Picture(shown[int(before.row[i])], names[before.label[i]], right, names[wrong.predicted[i]]) for i in places
        ]

    return TaskPictures(
        task=task,
        other=now_key,
        both=int((before.right & now.right).sum()),
        only_reference=len(lost),
        only_other=len(won),
        lost=pictures(surest["lost"], before_key, now),
        won=pictures(surest["won"], now_key, before),
    )


def score_rows(scores: Sequence[NightScores | None]) -> dict[str, list[str]]:
    """The rows of the table, each with the tasks that it is the mean of: first that of the tasks which all pipelines with scores were
    scored on, where these are several, then every task."""
    known = [one.tasks for one in scores if one is not None]
    tasks = dict.fromkeys(name for each in known for name in each)
    shared = [name for name in tasks if all(name in each for each in known)]
    return ({MEAN: shared} if len(shared) > 1 else {}) | {name: [name] for name in tasks}
