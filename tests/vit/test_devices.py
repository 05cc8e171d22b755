"""Which devices a training uses: decided by its config and by the GPUs that the cluster can have at most."""

import json
import os
import subprocess
import sys
import time

import pytest

from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.progress import progress_line
from vitline.infra.storage import open_store
from vitline.vit.config import ExecutionConfig
from vitline.vit.run.devices import Node, choose_devices, choose_workers, cluster_limit


@pytest.mark.parametrize(
    ("asked", "workers", "alive", "most", "expected"),
    [
        ("auto", 2, 0, None, (False, 2)),  # no GPU, and no autoscaler declares one
        ("auto", 2, 0, 0.0, (False, 2)),
        ("auto", 2, 0, 8.0, (True, 2)),  # a node group that scales from zero
        ("auto", 8, 4, 8.0, (True, 8)),  # half of them are up
        ("auto", 8, 4, None, (True, 8)),
        ("auto", 2, 1, 1.0, (True, 1)),  # one machine with one GPU
        ("cuda", 2, 0, None, (True, 2)),
        ("cuda", 2, 0, 2.0, (True, 2)),
        ("cpu", 2, 8, 8.0, (False, 2)),
    ],
)
def test_devices_follow_the_request_and_the_cluster_maximum(asked, workers, alive, most, expected):
    assert choose_devices(asked, workers, alive, most)[:2] == expected


def test_more_gpus_than_the_cluster_can_have_are_refused():
    with pytest.raises(ValueError, match=r"needs 2 GPUs, but this cluster can have at most 1\. .*num_workers"):
        choose_devices("cuda", 2, 0, 1.0)


def test_between_two_numbers_of_workers_the_fewest_must_be_reachable():
    assert choose_devices("cuda", 8, 0, 4.0, 2)[:2] == (True, 4)
    assert choose_devices("cuda", 8, 0, None, 2)[:2] == (True, 8)
    with pytest.raises(
        ValueError, match=r"min_workers=2 needs 2 GPUs, but this cluster can have at most 1\. .*min_workers"
    ):
        choose_devices("cuda", 8, 0, 1.0, 2)


def test_most_gpus_are_those_of_one_node_or_of_declared_node_types():
    assert cluster_limit("GPU", one_node=True, alive=1, declared=None) == 1
    assert cluster_limit("GPU", one_node=False, alive=1, declared=None) is None
    assert cluster_limit("GPU", one_node=False, alive=0, declared={"CPU": 8, "GPU": 4}) == 4
    assert cluster_limit("GPU", one_node=False, alive=0, declared={"CPU": 8}) == 0


H100 = Node({"CPU": 32, "GPU": 4, "accelerator_type:H100": 1}, {"pool": "training"})
A100 = Node({"CPU": 8, "GPU": 8, "accelerator_type:A100": 1}, {"pool": "spare"})


def chosen(nodes=(H100, A100), declared=None, one_node=False, **execution):
    return choose_workers(ExecutionConfig(**execution), nodes, declared, one_node=one_node)


def test_decoding_threads_reserve_their_cpus():
    workers = chosen(num_workers=8, decode_threads=4)
    assert workers.resources == {"GPU": 1, "CPU": 4}
    assert workers.room == 4 + 2  # 8 CPUs feed two of the eight GPUs of the other node
    assert workers.where == " with 4 CPUs each"
    assert chosen(decode_threads=4, placement={"cpus_per_worker": 0}).resources == {"GPU": 1}
    assert chosen(decode_threads=4, one_node=True).resources == {"GPU": 1}
    assert chosen(device="cpu", placement={"cpus_per_worker": 0}).resources == {"CPU": 1}


def test_labels_and_types_choose_nodes():
    workers = chosen(num_workers=6, placement={"accelerator_type": "H100", "node_labels": {"pool": "training"}})
    assert workers.resources == {"GPU": 1, "CPU": 1, "accelerator_type:H100": 0.001}
    assert (workers.room, workers.where) == (4, " on H100 nodes with pool=training")
    assert chosen(placement={"node_labels": {"pool": "spare"}}).room == 8


def test_one_domain_is_the_smallest_with_enough_free_room_else_the_largest():
    racks = {"a": 8, "b": 4, "c": 6}
    nodes = [Node({"CPU": 8, "GPU": gpus}, {"rack": rack, "pool": "training"}) for rack, gpus in racks.items()]
    free = [Node({"CPU": 8, "GPU": 2 if node.labels["rack"] == "b" else 6}, node.labels) for node in nodes]

    def rack(workers, **labels):
        placement = {"one_domain": "rack", "node_labels": labels}
        execution = ExecutionConfig(device="cuda", num_workers=workers, placement=placement)
        found = choose_workers(execution, nodes, None, one_node=False, free=free)
        assert found.where == " on nodes with " + ", ".join(f"{n}={v}" for n, v in found.labels.items())
        return found.labels["rack"], found.room

    assert rack(2, pool="training") == ("b", 4)
    assert rack(5) == ("a", 8)  # as free as c, and first by name
    assert rack(8) == ("a", 8)  # which waits until it is free
    with pytest.raises(
        ValueError, match="one_domain='row' is a label that no node of this cluster has; there are pool, rack"
    ):
        chosen(nodes, placement={"one_domain": "row"})


def test_a_training_waits_for_nodes_that_an_autoscaler_may_bring():
    placement = {"accelerator_type": "H200"}
    for declared in ({"GPU": 0}, {"GPU": 16}, None):
        workers = chosen(declared=declared, placement=placement)
        assert (workers.devices.use_gpu, workers.room) == (True, 0)
    assert chosen([], declared={"GPU": 0}).devices.use_gpu is False


def test_placement_that_can_never_be_is_refused():
    with pytest.raises(
        ValueError, match=r"on H200 nodes with pool=big, but the one node of this Ray is not such a node\. Leave"
    ):
        chosen([H100], one_node=True, placement={"accelerator_type": "H200", "node_labels": {"pool": "big"}})
    with pytest.raises(ValueError, match="asks for GPUs, but device=cpu for none"):
        ExecutionConfig(device="cpu", placement={"accelerator_type": "H100"})
    with pytest.raises(ValueError, match="may not set NCCL_NET_PLUGIN"):
        ExecutionConfig(placement={"environment": {"NCCL_NET_PLUGIN": "/tmp/x.so"}})


def test_progress_line_shows_awaited_and_used_gpus():
    waiting = {"step": 0, "total_steps": 9, "waiting_for": "2 GPUs, of which the cluster has 1"}
    assert progress_line("pretrain", waiting, 65) == "pretrain: waiting for 2 GPUs, of which the cluster has 1 (1:05)"
    assert (
        progress_line("pretrain", {"step": 3, "total_steps": 9, "devices": "2 GPUs"}, 65)
        == "pretrain: 3/9 steps, on 2 GPUs"
    )


# The driver of a real job; only the work and the backend, which needs real GPUs, are replaced.
DRIVER = """
import sys
import vitline.vit.ray_jobs.train_driver as driver
from vitline.vit.config import TrainConfig

def work(job):
    import ray
    from vitline.infra.storage import open_store
    gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    open_store(job["run"]).write_json("placed.json", {"gpus": gpus, "device": job["device"]})

driver.train_worker, driver.BACKENDS = work, {True: "gloo", False: "gloo"}
driver.fit(sys.argv[1], 1, TrainConfig.model_validate_json(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.long
@pytest.mark.servers
def test_gpu_that_is_added_later_is_awaited_and_used(train_config, tmp_path):
    from ray.cluster_utils import Cluster

    run, config = tmp_path / "run", train_config("late", device="cuda")
    acquire_lease(open_store(run), "late", job_state=lambda job: "failed", owner="test")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    try:
        env = {key: value for key, value in os.environ.items() if not key.startswith("VITLINE_")}
        env |= {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
        (tmp_path / "ray").mkdir()
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(run), config.model_dump_json(), str(tmp_path / "ray")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 300
        while not (run / "progress.json").exists():
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        waiting = json.loads((run / "progress.json").read_text())
        assert waiting["waiting_for"] == "1 GPU, of which the cluster has 0"
        assert not (run / "placed.json").exists()
        cluster.add_node(num_cpus=1, num_gpus=1)
        out, _ = driver.communicate(timeout=400)
        assert driver.returncode == 0, out
        assert json.loads((run / "placed.json").read_text()) == {"gpus": ["0"], "device": "cuda"}
    finally:
        cluster.shutdown()
