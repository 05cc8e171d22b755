"""Runs an evaluation with a probe: computes the missing features first, then scores every probe trial.

Knows nothing of Ray: the caller passes in the functions that compute parts and score probe trials. Their results end early if a stop was
requested.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vitline.infra.runs.progress import ProgressWriter
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, Score
from vitline.vit.features.feature_plan import FeaturePart
from vitline.vit.features.features import finish_split, missing_parts
from vitline.vit.features.probe_trials import ProbeTrial, feature_splits, plan_probe_trials

log = logging.getLogger(__name__)

ComputeParts = Callable[[str, Sequence[FeaturePart]], Iterator[FeaturePart]]
"""(root, parts) -> the same parts, in any order, each as soon as it is stored."""
ScoreProbes = Callable[[str, Sequence[ProbeTrial]], Iterator[tuple[ProbeTrial, Score]]]
"""(root, probe trials) -> the same probe trials, in any order, each with its recorded score."""


def frozen_scores(
    run: Store,
    spec: EvaluationSpec,
    compute_parts: ComputeParts,
    score_probes: ScoreProbes,
    check_lease: Callable[[], object] = lambda: None,
) -> list[Score] | None:
    """The scores in the order of `plan_probe_trials`, or None if a stop was requested. Finished work is kept.

    Recorded scores are read from the store; if all are recorded, nothing is computed. Raises ValueError like
    `plan_probe_trials`, and whatever the callables raise.
    """
    root, probe_trials = open_store(spec.root), plan_probe_trials(spec)
    scores = {r.score_key: score for r in probe_trials if (score := Score.load_or_none(root, r.score_key)) is not None}
    todo = [probe_trial for probe_trial in probe_trials if probe_trial.score_key not in scores]
    progress = partial(ProgressWriter, run, check_lease=check_lease)
    if todo and not ensure_features(root, todo, partial(progress, "images"), compute_parts):
        return None
    scored = progress("scores", len(probe_trials), len(probe_trials) - len(todo))
    for probe_trial, score in score_probes(root.uri, todo) if todo else ():
        scores[probe_trial.score_key] = score
        scored.add(1)
        log.info("score=%s top1=%.4f examples=%d", probe_trial.score_key, score.value, score.num_examples)
    if len(scores) < len({probe_trial.score_key for probe_trial in probe_trials}):
        return None
    return [scores[probe_trial.score_key] for probe_trial in probe_trials]


def ensure_features(
    root: Store,
    probe_trials: Sequence[ProbeTrial],
    progress: Callable[[int, int], ProgressWriter],
    compute_parts: ComputeParts,
) -> bool:
    """Computes the missing parts of all features that the probe trials need. Returns False if a stop was requested."""
    splits = feature_splits(probe_trials)
    # Splits share parts. Each part is computed once, for the first split that has it.
    parts = {(part.source.folder, part.key): part for _, planned in reversed(splits) for part in planned}
    if not ensure_parts(root, list(parts.values()), progress, compute_parts):
        return False
    for manifest, planned in splits:
        folder = root.child(planned[0].source.folder)
        if not folder.exists(f"{planned[0].split}.json"):
            finish_split(folder, manifest, planned)
    return True


def ensure_parts(
    root: Store,
    parts: Sequence[FeaturePart],
    progress: Callable[[int, int], ProgressWriter],
    compute_parts: ComputeParts,
) -> bool:
    """Computes the parts that are missing. Returns False if a stop was requested.

    `progress(total, done)` begins to count images.
    """
    homes: dict[str, list[FeaturePart]] = {}
    for part in parts:
        homes.setdefault(part.source.folder, []).append(part)
    todo = [part for folder in sorted(homes) for part in missing_parts(root.child(folder), homes[folder])]
    num_images, left = (sum(len(part.rows) for part in each) for each in (parts, todo))
    counted = progress(num_images, num_images - left)
    for part in compute_parts(root.uri, todo) if todo else ():
        counted.add(len(part.rows))
        left -= len(part.rows)
    return not left
