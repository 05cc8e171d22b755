"""Which checkpoints are probed, and what becomes of their scores."""

import threading
from concurrent.futures import Future

import pytest

from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.storage import open_store
from vitline.vit.corpora.probed_corpora import is_due
from vitline.vit.features import checkpoint_follow
from vitline.vit.features.checkpoint_follow import ProbeFollower


class Scored(Future):
    """A scoring whose scores, or error, come when the test says so."""

    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix


@pytest.fixture
def run(tmp_path):
    """A claimed run; run.save(step) commits a checkpoint, and run.follower(every) probes them and lists what it has begun in `begun`."""
    store = open_store(tmp_path)

    def claimed():
        return acquire_lease(store, "owls", job_state=lambda job: "failed", owner="test").attempt

    def follower(every_steps):
        begun = []
        made = ProbeFollower(store, claimed(), every_steps, lambda prefix: begun.append(Scored(prefix)) or begun[-1])
        made.begun = begun
        return made

    store.follower = follower
    store.save = lambda step: store.write_json(f"checkpoints/step-{step:09d}-a1/manifest.json", {})
    store.points = lambda: {(record.key, record.step): record.value for record in read_journal(store)}
    return store


def steps_of(begun):
    return [int(scoring.prefix.split("-")[1]) for scoring in begun]


@pytest.mark.parametrize(
    ("step", "probed", "due"), [(99, 0, False), (100, 0, True), (150, 0, True), (190, 100, False), (230, 190, True)]
)
def test_a_checkpoint_is_due_once_a_multiple_of_the_cadence_lies_behind_it(step, probed, due):
    assert is_due(step, probed, 100) is due


def test_the_newest_checkpoint_is_scored_and_recorded_at_its_step_while_later_ones_wait(run):
    follower = run.follower(100)
    assert not follower.look()
    for step in (50, 100, 200):
        run.save(step)
    assert follower.look()
    run.save(300)
    assert follower.look()
    assert steps_of(follower.begun) == [200]
    follower.begun[0].set_result({"probe/owls/knn_top1": 0.5})
    assert follower.look()  # goes on with the one that has come meanwhile
    assert steps_of(follower.begun) == [200, 300]
    follower.close()
    assert run.points() == {("probe/owls/knn_top1", 200): 0.5}


def test_after_the_training_its_last_checkpoint_is_scored_and_an_attempt_after_it_scores_none_again(run):
    follower = run.follower(100)
    run.save(120)
    follower.look()
    run.save(130)
    follower.begun[0].set_result({"probe/owls/knn_top1": 0.5})

    def given_up():
        follower.begun[-1].set_result({"probe/owls/knn_top1": 0.6})
        return False

    follower.finish(given_up)
    follower.close()
    assert run.points() == {("probe/owls/knn_top1", 120): 0.5, ("probe/owls/knn_top1", 130): 0.6}
    again = run.follower(100)
    again.finish(lambda: False)
    assert again.begun == []


def test_a_run_that_is_stopped_waits_for_no_score(run):
    follower = run.follower(100)
    run.save(100)
    follower.finish(lambda: True)
    follower.close()
    assert len(follower.begun) == 1
    assert run.points() == {}


def test_a_checkpoint_that_cannot_be_scored_is_named_in_the_log_and_passed_over(run, caplog):
    follower = run.follower(100)
    run.save(100)
    follower.look()
    follower.begun[0].set_exception(RuntimeError("it was deleted"))
    assert not follower.look()
    assert not follower.look()
    assert "step=100: this checkpoint could not be probed: it was deleted" in caplog.text
    run.save(200)
    assert follower.look()
    follower.close()


def test_a_probe_that_cannot_begin_is_named_in_the_log_once(run, caplog):
    follower = run.follower(100)
    run.save(100)
    follower._begin = lambda prefix: 1 / 0
    assert not follower.look()
    assert not follower.look()
    assert caplog.text.count("step=100: this checkpoint could not be probed: division by zero") == 1


def test_a_store_that_is_away_for_a_while_is_one_warning(run, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_follow, "LOOK_S", 0.0)
    follower, over, looks = run.follower(100), threading.Event(), []

    def look():
        looks.append(1)
        if len(looks) == 5:
            over.set()
        elif len(looks) != 3:
            raise OSError("connection refused")

    monkeypatch.setattr(follower, "look", look)
    follower.follow(over)
    assert caplog.text.count("the store or Ray did not answer") == 2  # for looks 1 and 2, and for look 4


def test_an_attempt_that_has_lost_its_lease_records_nothing(run, caplog):
    follower = run.follower(100)
    run.save(100)
    follower.look()
    follower.begun[0].set_result({"probe/owls/knn_top1": 0.5})
    run.follower(100)  # takes the lease
    follower.finish(lambda: False)
    follower.close()
    assert run.points() == {}
    assert "checkpoints are not probed any more" in caplog.text
