"""Scores probe trials from stored features. The workers of an evaluation call it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.infra.html.text import percent
from vitline.infra.records import check_digest
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.tensor_file import read_tensors
from vitline.vit.evaluation.calibration import Calibration, calibration_of, draw_reliability
from vitline.vit.evaluation.evaluate import Score, replaced
from vitline.vit.evaluation.probes import Method
from vitline.vit.evaluation.reference.corruption_errors import scores_by_severity
from vitline.vit.evaluation.tasks import IMAGENET_C
from vitline.vit.evaluation.trial_files import RELIABILITY, write_figures
from vitline.vit.evaluation.trials import model_label
from vitline.vit.features.feature_plan import FeatureSource
from vitline.vit.features.features import READ_AHEAD, FeatureReader, Features
from vitline.vit.features.linear_probes import RIDGE, draw_shots, least_squares, logistic_fits
from vitline.vit.features.nearest import NEIGHBOURS, TEMPERATURE, nearest
from vitline.vit.features.probe_trials import ProbeTrial
from vitline.vit.published.model_record import WEIGHTS, file_key, published_record
from vitline.vit.published.models import HEAD
from vitline.vit.training.world import World


class Guesses(NamedTuple):
    """The predicted classes of n images, and their probabilities if the probe gives any."""

    classes: Int[Tensor, " n"]
    probability: Float[Tensor, " n"] | None = None

    @classmethod
    def of_logits(cls, logits: Float[Tensor, "n K"]) -> "Guesses":
        """The classes with the largest logits, and their probabilities by softmax."""
        largest, classes = logits.max(dim=1)
        return cls(classes, (largest - logits.logsumexp(dim=1)).exp())


@dataclass(frozen=True)
class Counted:
    """The result of a probe on the test split, where each image counts once."""

    hits: int
    num_examples: int
    largest_class: int
    chosen: dict[str, Any]
    tried: tuple[dict[str, Any], ...] = ()
    calibration: Calibration | None = None
    by_severity: Mapping[int, float] = field(default_factory=dict)


class ProbeFeatures:
    """Reads the features of one probe trial, and adds up what computing them had cost."""

    def __init__(self, root: Store, probe_trial: ProbeTrial) -> None:
        self.probe_trial, self.device = probe_trial, World.current().device
        self._root = root
        self._readers: list[FeatureReader] = []

    def reader(self, *splits: str) -> FeatureReader:
        reader = FeatureReader(self._root, self.probe_trial.source, splits)
        self._readers.append(reader)
        return reader

    def whole(self, *splits: str) -> tuple[Float[Tensor, "n D"], Int[Tensor, " n"]]:
        """Features and classes of all rows, on the device of the probe."""
        features = self.reader(*splits).whole()
        return features.values.to(self.device), features.classes.to(self.device)

    def cost(self) -> tuple[float, float]:
        """Seconds and CPU seconds that computing the parts took, counting each part once."""
        parts = {key: seconds for reader in self._readers for key, seconds in reader.cost_s.items()}
        return sum(wall for wall, _ in parts.values()), sum(cpu for _, cpu in parts.values())

    def predictions(self, predict: Callable[[Tensor], Guesses]) -> Iterator[tuple[Features, Guesses]]:
        """Each part of the test split with its predictions. `predict` gets features (n, D) on the device."""
        for part in self.reader(self.probe_trial.splits.test):
            yield part, predict(part.values.to(self.device))

    def count(
        self,
        predictions: Iterable[tuple[Features, Guesses]],
        chosen: dict[str, Any],
        tried: tuple[dict[str, Any], ...] = (),
    ) -> Counted:
        """Counts the images whose predicted class is one of their labels."""
        rights, confidences = list[np.ndarray](), list[np.ndarray]()
        per_class = torch.zeros(self.probe_trial.num_classes, dtype=torch.int64)
        for part, guesses in predictions:
            rights.append(part.right(guesses.classes).numpy())
            if guesses.probability is not None:
                confidences.append(guesses.probability.cpu().numpy())
            per_class += part.labels.bincount(minlength=self.probe_trial.num_classes)
        right = np.concatenate(rights)
        calibration = calibration_of(np.concatenate(confidences), right) if confidences else None
        return Counted(
            int(right.sum()), len(right), int(per_class.max()), chosen, tried, calibration, self._by_severity(right)
        )

    def _by_severity(self, right: Bool[np.ndarray, " n"]) -> dict[int, float]:
        """The scores of the severities of a corruption of ImageNet-C, by the ids of its images; of another task none."""
        source, split = self.probe_trial.source, self.probe_trial.splits.test
        if self.probe_trial.task.name not in IMAGENET_C:
            return {}
        corpus = open_store(source.corpus)
        manifest = load_manifest(corpus)
        check_digest(corpus.uri, manifest.digest, source.corpus_digest)
        with ShardReader(corpus, manifest, split) as reader, ThreadPoolExecutor(READ_AHEAD) as pool:
            read = partial(reader.row_group, columns=["example_id"])
            tables = pool.map(read, range(manifest.split(split).num_row_groups))
            ids = [example_id for table in tables for example_id in table["example_id"].to_pylist()]
        return scores_by_severity(ids, right)


def few_shot(features: ProbeFeatures) -> Counted:
    """Regularised least squares on `shots` examples of each class."""
    probe_trial = features.probe_trial
    assert probe_trial.shots is not None
    pool = features.reader(*probe_trial.splits.joined)
    labels = pool.labels()
    rows = draw_shots(labels, probe_trial.num_classes, probe_trial.shots, probe_trial.seed)
    available = labels.bincount(minlength=probe_trial.num_classes)
    readout = least_squares(
        pool.rows(rows).to(features.device), labels[rows].to(features.device), probe_trial.num_classes
    )
    chosen = {
        "shots": probe_trial.shots,
        "ridge": RIDGE,
        "num_examples": len(rows),
        "classes_with_fewer": int(((available < probe_trial.shots) & (available > 0)).sum()),
        "classes_with_none": int((available == 0).sum()),
    }
    # Targets are +-1 and outputs no probabilities, so there is no calibration.
    return features.count(features.predictions(lambda values: Guesses(readout.predict(values))), chosen)


def linear_probe(features: ProbeFeatures) -> Counted:
    """Logistic regression: chooses the strength that is best on validation (of equal ones the strongest), then fits all
    examples."""
    splits = features.probe_trial.splits
    val, val_classes = features.whole(splits.val)
    tried = []
    for fit in logistic_fits(*features.whole(splits.train)):
        top1 = float((fit.readout.predict(val) == val_classes).double().mean())
        tried.append({"strength": fit.strength, "val_top1": top1} | _convergence(fit.iterations, fit.converged))
    best = max(tried, key=lambda setting: setting["val_top1"])
    (final,) = logistic_fits(*features.whole(*splits.joined), strengths=(best["strength"],))
    chosen = {"strength": best["strength"], "val_top1": best["val_top1"]}
    chosen |= _convergence(final.iterations, final.converged)

    def predict(values: Tensor) -> Guesses:
        guesses = Guesses.of_logits(final.readout.scores(values))
        return guesses._replace(classes=final.readout.classes[guesses.classes])

    return features.count(features.predictions(predict), chosen, tuple(tried))


def _convergence(iterations: int, converged: bool) -> dict[str, Any]:
    return {"iterations": iterations, "converged": converged}


def nearest_neighbours(features: ProbeFeatures) -> Counted:
    """Votes of the nearest training examples; the probability is the share of the votes. The training features are streamed, those
    of the test split are in memory."""
    probe_trial = features.probe_trial
    pool, test = features.reader(*probe_trial.splits.joined), features.reader(probe_trial.splits.test).whole()
    examples = ((part.values.to(features.device), part.classes) for part in pool)
    votes = nearest(test.values.to(features.device), examples).votes(probe_trial.num_classes)
    most, classes = votes.max(dim=1)
    chosen = {"neighbours": min(NEIGHBOURS, pool.num_rows), "temperature": TEMPERATURE}
    return features.count([(test, Guesses(classes, most / votes.sum(dim=1)))], chosen)


def own_head(features: ProbeFeatures) -> Counted:
    """The model's own head, with a softmax over its logits. A prediction is correct if it is one of the labels (ReaL: arXiv:2006.07159).

    Of a corpus with fewer classes than the model, the model chooses among those (arXiv:1907.07174 and 2006.16241, for ImageNet-A and -R).
    """
    chosen = features.probe_trial.head_classes
    weight, bias = (
        (tensor[list(chosen)] if chosen else tensor).to(features.device)
        for tensor in head_of(features.probe_trial.source)
    )
    predictions = features.predictions(lambda values: Guesses.of_logits(F.linear(values, weight, bias)))
    return features.count(predictions, {"head": "the model's own"})


def head_of(source: FeatureSource) -> list[Tensor]:
    """Weight (K, D) and bias (K,) of the head of a published model, without loading the rest."""
    store = open_store(source.model)
    config = published_record(store)
    check_digest(source.model, config["digest"], source.model_digest)
    pieces = {piece["name"]: piece for piece in config["tensors"]}
    return read_tensors(store, file_key(config, WEIGHTS), [pieces[name] for name in HEAD])


PROBE_METHODS: dict[Method, Callable[[ProbeFeatures], Counted]] = {
    "least-squares": few_shot,
    "logistic": linear_probe,
    "nearest": nearest_neighbours,
    "head": own_head,
}


def reliability_file(root: Store, probe_trial: ProbeTrial, counted: Counted) -> tuple[str, ...]:
    """Draws the reliability diagram of a probe and returns its key below `trials`; none where there are no probabilities."""
    if counted.calibration is None:
        return ()
    title = (
        f"{probe_trial.task.name}: {model_label(probe_trial.source.model)}, {probe_trial.protocol}: {counted.num_examples:,} examples "
        f"of {probe_trial.splits.test}, {percent(counted.hits / counted.num_examples)} correct"
    )
    figures = {RELIABILITY: partial(draw_reliability, counted.calibration, title)}
    return write_figures(root.child("trials"), probe_trial.key, figures)


def score_probe(root: str, probe_trial: ProbeTrial) -> Score:
    """Computes and stores the score of a probe trial, whose features must be complete. A stored score is returned as it is.

    `wall_s` and `cpu_s` include what computing the features took, even if that was earlier. Raises RuntimeError unless
    every image of the test split was counted.
    """
    store = open_store(root)
    if (done := Score.load_or_none(store, probe_trial.score_key)) is not None:
        return done
    started, cpu_started = time.perf_counter(), time.process_time()
    features = ProbeFeatures(store, probe_trial)
    counted = PROBE_METHODS[probe_trial.method](features)
    if counted.num_examples != probe_trial.num_test:
        raise RuntimeError(
            f"{counted.num_examples:,} test images of {probe_trial.task.corpus} were counted, but the split has "
            f"{probe_trial.num_test:,}. The score is not recorded. Delete {store.uri_of(probe_trial.source.folder)} and "
            "evaluate again."
        )
    wall_s, cpu_s = features.cost()
    score = Score(
        task=probe_trial.task.name,
        protocol=probe_trial.protocol,
        seed=probe_trial.seed,
        model=probe_trial.source.model,
        model_digest=probe_trial.source.model_digest,
        value=counted.hits / counted.num_examples,
        num_examples=counted.num_examples,
        calibration=counted.calibration,
        by_severity=dict(counted.by_severity),
        chosen=counted.chosen,
        tried=counted.tried,
        majority_fraction=counted.largest_class / counted.num_examples,
        num_classes=probe_trial.num_classes,
        corpus_digest=probe_trial.corpus_digest,
        split_digest=probe_trial.test_digest,
        repetition=probe_trial.source.repetition,
        replaces=replaced(probe_trial.score_key),
        wall_s=wall_s + time.perf_counter() - started,
        cpu_s=cpu_s + time.process_time() - cpu_started,
        trials=(),
        files=reliability_file(store, probe_trial, counted),
    )
    return score.stored_first(store, probe_trial.score_key)
