"""Priority between trainings: which one is asked to make room, by rule and on a real Ray."""

import threading
import time
from types import MappingProxyType, SimpleNamespace

import pytest

from vitline.flows.runs import priority
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.priority import RoomMaker
from vitline.flows.runs.services import ConsoleObserver, Services
from vitline.flows.runs.stage import StageFailed, run_store
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.ray_jobs import Job
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state, read_stop, request_stop, write_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.config import ExecutionConfig
from vitline.vit.run.resolved import resolve
from vitline.vit.run.run_spec import read_progress

from ...servers.ray_nodes import three_nodes

OURS = "ours-0123456789ab"


@pytest.fixture
def cluster(root):
    """cluster.train(name, priority, started_at, **execution): a training at work; cluster.make_room(): our need of room."""
    jobs, said, clock = [], [], SimpleNamespace(now=1000.0)

    def train(name, number, started_at=0, of_setting=MappingProxyType({}), **execution):
        key = f"{name}-0123456789ab"
        run = run_store(root, key)
        run.write_json("config.json", {"config": {"execution": {"priority": number, **execution}}})
        lease = acquire_lease(run, key, job_state=lambda job: None, owner="test")
        write_state(run, "running", 1)
        known = {"id": lease.job_id, "state": "running", "exit_code": None, "message": "", "started_at": started_at}
        metadata = {"run_key": key, "root": open_store(root).uri}
        jobs.append(Job(**known, metadata=metadata, node_labels=dict(of_setting)))
        return run

    services = SimpleNamespace(
        root=root,
        observer=SimpleNamespace(say=said.append),
        cluster=SimpleNamespace(jobs=SimpleNamespace(list=lambda: list(jobs), runs_one_training=lambda: False)),
    )
    return SimpleNamespace(
        train=train,
        jobs=jobs,
        ray=services.cluster.jobs,
        said=said,
        clock=clock,
        room_maker=lambda **execution: RoomMaker(services, OURS, ExecutionConfig(**execution)),
    )


def stopped(*runs):
    return [read_stop(run) is not None for run in runs]


def test_the_lowest_and_youngest_goes_first_and_the_next_only_if_that_was_not_enough(cluster, monkeypatch):
    monkeypatch.setattr(priority, "time", SimpleNamespace(monotonic=lambda: cluster.clock.now))
    old, young = cluster.train("old", -1, started_at=10), cluster.train("young", -1, started_at=20)
    middle, same = cluster.train("middle", 1), cluster.train("same", 2)
    make_room = cluster.room_maker(priority=2)
    make_room()
    assert stopped(old, young, middle, same) == [False, True, False, False]
    assert read_stop(young)["by"] == f"to make room for {OURS}, whose priority is 2, not -1"
    assert cluster.said == [
        f"young-0123456789ab (priority -1) was asked to make room for {OURS} (priority 2); it saves a checkpoint and resumes later"
    ]
    make_room()  # it saves its checkpoint
    cluster.clock.now += 1000
    make_room()
    assert stopped(old, middle) == [False, False]
    del cluster.jobs[1]
    make_room()  # our workers may be on their way into its room
    assert stopped(old, middle) == [False, False]
    cluster.clock.now += priority.ROOM_S
    make_room()
    assert stopped(old, young, middle, same) == [True, True, False, False]


@pytest.mark.parametrize(
    "theirs",
    [
        {"device": "cpu"},
        {"placement": {"accelerator_type": "A100"}},
        {"placement": {"node_labels": {"pool": "other", "rack": "r1"}}},
    ],
)
def test_who_cannot_make_room_goes_on(cluster, theirs):
    placement = {"accelerator_type": "H100", "node_labels": {"pool": "training"}}
    other, waits = cluster.train("other", 0, **theirs), cluster.train("waits", 0)
    waits.write_json("progress.json", {"step": 0, "waiting_for": "room for 2 workers"})
    evaluation = cluster.train("evaluation", 0)
    evaluation.write_json("config.json", {"protocol": {}})
    cluster.room_maker(priority=1, device="cuda", placement=placement)()
    assert stopped(other, waits, evaluation) == [False, False, False]


def test_labels_of_the_setting_count_like_those_of_a_placement(cluster, monkeypatch):
    """A job variable of a deployment sets them: no room on other nodes helps, so nothing there is stopped."""
    monkeypatch.setenv("VITLINE_NODE_LABELS", "pool=birds")
    cats, anywhere = cluster.train("cats", -1, of_setting={"pool": "cats"}), cluster.train("anywhere", 0)
    cluster.room_maker(priority=1)()
    assert stopped(cats, anywhere) == [False, True]
    birds = cluster.train("birds", -1, of_setting={"pool": "cats"}, placement={"node_labels": {"pool": "birds"}})
    cluster.room_maker(priority=1)()
    assert stopped(cats, birds) == [False, True]


def test_where_trainings_run_one_after_the_other_every_nodes_room_counts(cluster):
    cats = cluster.train("cats", 0, placement={"node_labels": {"pool": "cats"}})
    cluster.ray.runs_one_training = lambda: True
    cluster.room_maker(priority=1, placement={"node_labels": {"pool": "birds"}})()
    assert stopped(cats) == [True]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_training_of_higher_priority_takes_the_room_and_the_other_resumes(train_config, root, tmp_path):
    (tmp_path / "logs").mkdir()
    settings, ended = Settings(root=root, mlflow_tracking_uri=None), {}
    with three_nodes(settings, tmp_path / "logs") as nodes, SenderChild(settings, tmp_path / "logs") as sender:
        services = Services(settings, nodes, ConsoleObserver(), sender)

        def train(name, config):
            try:
                ended[name] = train_model(resolve(config, root), services)[1].state["state"]
            except StageFailed as error:
                ended[name] = error.state

        low = train_config("low", workers=2, steps=10**6)
        run = run_store(root, resolve(low, root).spec().run_key)
        thread = threading.Thread(target=train, args=("low", low))
        thread.start()
        until(lambda: (read_progress(run) or {}).get("step", 0) > 0)
        train("high", train_config("high", workers=2, steps=20, priority=1))
        assert ended == {"high": "finished"}
        kept = read_state(run)
        until(lambda: (state := read_state(run))["attempt"] == 2 and state["state"] == "running")
        until(lambda: read_progress(run)["step"] > kept["step"])
        request_stop(run, "cancelled", by="test", attempt=2)
        thread.join()
        assert ended["low"] == "cancelled"


def until(condition, within_s=600):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
