"""A training on the nodes that its config asks for, on a real cluster."""

import sys
import time

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
    placement = {"node_labels": {"pool": "training"}, "environment": {"GLOO_SOCKET_IFNAME": "lo"}}
    config = replace(train_config("placed", workers=1, steps=10**6), **{"execution.placement": placement})
    run, lease = begin(config, root)
    with three_nodes(Settings(root=root), tmp_path) as cluster:
        command = [sys.executable, "-m", "vitline.vit.ray_jobs.train_driver", "--run", run.uri, "--attempt", "1"]
        cluster.jobs.submit(lease.job_id, command, {"VITLINE_ONE_NODE_RAY": ""}, {})

        def until(condition):
            deadline = time.monotonic() + 600
            while not condition(read_progress(run) or {}):
                assert not cluster.jobs.find(lease.job_id).terminal, cluster.jobs.logs(lease.job_id)
                assert time.monotonic() < deadline, cluster.jobs.logs(lease.job_id)
                time.sleep(0.1)

        until(lambda progress: "waiting_for" in progress)
        assert (
            read_progress(run)["waiting_for"] == "1 CPU worker on nodes with pool=training, of which the cluster has 0"
        )
        cluster.add_node(labels="pool=training")
        until(lambda progress: progress["step"] > 0)
        (worker,) = processes("ray::RayTrainWorker")
        assert cluster.node_of(worker.pid) is cluster.nodes[-1]
        assert psutil.Process(worker.pid).environ()["GLOO_SOCKET_IFNAME"] == "lo"
        request_stop(run, "preempted", by="test", attempt=1)
        assert cluster.jobs.follow(lease.job_id, lambda _: None).exit_code == 75
    assert read_state(run)["state"] == "preempted"
