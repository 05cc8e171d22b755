"""The statistics of verdicts: how often noise is called a difference, and that real differences are seen."""

from datetime import UTC, datetime

import numpy as np
import pytest

from vitline.flows.nights.compare import MEAN, compare, image_variance, mean_weights, noise_source, seed_variance
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE, incomplete, judge
from vitline.flows.nights.night_scores import NightScores
from vitline.flows.nights.student_t import quantile, two_sided_p

from .simulated import DIFFICULTY, Nights, score


def called(nights, num, **night):
    """The words of `num` nights: each compared with the first, the champion, and with the one before."""
    made = [nights.night(**night) for _ in range(num + 1)]
    return [judge(made[i], made[0], made[i - 1], made[max(i - 30, 0) : i], wanted=0.0).word for i in range(2, num + 1)]


@pytest.mark.parametrize(
    ("seeds_sd", "noise", "num_seeds"),
    [
        (0.6, 0.8, 3),
        pytest.param(0.0, 0.8, 3, marks=pytest.mark.slow),
        pytest.param(0.6, 0.1, 2, marks=pytest.mark.slow),
        (0.3, 0.8, 1),
        pytest.param(0.3, 0.1, 1, marks=pytest.mark.slow),
    ],
)
def test_of_fifty_nights_of_noise_no_more_are_called_better_or_worse_than_stated(seeds_sd, noise, num_seeds):
    histories = [called(Nights(seed, seeds_sd=seeds_sd, noise=noise), 50, num_seeds=num_seeds) for seed in range(6)]
    rates = [np.mean([word in ("better", "worse") for word in words]) for words in histories]
    # What stays of the rate when the chance of these few histories is taken off: they share a champion, so they count as units.
    assert np.mean(rates) - 2 * np.std(rates, ddof=1) / np.sqrt(len(rates)) <= FALSE_POSITIVE_RATE


def long_run(seed, num, progress=0.0, **given):
    """Nights of one seed that train one run further, with a progress of so much each."""
    nights = Nights(seed, **given)
    return [nights.night(num_seeds=1, shift=progress * i, facts={"images_seen": 1000 * (i + 1)}) for i in range(num)]


def test_of_a_long_run_noise_is_told_from_its_progress():
    """Averaged over series, the variance by second differences is that of nights without progress; by steps it is several times that."""
    names = [*DIFFICULTY]

    def variance(progress, *, told=True):
        found = []
        for seed in range(60):
            nights = long_run(seed, 12, progress, seeds_sd=0.02, noise=0.1)
            if not told:
                nights = [NightScores(one.key, one.night, one.models, one.tasks, {}) for one in nights]
            found.append(seed_variance(*nights[-2:], nights, mean_weights(names)).value)
        return np.mean(found)

    assert variance(0.05) == pytest.approx(variance(0.0), rel=0.3)
    assert variance(0.05, told=False) > 2 * variance(0.05)
    nights = long_run(0, 12)
    assert noise_source(*nights[-2:], nights) == "12 nights of a long run"


def test_of_fifty_nights_of_a_long_run_without_progress_no_more_are_called_than_stated():
    rates = []
    for seed in range(6):
        made = long_run(seed, 51, seeds_sd=0.3)
        words = [judge(made[i], made[0], made[i - 1], made[max(i - 30, 0) : i], wanted=0.0).word for i in range(2, 51)]
        rates.append(np.mean([word in ("better", "worse") for word in words]))
    assert np.mean(rates) - 2 * np.std(rates, ddof=1) / np.sqrt(len(rates)) <= FALSE_POSITIVE_RATE


def test_a_real_difference_is_seen_and_a_smaller_one_than_wanted_is_not_called():
    nights = Nights(1, seeds_sd=0.1)
    earlier = [nights.night() for _ in range(6)]
    worse = judge(nights.night(shift=-1.0), earlier[0], earlier[-1], earlier, wanted=0.01)
    assert worse.word == "worse"
    assert [one.word for one in worse.against] == ["worse", "worse"]
    assert worse.sentence.startswith("Worse than the champion (night of 2026-01-02 02:00 UTC): -")
    assert "Worse than last night (night of 2026-01-07 02:00 UTC)" in worse.sentence
    (_, last) = worse.against
    assert last.whole.name == MEAN
    assert last.whole.value < -last.whole.half_width < 0
    assert judge(nights.night(shift=-1.0), None, earlier[-1], earlier, wanted=0.5).word == "same"


def test_one_task_that_is_worse_is_named_where_the_mean_is_not():
    def night(key, digits, emoji):
        spread = np.linspace(0, 1, 1000, endpoint=False)
        tasks = {
            name: tuple(score(spread < value + 0.002 * i) for i in range(3))
            for name, value in (("tasks/digits/top1", digits), ("tasks/emoji/top1", emoji))
        }
        return NightScores(
            key, datetime(2026, 1, int(key), 2, tzinfo=UTC), tuple(f"{key}{i}" for i in "abc"), tasks, {"commit": key}
        )

    verdict = judge(night("2", 0.8, 0.45), None, night("1", 0.75, 0.5), wanted=0.01)
    assert (verdict.word, verdict.against[0].whole.word) == ("worse", "same")
    assert "better on digits +5.0, worse on emoji -5.0. Changed since: commit 1 to 2." in verdict.sentence


def test_what_noise_may_hide_is_not_called_the_same_in_words():
    nights = Nights(1, seeds_sd=1.5)
    earlier = [nights.night(num_seeds=2) for _ in range(3)]
    verdict = judge(nights.night(num_seeds=2, shift=-0.5), None, earlier[-1], earlier, wanted=0.001)
    assert (verdict.word, abs(verdict.against[0].whole.value) >= 0.001) == ("same", True)
    assert verdict.sentence.startswith("Within noise of last night (night of 2026-01-04 02:00 UTC): ")
    small, hidden = (
        judge(nights.night(num_seeds=2), None, earlier[-1], earlier, wanted=wanted) for wanted in (2.0, 0.9)
    )
    assert small.sentence.startswith("The same as last night")
    assert hidden.sentence.startswith("Within noise of last night (night of 2026-01-04 02:00 UTC): ")
    assert abs(hidden.against[0].whole.value) < 0.9 < hidden.against[0].detectable_difference


def test_the_same_models_are_the_same_whatever_the_noise():
    first = Nights(0).night(num_seeds=1)
    again = NightScores("again", datetime(2026, 2, 1, 2, tzinfo=UTC), first.models, first.tasks)
    assert judge(again, None, first, wanted=0.01).sentence == (
        "The same models as last night (night of 2026-01-02 02:00 UTC), bit for bit. Nothing is known to have changed."
    )


def test_one_seed_and_no_history_is_no_ground_for_a_verdict():
    nights = Nights(0)
    verdict = judge(nights.night(num_seeds=1, shift=-2), None, nights.night(num_seeds=1), wanted=0.01)
    assert verdict.word == "not compared"
    assert (
        "the noise between seeds is not known; wait for nights of the same request, or set nights.num_seeds to 3"
        in verdict.sentence
    )


def test_a_task_at_its_majority_class_is_broken_even_where_noise_is_not_known():
    nights = Nights(0)
    good, bad = nights.night(num_seeds=1), nights.night(num_seeds=1, shift=-9)
    verdict = judge(bad, good, None, wanted=0.01)
    assert verdict.word == "broken"
    assert "Broken: no better than the majority class on digits and emoji, unlike the champion" in verdict.sentence


def test_cut_nights_are_said_so_and_failed_ones_are_broken():
    assert incomplete("out_of_time", "").sentence == "Not compared: the night was cut, because it reached its deadline."
    assert incomplete("diverged", "loss nan").word == "broken"


def test_one_seed_each_on_equal_images_is_mcnemars_test():
    ours, theirs = np.arange(100) < 60, np.arange(100) >= 30  # 40 only we have right, 30 only they... of 100
    both = image_variance([score(ours)], [score(theirs)])
    ahead, behind = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    mcnemar = (ahead + behind - (ahead - behind) ** 2 / 100) / 100**2
    assert both.value == pytest.approx(mcnemar * 100 / 99)
    other_images = image_variance([score(ours)], [score(theirs, split="other")])
    assert other_images.value == pytest.approx((0.6 * 0.4 + 0.7 * 0.3) / 100)


def test_intervals_agree_with_a_bootstrap_over_seeds_and_images():
    nights = Nights(3)
    ours, theirs = nights.night(num_seeds=40), nights.night(num_seeds=40)
    rng, means = np.random.default_rng(0), []
    for _ in range(400):
        parts = []
        seeds = [rng.integers(0, 40, 40) for _ in range(2)]
        for name, n in DIFFICULTY.items():
            images = rng.integers(0, n, n)
            rights = [np.array([s.right for s in one.tasks[name]]) for one in (ours, theirs)]
            parts.append(rights[0][seeds[0]][:, images].mean() - rights[1][seeds[1]][:, images].mean())
        means.append(np.mean(parts))
    whole = compare(ours, theirs, [], level=0.05, wanted=0.0).whole
    assert np.hypot(whole.seeds_se, whole.images_se) == pytest.approx(np.std(means), rel=0.15)


@pytest.mark.parametrize(("t", "df", "p"), [(12.706, 1, 0.05), (2.776, 4, 0.05), (2.763, 28, 0.01)])
def test_students_t_is_that_of_printed_tables(t, df, p):
    assert two_sided_p(t, df) == pytest.approx(p, rel=1e-3)
    assert quantile(p, df) == pytest.approx(t, rel=1e-3)
