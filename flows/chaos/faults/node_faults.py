"""Faults of a whole node under a training, on a Ray of three nodes on this machine that is started for each scenario."""

import contextlib
from collections.abc import Callable, Iterator

from vitline.flows.chaos.bench import Bench, Training
from vitline.flows.chaos.faults.cluster_faults import followed, settings_of
from vitline.flows.chaos.promises import require
from vitline.flows.chaos.ray_driver import AT, REACHED
from vitline.flows.chaos.ray_nodes import ThreeNodes, three_nodes
from vitline.flows.chaos.scenario import scenario
from vitline.flows.stages.engines import Engines, Terminal
from vitline.flows.to_mlflow.shipper import Shipper
from vitline.infra.local.paths import log_dir
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import Store
from vitline.vit.run_spec import read_starts

NEEDS = "1 GB of memory on this machine"
DEADLINE_S = 30


@scenario(f"SIGKILL to every process of a Ray node on which a worker trains, after step {AT}", NEEDS, about_s=120)
def lost_node(bench: Bench) -> str:
    """A training that loses the node of its worker starts on another node, in the same attempt, from the newest checkpoint, and
    ends bit for bit as without the loss."""
    run = with_harm(bench, "lost-node", lambda nodes, pid, node: nodes.kill_node_of(pid))
    starts, attempt = len(read_starts(run.run)), (read_state(run.run) or NO_STATE)["attempt"]
    require(
        (starts, attempt) == (2, 1), f"there were {starts} starts of the worker, and attempt {attempt} finished the run"
    )
    return "went on on another node within attempt 1"


@scenario(
    f"Ray is told to drain a node within {DEADLINE_S} s on which a worker trains, after step {AT}", NEEDS, about_s=120
)
def drained_node(bench: Bench) -> str:
    """A training whose node is drained, as before a spot machine is taken away, writes a checkpoint of its last step at once; the
    next attempt resumes it on another node, and ends bit for bit as without the drain."""
    run = with_harm(bench, "drained-node", lambda nodes, pid, node: nodes.drain(node, DEADLINE_S))
    attempt, starts = (read_state(run.run) or NO_STATE)["attempt"], run.run.list("starts/a2-")
    require(attempt == 2, f"attempt {attempt} finished the run, not attempt 2")
    require(f"step-{AT:09d}-" in "".join(starts), f"attempt 2 did not resume from step {AT}: {', '.join(starts)}")
    return f"attempt 2 resumed from step {AT} on another node"


def with_harm(bench: Bench, name: str, harm: Callable[[ThreeNodes, int, str], None]) -> Training:
    """The tiny training on one of two nodes; after step AT of its first start its node comes to `harm`."""
    harmed = list[str]()

    def look(run: Store) -> None:
        if not harmed and run.exists(REACHED):
            at = run.read_json(REACHED)
            harmed.append(at["node"])
            harm(cluster, at["pid"], at["node"])

    with three_nodes_of(bench) as (engines, cluster):
        # A one-node Ray has this switched off; a cluster of several nodes has it by default.
        run = followed(engines, bench, name, "wait", look, {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1"})
    bench.require_undisturbed(run)
    return run


@contextlib.contextmanager
def three_nodes_of(bench: Bench) -> Iterator[tuple[Engines, ThreeNodes]]:
    settings = settings_of(bench)
    logs = log_dir(settings)
    with three_nodes(settings, logs) as cluster, Shipper(settings, logs) as shipper:
        yield Engines(settings, cluster, Terminal(), shipper), cluster
