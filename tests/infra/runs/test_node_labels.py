"""VITLINE_NODE_LABELS on a real cluster: each way of running tasks uses the nodes with these labels only."""

import json
import sys

import pytest

from vitline.flows.ops.node_checks import check_cluster
from vitline.infra.settings import Settings

from ...servers.ray_nodes import three_nodes

PROGRAM = """
import json
from collections import deque
import ray
from vitline.infra.runs.ray_work import RayTask, run_keyed, run_many, start_ray

def node(number):
    return ray.get_runtime_context().get_node_id()

cpus = start_ray()["CPU"]
tasks = [RayTask(f"task-{number}", number, notes_progress=False) for number in range(4)]
nodes = {
    "a process each": [found for _, found in run_keyed(node, deque(tasks), watch=None)],
    "kept processes": [found for _, found in run_keyed(node, deque(tasks), watch=None, keep=2)],
    "Ray Data": list(run_many(node, tasks)),
}
labelled = [each["NodeID"] for each in ray.nodes() if each["Labels"].get("pool") == "birds"]
print("FOUND", json.dumps([cpus, {way: sorted({labelled.index(each) for each in ids}) for way, ids in nodes.items()}]))
"""


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.timeout(900)
def test_tasks_run_on_nodes_with_the_labels_of_the_setting(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    with three_nodes(Settings(root=str(tmp_path)), tmp_path / "logs") as cluster:
        monkeypatch.setenv("VITLINE_NODE_LABELS", "pool=birds")
        settings = cluster.of_client(str(tmp_path / "store"))
        (refused,) = check_cluster(settings)
        assert not refused.ok
        assert "no node of the cluster has pool=birds (VITLINE_NODE_LABELS)" in refused.found
        assert not cluster.jobs.has_usable_nodes()

        cluster.add_node(labels="pool=birds")
        assert (cluster.jobs.has_usable_nodes(), cluster.jobs.num_cpus()) == (True, 1)
        (tmp_path / "program.py").write_text(PROGRAM)
        cluster.jobs.submit("placed", [sys.executable, str(tmp_path / "program.py")], {}, {})
        cluster.jobs.follow("placed", lambda _: None)
        log = cluster.jobs.logs("placed")
        assert "FOUND" in log, log
        everywhere = {"a process each": [0], "kept processes": [0], "Ray Data": [0]}
        assert json.loads(log.partition("FOUND")[2].splitlines()[0]) == [1, everywhere]
        ran, nodes = check_cluster(settings)
        assert (ran.ok, nodes.mark, nodes.found.count(", node ")) == (True, "ok", 1)
