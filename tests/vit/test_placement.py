"""A training on the nodes that its config asks for, on a real cluster."""

import sys
import time
from types import MappingProxyType

import psutil
import pytest

from vitline.infra.config import replace
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.settings import Settings
from vitline.vit.run.run_spec import read_progress

from ..servers.ray_nodes import three_nodes
from ..trainings import begin


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_workers_run_on_labelled_nodes_with_their_variables(train_config, root, tmp_path, processes):
    with three_nodes(Settings(root=root), tmp_path) as cluster:
        labelled = {"node_labels": {"pool": "training"}, "environment": {"GLOO_SOCKET_IFNAME": "lo"}}
        placed = Placed(cluster, train_config, root, "by-labels", labelled)
        placed.until(lambda progress: "waiting_for" in progress)
        assert (
            read_progress(placed.run)["waiting_for"]
            == "1 CPU worker on nodes with pool=training, of which the cluster has 0"
        )
        cluster.add_node(labels="pool=training,rack=r7")
        placed.until(lambda progress: progress["step"] > 0)
        (worker,) = processes("ray::RayTrainWorker")
        assert cluster.node_of(worker.pid) is cluster.nodes[-1]
        assert psutil.Process(worker.pid).environ()["GLOO_SOCKET_IFNAME"] == "lo"
        placed.stop()

        of_project = {"VITLINE_NODE_LABELS": "pool=training"}
        placed = Placed(cluster, train_config, root, "in-one-rack", {"one_domain": "rack"}, of_project)
        placed.until(lambda progress: progress.get("step", 0) > 0)
        (worker,) = processes("ray::RayTrainWorker")
        assert cluster.node_of(worker.pid) is cluster.nodes[-1]
        placed.stop()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_workers_share_a_node_or_are_spread_in_the_rack_with_room(train_config, root, tmp_path, processes):
    with three_nodes(Settings(root=root), tmp_path) as cluster:
        for rack, cpus in (("r1", 1), ("r2", 2), ("r2", 2)):
            cluster.add_node(labels=f"rack={rack}", **{"num-cpus": cpus})
        for strategy, number in (("pack", 1), ("spread", 2)):
            placement = {"one_domain": "rack", "strategy": strategy}
            placed = Placed(cluster, train_config, root, strategy, placement, workers=2)
            placed.until(lambda progress: progress.get("step", 0) > 0)
            nodes = {cluster.node_of(worker.pid) for worker in processes("ray::RayTrainWorker")}
            assert nodes <= {*cluster.nodes[-2:]}
            assert len(nodes) == number
            placed.stop()


class Placed:
    """A training, as a job of the cluster."""

    def __init__(self, cluster, train_config, root, name, placement, of_project=MappingProxyType({}), workers=1):
        config = replace(train_config(name, workers=workers, steps=10**6), **{"execution.placement": placement})
        self.run, lease = begin(config, root)
        self.jobs, self.job_id = cluster.jobs, lease.job_id
        command = [sys.executable, "-m", "vitline.vit.ray_jobs.train_driver", "--run", self.run.uri, "--attempt", "1"]
        self.jobs.submit(self.job_id, command, {"VITLINE_ONE_NODE_RAY": "", **of_project}, {})

    def until(self, condition):
        deadline = time.monotonic() + 600
        while not condition(read_progress(self.run) or {}):
            assert not self.jobs.find(self.job_id).terminal, self.jobs.logs(self.job_id)
            assert time.monotonic() < deadline, self.jobs.logs(self.job_id)
            time.sleep(0.1)

    def stop(self):
        request_stop(self.run, "preempted", by="test", attempt=1)
        assert self.jobs.follow(self.job_id, lambda _: None).exit_code == 75
        assert read_state(self.run)["state"] == "preempted"
