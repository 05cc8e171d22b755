"""What Slurm gave to a job: nodes, CPUs and memory, by the variables that it sets and by `scontrol`."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from vitline.infra.plain_text import last_words
from vitline.infra.settings import inherited_environment

_OBJECT_STORE_SHARE = 0.3
"""Of the memory of the job, as Ray takes it of that of the machine. Ray does not know that a job may use a part only."""
_MOST_OBJECT_STORE_BYTES, _FEWEST_OBJECT_STORE_BYTES = 200_000_000_000, 80_000_000
_SHARED_MEMORY_SHARE = 0.8
_ANY_PORT = 9  # nothing is sent to it


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job. It is started on the first one, `node`."""

    job_id: str
    nodes: str
    """All of them, as Slurm writes them: `h[1-2]`."""
    node: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Share:
    """What the job may use of the node on which this process runs."""

    num_cpus: int
    object_store_bytes: int


def allocation() -> Allocation:
    """The allocation of the job that this process belongs to. Raises RuntimeError outside of a job."""
    env = inherited_environment(())
    if "SLURM_JOB_ID" not in env:
        raise RuntimeError("this is no job of Slurm. Submit it: `sbatch infra/slurm/vitline.sbatch COMMAND`.")
    names = slurm("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    here = env.get("SLURMD_NODENAME", names[0])
    others = tuple(name for name in names if name != here)
    return Allocation(env["SLURM_JOB_ID"], env["SLURM_JOB_NODELIST"], here, others)


def share_of_this_node(env: Mapping[str, str] | None = None) -> Share:
    """By the variables of Slurm. Without one, as where a site does not limit the memory of jobs, that of the machine."""
    env = inherited_environment(()) if env is None else env
    cpus = int(env.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1)
    megabytes = int(env.get("SLURM_MEM_PER_NODE") or 0) or int(env.get("SLURM_MEM_PER_CPU") or 0) * cpus
    memory = megabytes * 2**20 or psutil.virtual_memory().total
    shared = int(psutil.disk_usage("/dev/shm").free * _SHARED_MEMORY_SHARE)  # where the object store is
    most = min(int(memory * _OBJECT_STORE_SHARE), shared, _MOST_OBJECT_STORE_BYTES)
    return Share(cpus, max(most, _FEWEST_OBJECT_STORE_BYTES))


def address_of(node: str) -> str:
    """The address or name at which Slurm reaches a node."""
    found = re.search(r"\bNodeAddr=(\S+)", slurm("scontrol", "--oneliner", "show", "node", node))
    return found[1] if found else node


def address_towards(host: str) -> str:
    """The IP address of this machine from which it reaches a host: on a machine with several networks, that of the right one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address: str = probe.getsockname()[0]
    return address


def network_towards(host: str) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for the processes of a training, if it is not set: without it Gloo takes the interface that the name of this
    machine leads to, which is often the loopback."""
    if "GLOO_SOCKET_IFNAME" in inherited_environment(()):
        return {}
    here, found = address_towards(host), psutil.net_if_addrs().items()
    names = [name for name, each in found if any(one.address == here for one in each)]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def slurm(*command: str) -> str:
    """What a command of Slurm prints. Raises RuntimeError with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not on the PATH of this node, where Slurm started the job.") from None
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {last_words(done.stderr)}")
    return done.stdout
