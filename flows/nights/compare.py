"""Whether the scores of one night differ from those of another by more than noise. Pure functions, no store.

The accuracy of seed s on task t is modelled as

    a[s, t] = m[t] + u[s] + v[s, t],    measured on n[t] test images,

where m is what the night's code, config and data achieve, u what the pre-training of seed s does to all tasks, and v the rest
of the noise of a training. A seed is a whole pre-training with its evaluation: the seeds of fine-tuning alone would hide u, and
a test of two models (McNemar) says nothing about the recipes that made them. Tasks are given, not drawn, so a mean speaks of
these tasks only. The difference between a night of k seeds and one of l, on one task or as the mean over tasks, has the variance

    S (1/k + 1/l) + E.

- S, of the seeds: the variance of the accuracy (or of the mean over tasks, so that u counts for all tasks at once) within
  nights, pooled over both nights and earlier ones. Where no night has two seeds, half the mean square of the differences between
  one night and the next of the same request (von Neumann 1941), as in a control chart for individual values. Nights that train one
  long run differ by its progress, too: of them a sixth of the mean square of the second differences, from which a steady progress
  cancels (Gasser, Sroka and Jennen-Steinmetz, Biometrika 73, 1986).
- E, of the test images. On equal images it is paired: the variance over images of the difference between the shares of seeds
  that are right, less what seeds alone make of it (as in an analysis of variance), divided by n. With one seed each, this is
  McNemar's test. On other images it is the sum of both binomial variances.

The statistic is Student's t with Welch's and Satterthwaite's degrees of freedom. For many seeds and images it agrees with a
bootstrap over seeds and, within tasks, images (Agarwal et al., arXiv:2108.13264), which for two or three seeds gives intervals
that are too short. On sources of variance: Bouthillier et al., arXiv:2103.03098; on paired tests: Dietterich 1998.

A comparison is a family of tests: half of its level goes to the mean over tasks, the other half to the tasks in equal shares
(Bonferroni), so that `level` bounds the probability that anything is called better or worse where nothing has changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from vitline.flows.nights.night_scores import NightScores, TaskScore
from vitline.flows.nights.student_t import quantile, two_sided_p
from vitline.infra.records import StoredRecord

Word = Literal["better", "same", "worse", "broken", "not compared"]
MEAN = "mean over tasks"
TYPE_2_ERROR = 0.2
"""A difference counts as one that can be seen if it is missed with this probability."""
MOST_SEEDS = 50
LEAST_STEPS = 4
"""Fewer steps from night to night give no noise: of three, nights of 19 tasks without a change were called in 4 % of cases."""
# A task has collapsed where the night is no better than always predicting the majority class, though the other night was
# better by this many standard errors of its test images.
COLLAPSE_SE = 4.0


class Difference(StoredRecord):
    """One task, or the mean over tasks: fractions from 0 to 1."""

    name: str
    """Name of the metric, or `mean over tasks`."""
    ours: float
    theirs: float
    half_width: float | None
    """Of the interval of the difference at the level of this test, of an early look at that of a night; None if the noise of seeds is not
    known."""
    p: float | None
    """Two-sided."""
    seeds_se: float | None
    """Standard error of the difference by seeds."""
    images_se: float
    """Standard error by the choice of test images."""
    df: int
    """Degrees of freedom of both standard errors together; 0 if the noise of seeds is not known."""
    paired: bool
    """Whether both nights have predictions for the same test images."""
    word: Word

    @property
    def value(self) -> float:
        return self.ours - self.theirs


class Differences(StoredRecord):
    """One night compared with another."""

    word: Word
    identical: bool = False
    """Whether both nights made the same models, bit for bit."""
    differences: tuple[Difference, ...] = ()
    """The mean over tasks, where there are several, then the tasks."""
    collapsed: tuple[str, ...] = ()
    """Tasks on which the night is no better than the majority class."""
    only_ours: tuple[str, ...] = ()
    only_theirs: tuple[str, ...] = ()
    """Tasks that only one of the nights was scored on; they are not in the mean."""
    noise_of: str = ""
    """What the noise of seeds was estimated from."""
    detectable_difference: float | None = None
    """The difference of the mean, or of the only task, that such a comparison sees four times in five."""
    seeds_needed: int | None = None
    """The number of seeds per night with which it would see the wanted difference; None if it does, or if more than 50."""

    @property
    def whole(self) -> Difference:
        """The mean over tasks, or the only task."""
        return self.differences[0]


@dataclass(frozen=True)
class Variance:
    """An estimated variance and its degrees of freedom."""

    value: float
    df: float

    def __add__(self, other: "Variance") -> "Variance":
        """The variance of a sum of independent parts, with Satterthwaite's degrees of freedom."""
        total = self.value + other.value
        parts = sum(v.value**2 / v.df for v in (self, other) if v.value > 0)
        return Variance(total, total**2 / parts if parts else max(self.df, other.df))

    def times(self, factor: float) -> "Variance":
        return Variance(self.value * factor, self.df)


def compare(
    night: NightScores, reference: NightScores, earlier: Sequence[NightScores], *, level: float, wanted: float,
    shown_level: float | None = None,
) -> Differences:  # fmt: skip
    """Compares two nights. `earlier` are nights from which the noise of seeds is estimated as well, oldest first; `level` is the
    probability of a false better or worse; smaller differences than `wanted` (a fraction) are called the same. Intervals, and the
    difference that would be seen, are those of `shown_level`, if it is given."""
    names = [name for name in night.tasks if name in reference.tasks]
    only_ours = tuple(name for name in night.tasks if name not in reference.tasks)
    only_theirs = tuple(name for name in reference.tasks if name not in night.tasks)
    if not names:
        return Differences(word="not compared", only_ours=only_ours, only_theirs=only_theirs)
    rows, shares = _rows(names), shares_of(names, level)
    shown = shares_of(names, level if shown_level is None else shown_level)
    identical = night.models == reference.models and np.array_equal(night.values(names), reference.values(names))
    earlier = [one for one in earlier if one.tasks.keys() >= {*names}]
    images = {name: image_variance(night.tasks[name], reference.tasks[name]) for name in names}
    images[MEAN] = _mean_variance([images[name] for name in names])
    seeds = {row: seed_variance(night, reference, earlier, mean_weights(tasks)) for row, tasks in rows.items()}
    differences = tuple(
        _identical(row, night, tasks)
        if identical
        else _difference(row, night, reference, tasks, seeds[row], images[row], shares[row], shown[row], wanted)
        for row, tasks in rows.items()
    )
    collapsed = tuple(name for name in names if has_collapsed(night.tasks[name], reference.tasks[name]))
    whole = next(iter(rows))
    detectable_difference, needed = _power(
        seeds[whole], images[whole], len(night.models), len(reference.models), shown[whole], wanted
    )
    return Differences(
        word="broken" if collapsed else _overall(differences),
        identical=identical,
        differences=differences,
        collapsed=collapsed,
        only_ours=only_ours,
        only_theirs=only_theirs,
        noise_of=noise_source(night, reference, earlier),
        detectable_difference=detectable_difference,
        seeds_needed=needed,
    )


def mean_weights(names: Sequence[str]) -> dict[str, float]:
    """The weights of tasks in their mean."""
    return dict.fromkeys(names, 1 / len(names))


def seed_variance(
    night: NightScores, reference: NightScores, earlier: Sequence[NightScores], weights: Mapping[str, float]
) -> Variance | None:
    """The variance over seeds of the sum of tasks with these weights; None if it is not known."""
    squares, df = 0.0, 0
    for one in _several_seeds([night, reference, *earlier]):
        sums = one.weighted(weights)
        squares, df = squares + float(((sums - sums.mean()) ** 2).sum()), df + len(sums) - 1
    if df:
        return Variance(squares / df, df)
    history = _history(earlier)
    signs = _WEIGHTS[history.kind]
    found = [
        sum(sign * float(one.weighted(weights).mean()) for sign, one in zip(signs, some, strict=True))
        for some in history.nights
    ]
    if len(found) < LEAST_STEPS:
        return None
    return Variance(
        float(np.mean(np.square(found))) / sum(sign * sign for sign in signs), len(found) * _INDEPENDENT[history.kind]
    )


def image_variance(ours: Sequence[TaskScore], theirs: Sequence[TaskScore]) -> Variance:
    """The variance of the difference on one task by the choice of its test images."""
    if not is_paired(ours, theirs):
        parts = [_binomial(scores) for scores in (ours, theirs)]
        return parts[0] + parts[1]
    both = [np.array([score.right for score in scores], dtype=float) for scores in (ours, theirs)]
    share = [right.mean(axis=0) for right in both]
    difference, n = share[0] - share[1], both[0].shape[1]
    variance = float(difference.var(ddof=1)) if n > 1 else 0.25
    if all(len(right) > 1 for right in both):  # what seeds make of single images is in the variance of seeds
        variance -= sum(float((right.var(axis=0, ddof=1) / len(right)).mean()) for right in both)
    # Where few images differ, the variance is as uncertain as they are few.
    return Variance(max(variance, 0.0) / n, max(int(np.count_nonzero(difference)) - 1, 1))


def is_paired(ours: Sequence[TaskScore], theirs: Sequence[TaskScore]) -> bool:
    every = (*ours, *theirs)
    digests = {score.split_digest for score in every}
    sizes = {len(score.right) if score.right is not None else None for score in every}
    return len(digests) == 1 and "" not in digests and len(sizes) == 1 and None not in sizes


def has_collapsed(ours: Sequence[TaskScore], theirs: Sequence[TaskScore]) -> bool:
    """Whether a night is no better on a task than its majority class, where the other one clearly was."""
    majority = theirs[0].majority_fraction
    margin = COLLAPSE_SE * math.sqrt(majority * (1 - majority) / theirs[0].num_examples)
    return _mean(theirs) > majority + margin and _mean(ours) <= ours[0].majority_fraction


def visible_difference(
    night: NightScores, earlier: Sequence[NightScores], num_seeds: int, *, level: float
) -> float | None:
    """The difference between two nights of so many seeds that is seen four times in five, by the noise of seeds of `night` and
    of earlier ones; None if that is not known. For the plan of a night."""
    names = list(night.tasks)
    seeds = seed_variance(night, night, earlier, mean_weights(names))
    return (
        None
        if seeds is None
        else _detectable_difference(seeds.times(2 / num_seeds), next(iter(shares_of(names, level).values())))
    )


def noise_source(night: NightScores, reference: NightScores, earlier: Sequence[NightScores]) -> str:
    """What the noise of seeds was estimated from, in words."""
    if several := _several_seeds([night, reference, *earlier]):
        trainings = sum(len(one.models) for one in several)
        return f"{trainings} trainings of {len(several)} night{'s' * (len(several) > 1)}"
    kind, nights = _history(earlier)
    if len(nights) < LEAST_STEPS:
        return ""
    return f"{len(nights)} steps from night to night" if kind == "steps" else f"{len(nights) + 2} nights of a long run"


def _several_seeds(samples: Sequence[NightScores]) -> list[NightScores]:
    """Nights of several seeds; of nights with the same models one, as the others tell nothing new."""
    known: set[str] = set()
    new = []
    for one in samples:
        if len(one.models) > 1 and not known & {*one.models}:
            new.append(one)
        known |= {*one.models}
    return new


class _History(NamedTuple):
    """Groups of nights of one seed and the same request, one after another, that tell of the noise of seeds."""

    kind: Literal["steps", "bends"]
    nights: list[tuple[NightScores, ...]]
    """Two each, or of a long run three with equally many images between them."""


_WEIGHTS = {"steps": (-1, 1), "bends": (1, -2, 1)}
# Squares of differences that overlap are not independent: of n, so many degrees of freedom are left (by their correlations).
_INDEPENDENT = {"steps": 2 / 3, "bends": 18 / 35}


def _history(earlier: Sequence[NightScores]) -> _History:
    steps = [
        (a, b)
        for a, b in pairwise(earlier)
        if len(a.models) == len(b.models) == 1 and a.models != b.models and _asked(a) == _asked(b)
    ]
    if not any(_progress(*step) for step in steps):
        return _History("steps", [*steps])
    bends = [(a, b, d) for (a, b), (c, d) in pairwise(steps) if b is c and _progress(a, b) == _progress(c, d)]
    return _History("bends", [*bends])


def _progress(a: NightScores, b: NightScores) -> int:
    """The images by which the training of a night is longer than that of another: more than 0 for a long run."""
    return int(b.facts.get("images_seen", 0)) - int(a.facts.get("images_seen", 0))


def _asked(night: NightScores) -> dict[str, object]:
    return {name: value for name, value in night.facts.items() if name.startswith(("request.", "corpora."))}


def _rows(names: Sequence[str]) -> dict[str, Sequence[str]]:
    """The tests of the family: their names and tasks."""
    return ({MEAN: names} if len(names) > 1 else {}) | {name: [name] for name in names}


def shares_of(names: Sequence[str], level: float) -> dict[str, float]:
    """The level of each test of the family: of the mean over tasks first, or of the only task."""
    if len(names) == 1:
        return {names[0]: level}
    return {MEAN: level / 2} | dict.fromkeys(names, level / 2 / len(names))


def _identical(row: str, night: NightScores, tasks: Sequence[str]) -> Difference:
    value = float(night.values(tasks).mean())
    return Difference(
        name=row, ours=value, theirs=value, half_width=0.0, p=1.0, seeds_se=0.0, images_se=0.0, df=1, paired=True, word="same"
    )  # fmt: skip


def _difference(
    row: str, night: NightScores, reference: NightScores, tasks: Sequence[str],
    seeds: Variance | None, images: Variance, level: float, shown_level: float, wanted: float,
) -> Difference:  # fmt: skip
    ours, theirs = (float(one.values(tasks).mean()) for one in (night, reference))
    paired = all(is_paired(night.tasks[name], reference.tasks[name]) for name in tasks)
    known = {"name": row, "ours": ours, "theirs": theirs, "images_se": math.sqrt(images.value), "paired": paired}
    if seeds is None:
        return Difference(**known, half_width=None, p=None, seeds_se=None, df=0, word="not compared")
    seeds = seeds.times(1 / len(night.models) + 1 / len(reference.models))
    total = seeds + images
    df, se = max(math.floor(total.df), 1), math.sqrt(total.value)
    p = two_sided_p((ours - theirs) / se, df) if se else float(ours == theirs)
    beyond = p <= level and abs(ours - theirs) >= wanted
    return Difference(
        **known,
        half_width=quantile(shown_level, df) * se,
        p=p,
        seeds_se=math.sqrt(seeds.value),
        df=df,
        word=("better" if ours > theirs else "worse") if beyond else "same",
    )


def _overall(differences: Sequence[Difference]) -> Word:
    """The word of the mean; if that is the same, `worse` where a task is worse, `better` where one is better."""
    words = [difference.word for difference in differences]
    if words[0] != "same":
        return words[0]
    return "worse" if "worse" in words else "better" if "better" in words else "same"


def _power(
    seeds: Variance | None, images: Variance, ours: int, theirs: int, level: float, wanted: float
) -> tuple[float | None, int | None]:
    if seeds is None:
        return None, None
    detectable_difference = _detectable_difference(seeds.times(1 / ours + 1 / theirs) + images, level)
    if detectable_difference <= wanted:
        return detectable_difference, None
    for num in range(max(ours, theirs) + 1, MOST_SEEDS + 1):
        if _detectable_difference(seeds.times(2 / num) + images, level) <= wanted:
            return detectable_difference, num
    return detectable_difference, None


def _detectable_difference(variance: Variance, level: float) -> float:
    df = max(math.floor(variance.df), 1)
    return (quantile(level, df) + quantile(2 * TYPE_2_ERROR, df)) * math.sqrt(variance.value)


def _mean_variance(parts: Sequence[Variance]) -> Variance:
    """Of the mean of independent parts."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.times(1 / len(parts) ** 2)


def _binomial(scores: Sequence[TaskScore]) -> Variance:
    value, n = _mean(scores), scores[0].num_examples
    return Variance(value * (1 - value) / n, max(n - 1, 1))


def _mean(scores: Sequence[TaskScore]) -> float:
    return float(np.mean([score.value for score in scores]))
