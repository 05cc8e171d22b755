"""Faults of trainings on Ray: of a worker on a one-node Ray, of a node on a Ray of three nodes; one is started for each test."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from unittest.mock import patch

import pytest

from vitline.flows.runs.services import ConsoleObserver, Services, open_services
from vitline.flows.runs.stage import run_stage, run_store
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.local.paths import log_dir
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import Store
from vitline.vit.run.resolved import resolve
from vitline.vit.run.run_spec import START_TRY_S, read_progress, read_starts

from ..servers.ray_nodes import ThreeNodes, three_nodes
from .bench import Bench, Training
from .ray_driver import AT, FAULT, REACHED

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
DEADLINE_S = 30


def test_preempted_job(bench):
    """A preempted training writes a checkpoint of its last step and ends its job; the next attempt resumes it, and ends bit for
    bit as without the fault."""
    run = on_cluster(bench, "preempted-job", "preempted")
    bench.require_undisturbed(run)
    require_resumed(run)


def test_lost_node(bench):
    """A training that loses the node of its worker starts on another node, in the same attempt, from the newest checkpoint, and
    ends bit for bit as without the loss."""
    run = with_harm(bench, "lost-node", lambda nodes, pid, node: nodes.kill_node_of(pid))
    starts, attempt = len(read_starts(run.run)), (read_state(run.run) or NO_STATE)["attempt"]
    assert (starts, attempt) == (2, 1), (
        f"there were {starts} starts of the worker, and attempt {attempt} finished the run"
    )


def test_drained_node(bench):
    """A training whose node is drained, as before a spot machine is taken away, writes a checkpoint of its last step at once; the
    next attempt resumes it on another node, and ends bit for bit as without the drain."""
    require_resumed(with_harm(bench, "drained-node", lambda nodes, pid, node: nodes.drain(node, DEADLINE_S)))


def test_stopped_node(bench):
    """So does one whose node is stopped, as by `systemctl stop`."""

    def stop(nodes: ThreeNodes, pid: int, node: str) -> None:
        nodes.node_of(pid).send_signal(signal.SIGTERM)

    require_resumed(with_harm(bench, "stopped-node", stop))


def require_resumed(run: Training) -> None:
    """By attempt 2, from step AT."""
    attempt, starts = (read_state(run.run) or NO_STATE)["attempt"], run.run.list("starts/a2-")
    assert attempt == 2, f"attempt {attempt} finished the run, not attempt 2"
    assert f"step-{AT:09d}-" in "".join(starts), f"attempt 2 did not resume from step {AT}: {', '.join(starts)}"


def on_cluster(bench: Bench, name: str, fault: str) -> Training:
    """The tiny training as a job of Ray, followed to its end as flows do. MLflow is not told. Raises StageFailed."""
    with open_services(settings_of(bench)) as services:
        return followed(services, bench, name, fault)


def settings_of(bench: Bench) -> Settings:
    return bench.settings.model_copy(update={"root": bench.place.uri, "mlflow_tracking_uri": None})


def followed(
    services: Services,
    bench: Bench,
    name: str,
    fault: str,
    look: Callable[[Store], object] = lambda run: None,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Training:
    """The tiny training, followed to its end with `services`; `look(run)` is called every second. Raises StageFailed."""
    config = bench.config(name)
    spec = resolve(config, bench.place.uri).spec()
    run = run_store(bench.place.uri, spec.run_key)
    run.write_json(FAULT, {"fault": fault})

    def progress() -> RunProgress | None:
        look(run)
        return read_progress(run)

    run_stage(
        services,
        spec,
        "tests.chaos.ray_driver",
        title=name,
        progress=progress,
        grace_s=config.execution.grace_s,
        lease_timeout_s=config.execution.lease_timeout_s,
        env={"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_TRY_S), **env},
    )
    return Training.of(run, spec.run_key)


def with_harm(bench: Bench, name: str, harm: Callable[[ThreeNodes, int, str], None]) -> Training:
    """The tiny training on one of two nodes; after step AT of its first start its node comes to `harm`."""
    harmed = list[str]()

    def look(run: Store) -> None:
        if not harmed and run.exists(REACHED):
            at = run.read_json(REACHED)
            harmed.append(at["node"])
            harm(cluster, at["pid"], at["node"])

    with three_nodes_of(bench) as (services, cluster):
        # A one-node Ray has this switched off; a cluster of several nodes has it by default.
        run = followed(services, bench, name, "wait", look, {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1"})
    bench.require_undisturbed(run)
    return run


@contextlib.contextmanager
def three_nodes_of(bench: Bench) -> Iterator[tuple[Services, ThreeNodes]]:
    settings = settings_of(bench)
    logs = log_dir(settings)
    with three_nodes(settings, logs) as cluster, SenderChild(settings, logs) as sender:
        yield Services(settings, cluster, ConsoleObserver(), sender), cluster


def never_harmed(bench: Bench, name: str, harm: object) -> Training:
    training = bench.training(name)
    training.train()
    return training


@pytest.mark.parametrize(
    ("scenario", "found"), [(test_lost_node, "1 starts"), (test_drained_node, "attempt 1 finished")]
)
def test_a_run_that_never_left_its_node_is_noticed(scenario, found, fresh):
    with patch.dict(globals(), with_harm=never_harmed), pytest.raises(AssertionError, match=found):
        scenario(fresh)
