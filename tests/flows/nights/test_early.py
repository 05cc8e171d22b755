"""Verdicts before the end of an evaluation: how often they are wrong, what they cost, and when a night looks at its scores."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from vitline.flows.catalog.records import Look, read_pipeline, write_pipeline
from vitline.flows.nights.early import LEAST_TASKS, costs_of, groups_of, is_certain, level_of
from vitline.flows.nights.from_records import NOISE_NIGHTS, night_of
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE, judge
from vitline.flows.nights.looks import Looks
from vitline.infra import config
from vitline.infra.storage import open_store
from vitline.vit.evaluation.protocols import SMALL_IMAGES

from .simulated import Nights, score, store_night

NAMES = [f"tasks/t{i:02d}/top1" for i in range(19)]
COSTS = dict(zip(NAMES, [1.0, 1.0, 2.0, 4.0] * 5, strict=False))


class Year:
    """Nights of one seed on 19 tasks that are decided early, one in seven of them as a whole. Their noise is that of pre-trainings, of
    single trainings and of images; what each says is compared with what it would say of all scores."""

    def __init__(self, seed, *, change=0.0, change_sd=0.0):
        self.nights = Nights(seed, seeds_sd=0.15, noise=0.5, num_images=dict.fromkeys(NAMES, 300))
        self.rng, self.apart = np.random.default_rng(seed), 0.25 * np.random.default_rng(seed).uniform(0.4, 1.8, 19)
        self.change, self.change_sd = change, change_sd
        self.before = [self.night(0.0, 0.0) for _ in range(10)]

    def night(self, change, change_sd):
        """A night, of a recipe that changes each task by so much, in logits."""
        changes = self.rng.normal(change, change_sd, 19) + self.rng.normal(0, self.apart)
        night = self.nights.night(num_seeds=1, shifts=dict(zip(NAMES, changes, strict=True)))
        tasks = {name: tuple(replace(s, wall_s=COSTS[name]) for s in of) for name, of in night.tasks.items()}
        return replace(night, tasks=tasks)

    def run(self, num):
        """(what all scores say, what was said, share of the cost) of `num` nights."""
        said = []
        for nth in range(num):
            night = self.night(self.change, self.change_sd)
            whole = judge(night, self.before[0], self.before[-1], self.earlier(), wanted=0.01).word
            word, scored, cost = self.decide(night)
            said.append((whole, word, cost))
            if not self.change and not self.change_sd:
                self.before.append(night if nth % 7 == 0 else scored)
        return said

    def earlier(self):
        whole, early = (
            [one for one in self.before if (len(one.tasks) == 19) == is_whole] for is_whole in (True, False)
        )
        return sorted((*whole[-NOISE_NIGHTS:], *early[-NOISE_NIGHTS:]), key=lambda one: one.night)

    def decide(self, night):
        champion, last_night, earlier = self.before[0], self.before[-1], self.earlier()
        groups = groups_of(champion, earlier, NAMES)
        references = {one.key: one for one in (champion, last_night)}
        cost, last = costs_of(champion, NAMES), level_of(len(groups) - 1, len(groups), FALSE_POSITIVE_RATE)
        for look in range(len(groups)):
            scored = replace(night, tasks={name: night.tasks[name] for group in groups[: look + 1] for name in group})
            level = level_of(look, len(groups), FALSE_POSITIVE_RATE)
            verdict = judge(scored, champion, last_night, earlier, wanted=0.01, level=level)
            if is_certain(verdict, scored, references, earlier, names=NAMES, num_seeds=1, last_level=last):
                break
        return verdict.word, scored, sum(cost[name] for name in scored.tasks)


def called(said, which):
    return np.mean([night[which] in ("better", "worse", "broken") for night in said])


@pytest.mark.parametrize(
    ("num_years", "num_nights"), [(2, 15), pytest.param(8, 120, marks=(pytest.mark.slow, pytest.mark.long))]
)
def test_of_nights_of_noise_no_more_are_called_than_stated_at_a_quarter_of_the_cost(num_years, num_nights):
    years = [Year(seed).run(num_nights) for seed in range(num_years)]
    rates = [called(said, 1) for said in years]
    # What stays of the rate when the chance of these few years is taken off: their nights share a champion, so they count as units.
    assert np.mean(rates) - 2 * np.std(rates, ddof=1) / np.sqrt(num_years) <= FALSE_POSITIVE_RATE
    assert np.mean([cost for said in years for _, _, cost in said]) < 0.25


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("change", [-1.0, 1.0])
def test_of_the_differences_that_all_scores_show_hardly_any_is_missed(change):
    said = [night for seed in range(6) for night in Year(seed, change=change).run(20)]
    found = Counter((whole, word) for whole, word, _ in said)
    missed = sum(found[word, "same"] for word in ("better", "worse", "broken"))
    assert missed <= 0.1 * len(said) * called(said, 0)
    assert found["worse", "better"] == found["better", "worse"] == 0


def test_a_mean_over_a_few_tasks_whose_differences_scatter_says_little_of_all():
    year = Year(0)
    champion = year.before[0]
    some = groups_of(champion, year.before, NAMES)[0]

    def is_certain_with(*changes):
        shifted = {
            name: score(np.arange(300) < 300 * (champion.tasks[name][0].value + by))
            for name, by in zip(some, changes, strict=True)
        }
        night = replace(champion, key="n", models=("n",), tasks={name: (of,) for name, of in shifted.items()})
        verdict = judge(night, champion, None, year.before, wanted=0.01, level=0.0004)
        assert verdict.word == "same"
        references = {champion.key: champion}
        return is_certain(verdict, night, references, year.before, names=NAMES, num_seeds=1, last_level=0.02)

    even, scattered = len(some) * [0.01], [0.01 + 0.2 * (-1) ** nth for nth in range(len(some))]
    assert is_certain_with(*even)
    assert not is_certain_with(*scattered)


def test_the_looks_share_the_level_of_the_night():
    assert sum(level_of(look, 4, 0.02) for look in range(4)) == pytest.approx(0.02)
    assert level_of(0, 1, 0.02) == 0.02


def test_each_task_is_in_one_group_and_cheap_precise_ones_come_first():
    year = Year(0)
    groups = groups_of(year.before[0], year.before, NAMES)
    assert sorted(name for group in groups for name in group) == NAMES
    assert len(groups) == 4
    assert {COSTS[name] for name in groups[0]} == {1.0}
    cost = costs_of(year.before[0], NAMES)
    assert 0.1 <= sum(cost[name] for name in groups[0]) < 0.25


def test_few_tasks_make_one_group_and_of_unknown_noise_there_is_none():
    year = Year(0)
    few = NAMES[: LEAST_TASKS - 1]
    assert groups_of(year.before[0], year.before, few) == [few]
    assert groups_of(year.before[0], year.before[:9], NAMES) == []


def test_intervals_of_an_early_look_are_those_of_a_night():
    year = Year(0)
    night, champion = year.night(0.0, 0.0), year.before[0]
    early, whole = (judge(night, champion, None, year.before, wanted=0.01, level=level) for level in (0.0004, 0.02))
    assert early.against[0].whole == whole.against[0].whole
    assert early.sentence == whole.sentence


# Records in a store.

TASKS = tuple(f"t{i}" for i in range(6))
CHAMPION = {"nights.promote": False}


@pytest.fixture
def series(root):
    """series(num, **overrides): that many whole nights in the store, and the record of the next one."""
    store = open_store(root)
    nights = Nights(
        0, seeds_sd=0.02, noise=0.3, num_images=dict.fromkeys((f"tasks/{task}/top1" for task in TASKS), 300)
    )

    def of(num, **overrides):
        records = [store_night(store, nights.night(num_seeds=1), overrides=CHAMPION | overrides) for _ in range(num)]
        return store, config.replace(records[-1], key="tonight", night=records[-1].night + timedelta(1)), nights

    return of


def planned(store, record, tasks=TASKS):
    return Looks.planned(store, record, SMALL_IMAGES, tasks)


def test_a_night_is_evaluated_as_a_whole_where_little_is_known_or_it_is_requested(series):
    store, tonight, _ = series(9)
    assert planned(store, tonight) is None
    several = {**tonight.request, "overrides": {**CHAMPION, "nights.num_seeds": 3}}
    assert planned(store, config.replace(tonight, request=several)) is None
    store, tonight, _ = series(1)
    looks = planned(store, tonight)
    assert sorted(task for group in looks.groups for task in group) == sorted(TASKS)
    assert [looks.at(0, num).num_tasks for num in range(1, looks.num + 1)][-1] == len(TASKS)
    assert looks.at(0, looks.num).is_last
    several = {**tonight.request, "overrides": {**CHAMPION, "nights.num_seeds": 3}}
    assert planned(store, config.replace(tonight, request=several)).num == looks.num + 2
    assert planned(store, config.replace(tonight, night=None)) is None
    assert planned(store, tonight, (*TASKS, "new")) is None
    with_request = {**tonight.request, "overrides": {**CHAMPION, "nights.early_verdict": False}}
    assert planned(store, config.replace(tonight, request=with_request)) is None
    # The first champion of a series is a night with all scores.
    with_request = {**tonight.request, "overrides": {}}
    assert planned(store, config.replace(tonight, request=with_request)) is None


def test_a_week_after_the_last_night_with_all_scores_a_night_has_all_again(series):
    store, tonight, _ = series(10)
    late = config.replace(tonight, night=tonight.night + timedelta(5))
    assert planned(store, late) is not None
    assert planned(store, config.replace(tonight, night=tonight.night + timedelta(6))) is None


def test_an_early_verdict_says_what_it_was_made_from_and_tomorrow_scores_the_same_tasks_first(series):
    store, tonight, nights = series(10)
    looks = planned(store, tonight)
    first = {f"tasks/{task}/top1" for task in looks.groups[0]}
    night = nights.night(num_seeds=1)
    scored = replace(night, tasks={name: night.tasks[name] for name in night.tasks if name in first})
    record = config.replace(store_night(store, scored, overrides=CHAMPION), look=looks.at(0, 1))
    assert looks.is_certain(store, record)
    write_pipeline(store, record)
    ended = night_of(store, record, "finished")
    assert ended.sentence.endswith(
        f"Decided after {len(first)} of 6 tasks and {100 * len(first) / 6:.0f} % of the cost."
    )
    assert ended.verdict.decided_after == record.look.scored
    tomorrow = config.replace(record, key="tomorrow", night=record.night + timedelta(1), look=None)
    assert planned(store, tomorrow).groups == looks.groups
    assert read_pipeline(store, record.key).decided_early


def test_a_better_night_that_may_become_the_champion_gets_all_its_scores(series):
    store, tonight, nights = series(10)
    better = nights.night(num_seeds=1, shift=2.0)
    looks = planned(store, tonight)
    record = config.replace(store_night(store, better), look=looks.at(0, 1))
    assert looks.is_certain(store, record)
    promoting = replace(looks, nights=config.replace(looks.nights, promote=True))
    assert not promoting.is_certain(store, record)


def test_a_look_says_its_part_in_words():
    look = Look(groups=(("a", "b"), ("c",)), num_tasks=2, num_seeds=1, of_seeds=1, cost_fraction=0.314, level=0.01)
    assert (look.scored, look.is_last) == ("2 of 3 tasks and 31 % of the cost", False)
    seeds = config.replace(look, num_tasks=3, of_seeds=3)
    assert (seeds.scored, seeds.is_last) == ("3 of 3 tasks of 1 of 3 seeds and 31 % of the cost", False)
