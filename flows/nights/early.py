"""Whether the verdict of a night is certain before all of its scores are there. Pure functions, no store.

A night looks at its scores after each group of tasks, and after each seed. It stops where the whole evaluation could hardly say anything
else:

- **better, worse or broken**: the comparison of the tasks so far says so at the level of this look. Each early look has EARLY of the
  level of the night, the last one the rest (a Bonferroni spending of the level; Lan and DeMets, Biometrika 70, 1983), so that the looks
  together call no more nights better or worse where nothing has changed. Tasks are given, not drawn: that the mean over some tasks speaks
  for the mean over all is required, too, by the prediction below.
- **the same**: the difference over all tasks and seeds, as it is predicted now, stays below what the last look could call a difference,
  with probability 1 - MISSED (stochastic curtailment; Lan, Simon and Halperin, Sequential Analysis 1, 1982). This costs power only.

The prediction: the difference over all tasks is that over the tasks so far, with an error whose variance is that of the contrast between
both means over the seeds of earlier nights (`compare.seed_variance`). Where the differences of single tasks scatter more than seeds make
them, because a change helps some tasks and harms others, the variance is as many times as large. Seeds to come add S (1/k - 1/K).

What no look can see: a change of a single task that has not been scored.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeGuard

from vitline.flows.nights.compare import Variance, mean_weights, seed_variance, shares_of
from vitline.flows.nights.judge import Comparison, Verdict
from vitline.flows.nights.night_scores import NightScores
from vitline.flows.nights.student_t import quantile

EARLY = 0.02
"""Share of the level that each early look has."""
MISSED = 0.02
"""The probability that the whole evaluation would have called a difference which an early look calls the same."""
LEAST_DF = 6
"""Degrees of freedom of the noise of seeds: those of ten nights of one seed, or of three with three seeds."""
LEAST_TASKS = 5
"""Fewer tasks are scored at once."""
FIRST_TASKS = 3
"""The scatter of fewer tasks says nothing."""
LOOKS_AT = (0.1, 0.25, 0.5)
"""Shares of the cost after which a night looks at its scores."""


def level_of(look: int, num_looks: int, level: float) -> float:
    """The level of one of several looks, counted from 0."""
    return level * (EARLY if look < num_looks - 1 else 1 - EARLY * (num_looks - 1))


def groups_of(reference: NightScores, earlier: Sequence[NightScores], names: Sequence[str]) -> list[list[str]]:
    """The tasks by their metrics, in the groups in which they are scored, the ones first that say most of the mean over all for what they
    cost. Few tasks are one group. There is none where the noise of seeds is not known, so that no look could be certain. `reference` has
    all tasks."""
    earlier = [one for one in earlier if one.tasks.keys() >= {*names}]
    apart = {name: seed_variance(reference, reference, earlier, _contrast([name], names)) for name in names}
    known = {name: each.value for name, each in apart.items() if is_known(each)}
    if known.keys() < apart.keys():
        return []
    if len(names) < LEAST_TASKS:
        return [[*names]]
    typical = sum(known.values()) / len(names)
    # Of few nights, so between their own and the usual one.
    noise = {name: (value + typical) / 2 for name, value in known.items()}
    cost = costs_of(reference, names)
    return _cut(_ordered(noise, cost), cost)


def is_known(noise: Variance | None) -> TypeGuard[Variance]:
    """Whether the noise of seeds is known well enough."""
    return noise is not None and noise.df >= LEAST_DF


def costs_of(night: NightScores, names: Sequence[str]) -> dict[str, float]:
    """What each task costs, as a share of all."""
    seconds = {name: sum(score.wall_s for score in night.tasks[name]) for name in names}
    total = sum(seconds.values())
    return {name: each / total if total else 1 / len(names) for name, each in seconds.items()}


def is_certain(
    verdict: Verdict,
    night: NightScores,
    references: Mapping[str, NightScores],
    earlier: Sequence[NightScores],
    *,
    names: Sequence[str],
    num_seeds: int,
    last_level: float,
) -> bool:
    """Whether the scores of all tasks `names` and seeds could hardly change a verdict over some of them. `references` are the nights
    that it is compared with, by their keys; `last_level` is the level of the last look."""
    level = last_level / max(len(verdict.against), 1)

    def settled(against: Comparison) -> bool:
        return _is_settled(
            against, night, references[against.key], earlier, names, num_seeds, level, verdict.smallest_effect
        )

    if verdict.word in ("broken", "worse"):  # no other comparison makes it better
        return any(settled(one) for one in verdict.against if one.word == verdict.word)
    return verdict.word != "not compared" and all(settled(one) for one in verdict.against)


def _is_settled(
    against: Comparison, night: NightScores, other: NightScores, earlier: Sequence[NightScores], names: Sequence[str],
    num_seeds: int, level: float, wanted: float,
) -> bool:  # fmt: skip
    if against.identical or against.collapsed:
        return True
    if against.word in ("better", "worse") and against.whole.word != against.word:
        return against.word == "worse"  # by one task, which stays worse; one that is better is outweighed by others
    shared = [name for name in names if name in other.tasks]
    now = [name for name in shared if name in night.tasks]
    earlier = [one for one in earlier if one.tasks.keys() >= {*shared}]
    whole = seed_variance(other, other, earlier, mean_weights(shared))
    error = _prediction_error(night, other, earlier, now, shared, num_seeds)
    if not is_known(whole) or error is None:
        return False
    value = abs(against.whole.value)
    margin = _half_width(2 * MISSED, error)
    if against.word != "same":
        return value > margin
    seen = _half_width(
        next(iter(shares_of(shared, level).values())), whole.times(1 / num_seeds + 1 / len(other.models))
    )
    return value + margin < max(seen, wanted)


def _prediction_error(
    night: NightScores, other: NightScores, earlier: Sequence[NightScores], now: Sequence[str], names: Sequence[str],
    num_seeds: int,
) -> Variance | None:  # fmt: skip
    """The variance of the difference over all tasks and seeds around that of the tasks `now`; None if it is not known."""
    both = 1 / len(night.models) + 1 / len(other.models)
    whole, contrast = (
        seed_variance(other, other, earlier, weights) for weights in (mean_weights(names), _contrast(now, names))
    )
    if whole is None or contrast is None:
        return None
    scatter = _scatter(night, other, earlier, now)
    seeds = whole.times(1 / len(night.models) - 1 / num_seeds)
    return contrast.times(both * scatter) + seeds


def _scatter(night: NightScores, other: NightScores, earlier: Sequence[NightScores], now: Sequence[str]) -> float:
    """How many times the variance that seeds make the differences of these tasks vary around their mean; at least 1."""
    if len(now) < FIRST_TASKS:
        return 1.0
    differences = (night.values(now).mean(axis=0) - other.values(now).mean(axis=0)).tolist()
    mean = sum(differences) / len(now)
    found = [seed_variance(other, other, earlier, _contrast(now, [name])) for name in now]
    by_seeds = sum(each.value for each in found if each) * (1 / len(night.models) + 1 / len(other.models))
    return max(sum((each - mean) ** 2 for each in differences) / by_seeds, 1.0) if by_seeds else 1.0


def _contrast(some: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """The weights that make the mean over `names` less that over `some`."""
    of_all, of_some = mean_weights(names), mean_weights(some)
    return {name: of_all.get(name, 0.0) - of_some.get(name, 0.0) for name in dict.fromkeys((*names, *some))}


def _half_width(level: float, variance: Variance) -> float:
    return quantile(level, max(math.floor(variance.df), 1)) * math.sqrt(variance.value)


def _ordered(noise: Mapping[str, float], cost: Mapping[str, float]) -> list[str]:
    """Tasks in the order of what each adds, for its cost, to what is known of the mean over all. `noise`: variances around it."""
    left, order = [*noise], list[str]()

    def error(some: Sequence[str]) -> float:
        if not some:
            return 2 * max(noise.values())
        return sum(weight**2 * noise[name] for name, weight in _contrast(some, [*noise]).items())

    while left:
        best = max(left, key=lambda name: (error(order) - error([*order, name])) / max(cost[name], 1e-9))
        left.remove(best)
        order.append(best)
    return order


def _cut(order: Sequence[str], cost: Mapping[str, float]) -> list[list[str]]:
    """The tasks in groups that end where their cost exceeds the shares of LOOKS_AT."""
    groups, looks = [list[str]()], [*LOOKS_AT]
    for num, (name, spent) in enumerate(zip(order, accumulate(cost[name] for name in order), strict=True), 1):
        groups[-1].append(name)
        if looks and spent >= looks[0] and num >= FIRST_TASKS and num < len(order):
            groups.append([])
        while looks and spent >= looks[0] and num >= FIRST_TASKS:
            looks.pop(0)
    return groups
