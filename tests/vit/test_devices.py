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
from vitline.vit.run.devices import choose_devices, cluster_limit


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
