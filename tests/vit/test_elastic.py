"""A training between two numbers of workers: Ray Train's decisions by rule, and a real cluster that loses a node and gets one."""

import sys
import time

import pytest

from vitline.infra.config import replace
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.settings import Settings
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.ray_jobs import elastic
from vitline.vit.run.devices import Node
from vitline.vit.run.run_spec import read_starts

from ..servers.ray_nodes import three_nodes
from ..trainings import begin, losses_of


class Group:
    def __init__(self, num_workers):
        self.num_workers = num_workers


@pytest.fixture
def cluster(monkeypatch):
    """cluster.free CPUs, cluster.newest checkpoint and cluster.now; `decide(running)` is the policy's answer for 2 to 4 workers."""
    from ray.train import ScalingConfig

    class Cluster:
        free, newest, now = 4, None, 100.0

        def decide(self, running=None):
            if running is None:
                decision = self.policy.make_decision_for_non_running_worker_group()
            else:
                decision = self.policy.make_decision_for_running_worker_group(Group(running), None)
            return getattr(decision, "num_workers", None)

    cluster = Cluster()
    monkeypatch.setattr(elastic.time, "monotonic", lambda: cluster.now)
    monkeypatch.setattr(elastic, "cluster_nodes", lambda free: [Node({"CPU": cluster.free}, {})])
    monkeypatch.setattr(elastic, "newest_step", lambda run: cluster.newest)
    cluster.policy = elastic.OneNodeElastic(ScalingConfig(num_workers=4), 2, "memory://elastic", 1_000)
    return cluster


def test_a_start_takes_all_workers_at_once_or_what_is_free_after_a_while(cluster):
    assert cluster.decide() == 4
    cluster.free = 3
    assert cluster.decide() is None
    cluster.now += 20
    assert cluster.decide() == 3
    cluster.free = 0
    assert cluster.decide() == 2  # asks Ray for the fewest, which waits for room and says so
    assert cluster.decide(running=2) is None
    cluster.free = 3
    assert cluster.decide() is None  # a new start settles anew


def test_a_running_training_grows_after_a_checkpoint_only(cluster):
    def later(running=2):
        cluster.now += 11
        return cluster.decide(running)

    cluster.free, cluster.newest = 0, 10
    assert later() is None
    cluster.free = 1
    assert later() is None  # the first look that finds room
    assert later() is None  # no checkpoint since
    cluster.newest = 20
    assert cluster.decide(2) is None  # too early for another look
    cluster.free = 0
    assert later() is None  # the room is gone
    cluster.free = 5
    assert later() is None
    cluster.newest = 30
    assert later() == 4
    cluster.newest = 1_000
    assert [later(), later(running=4)] == [None, None]  # the training is over; all workers run


def test_a_store_that_is_away_lets_no_training_grow(cluster, monkeypatch, caplog):
    def away(run):
        raise OSError("connection refused")

    monkeypatch.setattr(elastic, "newest_step", away)
    for _ in range(3):
        cluster.now += 11
        assert cluster.decide(running=2) is None
    assert "the store did not answer" in caplog.text


def test_fewer_workers_than_the_fewest_are_refused_with_both_settings(train_config):
    with pytest.raises(
        ValueError, match=r"min_workers=3 is more than num_workers=2\. Give at most that, or more workers"
    ):
        train_config("owls", workers=2, min_workers=3)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_goes_on_without_a_lost_node_and_with_a_new_one(train_config, root, tmp_path, processes):
    """Only the head has the resource `vitline_training`, as the guide for a cluster says."""
    config = train_config("elastic", workers=2, steps=10**6, min_workers=1)
    config = replace(config, **{"recipe.model.dropout_rate": 0.0, "execution.save_every_steps": 50})
    run, lease = begin(config, root)
    sizes = lambda: [start["world_size"] for start in sorted(read_starts(run), key=lambda start: start["at"])]  # noqa: E731

    with three_nodes(Settings(root=root), tmp_path) as cluster:
        command = [sys.executable, "-m", "vitline.vit.ray_jobs.train_driver", "--run", run.uri, "--attempt", "1"]
        cluster.jobs.submit(lease.job_id, command, {}, {})

        def until(condition):
            deadline = time.monotonic() + 300
            while not condition():
                state = cluster.jobs.find(lease.job_id)
                assert not state.terminal, f"{state}\n{cluster.jobs.logs(lease.job_id)}"
                assert time.monotonic() < deadline, cluster.jobs.logs(lease.job_id)
                time.sleep(0.1)

        def trains_with(number_of_workers):
            """With so many workers, from a new start on, until it has saved twice."""
            until(lambda: sizes() and sizes()[-1] == number_of_workers)
            before = newest_step(run) or 0
            until(lambda: (newest_step(run) or 0) > before + 50)

        trains_with(2)
        (worker, _) = processes("ray::RayTrainWorker")
        cluster.kill_node_of(worker.pid)
        trains_with(1)
        cluster.add_node()
        trains_with(2)
        request_stop(run, "preempted", by="test", attempt=1)
        assert cluster.jobs.follow(lease.job_id, lambda _: None).exit_code == 75
    assert sizes() == [2, 1, 2]
    assert read_state(run)["state"] == "preempted"
    losses = losses_of(run)
    assert sorted(losses) == list(range(1, max(losses) + 1))
