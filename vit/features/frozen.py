"""Runs an evaluation with a probe: computes the missing features first, then scores every probe trial.

Knows nothing of Ray: the caller passes in the functions that compute parts and score probe trials.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from vitline.infra.runs.handle import Run
from vitline.infra.runs.progress import RunProgress, remaining_s
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, Score
from vitline.vit.features.feature_plan import FeaturePart
from vitline.vit.features.features import finish_split, missing_parts, split_manifest
from vitline.vit.features.probe_trials import ProbeTrial, feature_splits, plan_probe_trials

log = logging.getLogger(__name__)

ComputeParts = Callable[[str, Sequence[FeaturePart]], Iterator[FeaturePart]]
"""(root, parts) -> the same parts, in any order, each as soon as it is stored."""
ScoreProbes = Callable[[str, Sequence[ProbeTrial]], Iterator[tuple[ProbeTrial, Score]]]
"""(root, probe trials) -> the same probe trials, in any order, each with its recorded score."""


def frozen_scores(
    held: Run, spec: EvaluationSpec, compute_parts: ComputeParts, score_probes: ScoreProbes
) -> list[Score] | None:
    """The scores in the order of `plan_probe_trials`, or None if a stop was requested. Finished work is kept.

    Recorded scores are read from the store; if all are recorded, nothing is computed. Raises ValueError like
    `plan_probe_trials`, and whatever the callables raise.
    """
    root, probe_trials = open_store(spec.root), plan_probe_trials(spec)
    scores = {r.score_key: score for r in probe_trials if (score := Score.load_or_none(root, r.score_key)) is not None}
    todo = [probe_trial for probe_trial in probe_trials if probe_trial.score_key not in scores]
    if todo and not ensure_features(root, todo, held, compute_parts):
        return None
    progress = EvaluationProgress(held, "scores")
    progress.begin(len(probe_trials), len(probe_trials) - len(todo))
    if todo:
        for probe_trial, score in score_probes(root.uri, todo):
            scores[probe_trial.score_key] = score
            progress.add(1)
            log.info("score=%s top1=%.4f examples=%d", probe_trial.score_key, score.value, score.num_examples)
            if held.stopped() is not None:
                return None
    return [scores[probe_trial.score_key] for probe_trial in probe_trials]


def ensure_features(root: Store, probe_trials: Sequence[ProbeTrial], held: Run, compute_parts: ComputeParts) -> bool:
    """Computes the missing parts of all features that the probe trials need. Returns False if a stop was requested."""
    splits = feature_splits(probe_trials)
    # Splits share parts. Each part is computed once, for the first split that has it.
    parts = {(part.source.folder, part.key): part for _, planned in reversed(splits) for part in planned}
    todo = [
        part
        for folder in sorted({folder for folder, _ in parts})
        for part in missing_parts(root.child(folder), [p for (home, _), p in parts.items() if home == folder])
    ]
    num_images = sum(len(part.rows) for part in parts.values())
    progress = EvaluationProgress(held, "images")
    progress.begin(num_images, num_images - sum(len(part.rows) for part in todo))
    if todo:
        for part in compute_parts(root.uri, todo):
            progress.add(len(part.rows))
            if held.stopped() is not None:
                return False
    for manifest, planned in splits:
        folder = root.child(planned[0].source.folder)
        if split_manifest(folder, planned[0].split) is None:
            finish_split(folder, manifest, planned)
    return True


class EvaluationProgress:
    """`progress.json` of an evaluation, written at most once a second until all is done."""

    def __init__(self, held: Run, unit: str) -> None:
        self._held, self._unit = held, unit
        self._done = self._done_before = self._total = 0
        self._started = self._written = 0.0

    def begin(self, total: int, done: int) -> None:
        """Starts the measurement of the rate, with `done` of `total` finished before."""
        self._total, self._done, self._done_before = total, done, done
        self._started = time.monotonic()
        self._write()

    def add(self, count: int) -> None:
        self._done += count
        if self._done == self._total or time.monotonic() - self._written >= 1.0:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        elapsed, done_now = self._written - self._started, self._done - self._done_before
        rate = done_now / elapsed if elapsed and done_now else None
        shown: RunProgress = {
            "step": self._done,
            "total_steps": self._total,
            "unit": self._unit,
            "remaining_s": remaining_s(done_now, self._total - self._done, elapsed),
        }
        if self._unit == "images" and rate:
            shown["images_per_s"] = rate
        self._held.show(shown)
