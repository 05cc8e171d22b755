"""What a job may use of a node, by the variables of Slurm."""

import pytest

from vitline.infra.slurm.allocation import allocation, share_of_this_node

MANY_BYTES = 10**15


@pytest.fixture
def machine(monkeypatch):
    """A node with 64 CPUs, 1,000 GiB of memory and as much shared memory as one likes."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 1000 * 2**30}))
    monkeypatch.setattr("psutil.disk_usage", lambda path: type("Disk", (), {"free": MANY_BYTES}))


@pytest.mark.parametrize(
    ("memory", "gibibytes"),
    [({"SLURM_MEM_PER_NODE": "10240"}, 3), ({"SLURM_MEM_PER_CPU": "5120"}, 12), ({"SLURM_MEM_PER_NODE": "0"}, None)],
)
def test_ray_takes_its_share_of_the_memory_of_the_job(machine, memory, gibibytes):
    share = share_of_this_node({"SLURM_CPUS_ON_NODE": "8", **memory})
    assert share.num_cpus == 8
    assert share.object_store_bytes == (200 * 10**9 if gibibytes is None else gibibytes * 2**30)


def test_what_slurm_does_not_limit_is_that_of_the_machine(machine):
    assert share_of_this_node({}).num_cpus == 64


def test_the_object_store_fits_into_the_shared_memory(machine, monkeypatch):
    monkeypatch.setattr("psutil.disk_usage", lambda path: type("Disk", (), {"free": 10**9}))
    assert share_of_this_node({"SLURM_MEM_PER_NODE": "10240"}).object_store_bytes == 800_000_000


def test_outside_of_a_job_the_error_says_how_to_submit_one(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RuntimeError, match=r"sbatch infra/slurm/vitline\.sbatch"):
        allocation()
