"""Summarises scores: over the seeds of a model, as group means, and as differences to a published row, with noise.

The numbers are fractions of the test split; `flows` formats them. Imports no torch.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from vitline.infra.records import UnreadableRecord, readable, reading
from vitline.infra.storage import Store
from vitline.vit.evaluation.evaluate import Score, metric_name
from vitline.vit.evaluation.protocols import over_seeds, seed_statistic
from vitline.vit.evaluation.reference.published_scores import PublishedRow
from vitline.vit.evaluation.tasks import GROUPS, ROBUSTNESS, VTAB_TASKS, vtab_task

Table = Literal["vtab", "transfer", "own", "frozen"]
VTAB_CORPORA = tuple(task.corpus_name for task in VTAB_TASKS)
TRANSFER_CORPORA = ("imagenet", "imagenet-real", "imagenet-v2", "cifar10", "cifar100", "pets", "flowers102")
"""The paper's other data sets, by name of the corpus. `cifar100` is the whole data set, `vtab-cifar100` is VTAB's task."""
FROZEN_METHODS = ("fewshot", "linear", "knn", "head")


class ScoreRecord(NamedTuple):
    """A stored score with its init, which is in the key only: the record of a control does not name its network."""

    init: str
    """First part of the key: the model's digest, or `scratch-` and the digest of the control's network."""
    score: Score


@dataclass(frozen=True)
class Cell:
    """The scores of one model on one task, over its seeds."""

    value: float
    noise: float
    noise_of: Literal["seeds", "test images"]
    """`noise` is the standard deviation over seeds, or with one seed the binomial standard error of the test split."""
    statistic: Literal["one run", "mean", "median"]
    by_seed: Mapping[int, float]
    num_examples: int
    majority_fraction: float
    ece: float | None
    """Expected calibration error, as `value` over the seeds; None if one of them has none."""
    mean_confidence: float | None
    by_severity: Mapping[int, float]
    """Of a corruption of ImageNet-C the score of each severity; empty if one of them has none."""


@dataclass(frozen=True)
class Mean:
    """A mean over tasks; `num_tasks` of `num_wanted` were scored."""

    value: float
    noise: float
    noise_of: Literal["seeds", "test images"]
    num_tasks: int
    num_wanted: int


@dataclass(frozen=True)
class Difference:
    """Our score minus the published one, and the combined noise of both as far as it is known."""

    value: float
    noise: float


@dataclass(frozen=True)
class ModelScores:
    """All scores of one model under one protocol, by corpus name."""

    init: str
    """First digits of the model's digest, or `scratch-` and those of the digest of the control's network."""
    model: str | None
    """URI of the model; None for the control."""
    digest: str | None
    protocol: str
    cells: Mapping[str, Cell]
    wall_s: float
    """Seconds of all trials, including those that chose a setting."""
    num_trainings: int
    """Number of trials."""
    precision: str
    """`float32`, `bfloat16`, or both where scores differ in it."""

    @property
    def label(self) -> str:
        """`<name>/<version>`, as `vitline model show` takes it; for a control, the digest of its network."""
        if self.model is None:
            return f"from scratch ({self.init.removeprefix('scratch-')[:6]})"
        return "/".join(self.model.rstrip("/").split("/")[-2:])

    @property
    def num_seeds(self) -> int:
        """The largest number of seeds of a task."""
        return max(len(cell.by_seed) for cell in self.cells.values())


def table_of(protocol: str, corpus: str) -> Table:
    """The table that a score belongs to."""
    if protocol.partition("-")[0] in FROZEN_METHODS:
        return "frozen"
    return "vtab" if vtab_task(corpus) else "transfer" if corpus in TRANSFER_CORPORA else "own"


def read_records(root: Store, report: Callable[[UnreadableRecord], None]) -> list[ScoreRecord]:
    """All score records below a root. What is no score record is reported."""

    def read(key: str) -> ScoreRecord:
        with reading(root.uri_of(key)):
            score = Score.model_validate(root.read_json(key))
        named = re.fullmatch(r"(.+)-s\d+-[0-9a-f]+(-r\d+)?\.json", key.rpartition("/")[2])
        return ScoreRecord(named[1] if named else score.model_digest or "scratch", score)

    return list(readable(root.list("scores/"), read, report))


def latest_records(records: Iterable[ScoreRecord], current_digests: Collection[str]) -> tuple[list[ScoreRecord], int]:
    """One record per init, protocol, task and seed, and the number of records left out.

    Of several, prefers one on a corpus of `current_digests`, then the highest repetition, then the one listed last.
    """
    every = sorted(records, key=lambda r: (r.score.corpus_digest in current_digests, r.score.repetition))
    chosen = {(r.init, r.score.protocol, r.score.task, r.score.seed): r for r in every}
    return list(chosen.values()), len(every) - len(chosen)


def scores_by_model(records: Iterable[ScoreRecord]) -> list[ModelScores]:
    """One entry per init and protocol. Seeds are combined as the authors of the protocol do."""
    grouped: dict[tuple[str, str], list[Score]] = {}
    for init, score in records:
        grouped.setdefault((init, score.protocol), []).append(score)
    return [_model_scores(init, scores) for (init, _), scores in grouped.items()]


def metrics_over_seeds(scores: Iterable[Score]) -> dict[str, float]:
    """The metrics of one model: those of each task over the seeds, as the authors of the protocol combine scores."""
    seeds: dict[str, list[float]] = {}
    protocols: dict[str, str] = {}
    for score in scores:
        for name, value in score.metrics.items():
            seeds.setdefault(name, []).append(value)
            protocols.setdefault(name, score.protocol)
    return {name: over_seeds(protocols[name], values) for name, values in seeds.items()}


def group_means(scores: Mapping[str, float]) -> dict[str, float]:
    """Means of VTAB scores by metric key (docs/generate/metrics.py), from fractions by task name.

    A group has a mean only if all its tasks are scored. The mean over all tasks is `vtab/all/top1`, or
    `vtab/all_<n>of19/top1` if fewer than 19 are scored.
    """
    means = {}
    for group in GROUPS:
        names = [task.name for task in VTAB_TASKS if task.group == group]
        if all(name in scores for name in names):
            means[f"vtab/{group}/top1"] = fmean(scores[name] for name in names)
    have = [scores[task.name] for task in VTAB_TASKS if task.name in scores]
    if have:
        key = "vtab/all/top1" if len(have) == len(VTAB_TASKS) else f"vtab/all_{len(have)}of{len(VTAB_TASKS)}/top1"
        means[key] = fmean(have)
    return means


def vtab_means(row: ModelScores) -> dict[str, Mean]:
    """Means by group and `all`, over the scored tasks. `num_tasks` shows whether tasks are missing."""
    means = {}
    for group in (*GROUPS, "all"):
        wanted = group_corpora(group)
        cells = [row.cells[corpus] for corpus in wanted if corpus in row.cells]
        if cells:
            means[group] = _mean(cells, len(wanted))
    return means


def group_corpora(group: str) -> tuple[str, ...]:
    """The corpora of a group of VTAB, or of `all`."""
    return tuple(task.corpus_name for task in VTAB_TASKS if group in (task.group, "all"))


def published_mean(row: PublishedRow, group: str, over: Collection[str] | None = None) -> float | None:
    """A row's mean over a group or `all`, as printed or else computed from its tasks.

    `over` restricts it to these corpora. None if a needed score is not published.
    """
    wanted = [corpus for corpus in group_corpora(group) if over is None or corpus in over]
    if len(wanted) == len(group_corpora(group)) and group in row.printed_means:
        return row.printed_means[group]
    return fmean(row.scores[corpus] for corpus in wanted) if wanted and {*wanted} <= {*row.scores} else None


def published_metrics(row: PublishedRow) -> dict[str, float]:
    """A row by metric key, like our own scores: `vtab/dtd/top1`, `vtab/all/top1`, `tasks/cifar10/top1`, `head/objectnet/top1`."""
    named = {metric_name("head" if corpus in ROBUSTNESS else "", corpus): value for corpus, value in row.scores.items()}
    means = {f"vtab/{group}/top1": published_mean(row, group) for group in (*GROUPS, "all")}
    return named | {name: value for name, value in means.items() if value is not None}


def difference(cell: Cell | Mean, published: float | None, deviation: float | None) -> Difference | None:
    """Our score minus the published one; None if none is published."""
    if published is None:
        return None
    return Difference(cell.value - published, math.hypot(cell.noise, deviation or 0.0))


def differences(row: ModelScores, reference: PublishedRow) -> dict[str, Difference]:
    """Differences to a published row, by corpus and by VTAB group. Both means of a group are over the tasks that we scored."""
    found = {
        corpus: difference(cell, reference.scores.get(corpus), reference.deviations.get(corpus))
        for corpus, cell in row.cells.items()
    }
    for group, mean in vtab_means(row).items():
        whole = mean.num_tasks == mean.num_wanted
        published = published_mean(reference, group, row.cells)
        found[group] = difference(mean, published, reference.deviations.get(group) if whole else None)
    return {name: value for name, value in found.items() if value is not None}


def coverage(prepared: Iterable[str]) -> str:
    """`VTAB: 3 of 19 tasks prepared`, from the names of the corpora."""
    names = set(prepared)
    done = sum(task.corpus_name in names for task in VTAB_TASKS)
    return f"VTAB: {done} of {len(VTAB_TASKS)} tasks prepared"


def _model_scores(init: str, scores: Sequence[Score]) -> ModelScores:
    by_task: dict[str, dict[int, Score]] = {}
    for score in scores:
        by_task.setdefault(score.task, {})[score.seed] = score
    first = scores[0]
    return ModelScores(
        init=init,
        model=first.model,
        digest=first.model_digest,
        protocol=first.protocol,
        cells={task: _cell(first.protocol, by_seed) for task, by_seed in by_task.items()},
        wall_s=sum(score.wall_s for score in scores),
        num_trainings=sum(len(score.trials) for score in scores),
        precision=" and ".join(sorted({score.precision for score in scores})),
    )


def _cell(protocol: str, by_seed: Mapping[int, Score]) -> Cell:
    scores = list(by_seed.values())
    values = [score.value for score in scores]
    value, several = over_seeds(protocol, values), len(values) > 1
    examples = min(score.num_examples for score in scores)
    known = [score.calibration for score in scores if score.calibration]
    severities = set.intersection(*({*score.by_severity} for score in scores))
    return Cell(
        value=value,
        noise=stdev(values) if several else standard_error(value, examples),
        noise_of="seeds" if several else "test images",
        statistic=seed_statistic(protocol) if several else "one run",
        by_seed={seed: score.value for seed, score in sorted(by_seed.items())},
        num_examples=examples,
        majority_fraction=scores[0].majority_fraction,
        ece=over_seeds(protocol, [c.ece for c in known]) if len(known) == len(scores) else None,
        mean_confidence=over_seeds(protocol, [c.mean_confidence for c in known]) if len(known) == len(scores) else None,
        by_severity={n: over_seeds(protocol, [score.by_severity[n] for score in scores]) for n in sorted(severities)},
    )


def _mean(cells: Sequence[Cell], num_wanted: int) -> Mean:
    """Mean over tasks. If all have the same two or more seeds, the noise is the deviation of the means of each seed."""
    seeds = {tuple(cell.by_seed) for cell in cells}
    if len(seeds) == 1 and len(*seeds) > 1:
        noise, noise_of = stdev(fmean(cell.by_seed[seed] for cell in cells) for seed in next(iter(seeds))), "seeds"
    else:
        errors = [standard_error(cell.value, cell.num_examples) for cell in cells]
        noise, noise_of = math.hypot(*errors) / len(cells), "test images"
    return Mean(fmean(cell.value for cell in cells), noise, noise_of, len(cells), num_wanted)  # type: ignore[arg-type]


def standard_error(value: float, num_examples: int) -> float:
    """Binomial standard error of an accuracy over this many test images."""
    return math.sqrt(max(value * (1 - value), 0.0) / num_examples)
