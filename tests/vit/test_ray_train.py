"""How the driver sets up Ray Train. Whole runs are in `tests/end_to_end/`."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from vitline.infra.runs.run_state import read_stop
from vitline.infra.storage import open_store
from vitline.vit.ray_jobs import train_driver
from vitline.vit.ray_jobs.ray_private import UNUSED_CALLBACKS, trainer_class
from vitline.vit.ray_jobs.train_driver import scaling_policy, stop_on_drain

from ..eventually import eventually


def test_trainer_omits_only_unused_callbacks():
    from ray.train.torch import TorchTrainer

    def callbacks(trainer):
        return {type(each).__name__ for each in trainer(print)._create_default_callbacks()}

    assert callbacks(TorchTrainer) - callbacks(trainer_class()) == UNUSED_CALLBACKS


def test_on_a_ray_of_one_node_a_training_asks_nobody_for_further_nodes(monkeypatch):
    """Ray's own policy asks a detached actor, and starts it, and here Ray, for that."""
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", lambda self, **given: given["scaling_policy"])

    def policy_used():
        trainer = trainer_class(scaling_policy())(print, scaling_config=ScalingConfig(num_workers=2))
        return trainer._initialize_and_run_controller(scaling_policy="Ray's own")

    assert policy_used() == "Ray's own"
    monkeypatch.setenv("VITLINE_ONE_NODE_RAY", "1")
    policy = policy_used()
    policy.after_controller_start(SimpleNamespace(run_id="run"))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.make_decision_for_running_worker_group(None, None)
    asyncio.run(policy.before_controller_shutdown())
    assert not ray.is_initialized()


@pytest.fixture
def looks(monkeypatch):
    """looks(answers): Ray answers so, one look after the other, whether it drains the node; an event says that it was the last."""

    def answering(answers):
        left, asked = iter(answers), threading.Event()

        def drains():
            answer = next(left, None)
            if answer is None:
                asked.set()
                return False
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(train_driver, "DRAIN_LOOK_S", 0.001)
        monkeypatch.setattr(train_driver, "node_drains", drains)
        return asked

    return answering


def test_a_training_on_a_node_that_is_drained_is_asked_to_stop_once_ray_says_so(looks, tmp_path):
    run = open_store(tmp_path)
    looks([False, RuntimeError("Ray does not answer"), True])
    with stop_on_drain(run, 3):
        stop = eventually(lambda: read_stop(run), every_s=0.01)
    assert (stop["reason"], stop["attempt"]) == ("preempted", 3)
    assert "drains a node" in stop["by"]


def test_a_training_on_a_node_that_stays_is_not_asked_to_stop(looks, tmp_path):
    asked = looks([False, False])
    with stop_on_drain(open_store(tmp_path), 3):
        assert asked.wait(60)
    assert read_stop(open_store(tmp_path)) is None


def test_on_a_ray_of_one_node_nobody_looks_for_drains(looks, tmp_path, monkeypatch):
    monkeypatch.setenv("VITLINE_ONE_NODE_RAY", "1")
    looks([True])
    with stop_on_drain(open_store(tmp_path), 3):
        assert not [thread for thread in threading.enumerate() if thread.name == "drain-watch"]
