"""A Ray cluster of three nodes on this machine: a head without CPUs, and two nodes with room for one worker each."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

from vitline.flows.runs.services import Cluster
from vitline.infra.children import child_environment, end_with_parent, is_running
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.local.processes import free_ports, tail
from vitline.infra.local.ray_node import AGENT_PORTS, FOREIGN_TO_RAY, node_command
from vitline.infra.plain_text import last_words
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.settings import Settings

from ..eventually import eventually

OBJECT_STORE_BYTES = 100_000_000
JOIN_TIMEOUT_S = 300.0
ENDED_S = 30.0


class ThreeNodes(Cluster):
    """Jobs run their drivers on the head. A worker of a training finds room on either of the two other nodes."""

    def __init__(self, settings: Settings, ray: LocalRay, log_dir: Path) -> None:
        super().__init__(settings, log_dir)
        self.ray, self.nodes = ray, list["subprocess.Popen[bytes]"]()

    @cached_property
    def jobs(self) -> RayJobs:
        return RayJobs(self.ray.address, token_path=self.ray.env["RAY_AUTH_TOKEN_PATH"])

    def of_client(self, root: str) -> Settings:
        """The settings of a client of this cluster, with a store at `root`."""
        token = self.ray.env["RAY_AUTH_TOKEN_PATH"]
        return Settings(root=root, ray_address=self.ray.address, ray_auth_token_path=token, job_python=sys.executable)

    @cached_property
    def gcs(self) -> str:
        """The address at which nodes join. The head may write it a little later than its job server answers."""
        file = Path(self.ray.env["RAY_AUTH_TOKEN_PATH"]).parent / "ray" / "ray_current_cluster"
        eventually(lambda: file.exists() and file.read_text().strip(), awaited=f"the address of Ray in {file}")
        return file.read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes of its nodes."""
        access = {name: value for name, value in self.ray.env.items() if name != "RAY_ADDRESS"}
        tls = Path(access["RAY_AUTH_TOKEN_PATH"]).parent / "ray-tls"
        access |= {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": str(tls / "authority.pem")}
        access |= {"RAY_TLS_SERVER_CERT": str(tls / "part.pem"), "RAY_TLS_SERVER_KEY": str(tls / "part.key")}
        return child_environment(access | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}, FOREIGN_TO_RAY)

    def add_node(self, **options: Any) -> None:
        """A further node, by default with one CPU, and with such options of `ray start`, which takes part once that has said so."""
        given = {"address": self.gcs, "num-cpus": 1, "object-store-memory": OBJECT_STORE_BYTES, **options}
        command = node_command(given, free_ports(AGENT_PORTS))
        log = self.log_dir / f"node-{len(self.nodes) + 1}.log"
        with open(log, "wb") as output:
            node = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=end_with_parent,
            )
        self.nodes.append(node)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while "Ray runtime started" not in tail(log):
            if node.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"a second Ray node does not start: {last_words(tail(log))}")
            time.sleep(0.1)

    def kill_node_of(self, pid: int) -> None:
        """SIGKILL to every process of the node that process `pid` belongs to, as when its machine loses power."""
        end_at_once(self.node_of(pid))

    def node_of(self, pid: int) -> "subprocess.Popen[bytes]":
        """The node that process `pid` belongs to."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        (node,) = (node for node in self.nodes if node.pid in above)
        return node

    def drain(self, node_id: str, within_s: int) -> None:
        """What an autoscaler does before a cloud takes a node away: Ray places nothing on it any more, and tells its workers."""
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node", f"--address={self.gcs}"]
        command += [f"--node-id={node_id}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        command += [f"--deadline-remaining-seconds={within_s}"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"Ray does not drain a node: {last_words(done.stderr)}"

    def close(self) -> None:
        for node in self.nodes:
            end_at_once(node)


def end_at_once(node: "subprocess.Popen[bytes]") -> None:
    """The processes stand still first, so that none starts another one meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(node.pid)
        parent.suspend()
        processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([process for process in processes if is_running(process)], ENDED_S)
    node.wait()


@contextlib.contextmanager
def three_nodes(settings: Settings, log_dir: Path) -> Iterator[ThreeNodes]:
    """The cluster, until the context ends."""
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(LocalRay(log_dir, num_cpus=0, object_store_bytes=OBJECT_STORE_BYTES, more_nodes=True))
        cluster = ThreeNodes(settings, ray, log_dir)
        stack.callback(cluster.close)
        cluster.add_node()
        cluster.add_node()
        yield cluster
