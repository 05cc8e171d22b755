"""A cluster on hosts of its own: on the first one a store and the head of a Ray with its job server, on the others nodes of that Ray."""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3

from vitline.infra.local import seaweed
from vitline.infra.local.processes import free_ports, tail, temporary_folder
from vitline.infra.local.ray_node import node_command
from vitline.infra.local.stack_config import BUCKET, GRPC_PORT_OFFSET, S3_INTERNAL, StackConfig, seaweed_program
from vitline.infra.ray_jobs import RayJobs

from ..infra.container_process import RAY_PATIENCE
from .hosts import Hosts
from .hosts import why_not_here as hosts_why_not_here

OBJECT_STORE_BYTES = 100_000_000
START_S = 300.0
GCS_PORT, JOBS_PORT = 6379, 8265
AGENT_PORTS = (52365, 52366, 52367, 52368)
RAY = {
    **RAY_PATIENCE,
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_prestart_worker_first_driver": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    "RAY_health_check_period_ms": "1000",  # a killed host is lost after 5 s, by default after 15
}


def why_not_here() -> str:
    """Why no such cluster can be made here; empty if it can."""
    lacks_store = "" if seaweed_program() else "needs SeaweedFS, whose wheel is for Linux on x86-64"
    return hosts_why_not_here() or lacks_store


class RayHosts:
    """Each host has one CPU for Ray, and its own copy of the token. `head` names the host with the servers."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.head = hosts, hosts.names[0]
        self._token = secrets.token_hex(32)
        # Hosts have their own ports, but SeaweedFS names sockets in the /tmp of this machine after these.
        names = ("s3", *S3_INTERNAL)
        ports = dict(zip(names, free_ports(len(names), GRPC_PORT_OFFSET), strict=True))
        directory = hosts.folder / self.head
        self.seaweed = StackConfig(id="hosts", directory=directory, ports=ports, object_store=True, only_ray=True)
        address = hosts.address(self.head)
        self.job_server, self._gcs = f"http://{address}:{JOBS_PORT}", f"{address}:{GCS_PORT}"
        self._keys = {"AWS_ACCESS_KEY_ID": "vitline", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
        self.store = {"AWS_ENDPOINT_URL": f"http://{address}:{ports['s3']}", "AWS_REGION": "us-east-1", **self._keys}

    def start_head(self) -> None:
        """Starts store and head at once."""
        address = self.hosts.address(self.head)
        (self.seaweed.directory / "s3").mkdir()
        store = [word.replace("127.0.0.1", address) for word in seaweed.command(self.seaweed)]
        server = self.hosts.start(self.head, store, self.log("store"), self._keys)
        options = {"port": GCS_PORT, "dashboard-host": address, "dashboard-port": JOBS_PORT}
        head = self._start_node(self.head, options, "--head", "--no-monitor")
        self._until_said(server, "store", f"created bucket {BUCKET}")
        self._until_said(head, self.head, "Ray runtime started")

    def join(self, hosts: Sequence[str], labels: str = "") -> None:
        """Further hosts join the Ray, all at once."""
        options = {"address": self._gcs} | ({"labels": labels} if labels else {})
        nodes = {host: self._start_node(host, options) for host in hosts}
        for host, node in nodes.items():
            self._until_said(node, host, "Ray runtime started")

    def variables(self, root: str) -> dict[str, str]:
        """For commands that work on a root in the store."""
        return self._token_on(self.head) | self.store | {"RAY_ADDRESS": self.job_server, "VITLINE_ROOT": root}

    def client(self) -> Any:
        """A client of the store, for threads `inside` a host."""
        return boto3.client(
            "s3",
            endpoint_url=self.store["AWS_ENDPOINT_URL"],
            region_name=self.store["AWS_REGION"],
            aws_access_key_id=self.store["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.store["AWS_SECRET_ACCESS_KEY"],
        )

    def keys(self, prefix: str) -> list[str]:
        """Keys of the bucket."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def job_logs(self) -> str:
        """What the drivers of all jobs have logged."""
        jobs = RayJobs(self.job_server, self._token_on(self.head)["RAY_AUTH_TOKEN_PATH"])
        return "".join(jobs.logs(job.id) for job in jobs.list())

    def log(self, name: str) -> Path:
        return self.hosts.folder / f"{name}.log"

    def _token_on(self, host: str) -> dict[str, str]:
        file = self.hosts.folder / host / "token"
        file.write_text(self._token)
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}

    def _start_node(self, host: str, options: dict[str, Any], *more: str) -> "subprocess.Popen[bytes]":
        options |= {"node-ip-address": self.hosts.address(host), "node-name": host, "num-cpus": 1}
        options |= {"object-store-memory": OBJECT_STORE_BYTES, "temp-dir": self.hosts.folder / host / "ray"}
        command = [*node_command(options, AGENT_PORTS), *more]
        return self.hosts.start(host, command, self.log(host), RAY | self._token_on(host) | self.store)

    def _until_said(self, process: "subprocess.Popen[bytes]", log: str, words: str) -> None:
        deadline = time.monotonic() + START_S
        while words not in self.log(log).read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{log} does not start: {tail(self.log(log))}")
            time.sleep(0.1)


@contextlib.contextmanager
def ray_hosts(number: int) -> Iterator[RayHosts]:
    """So many hosts, until the context ends. The first one works; the others wait for `join`."""
    with temporary_folder() as folder:
        hosts = Hosts(folder, [f"h{host}" for host in range(number)])
        cluster = RayHosts(hosts)
        try:
            with hosts:
                cluster.start_head()
                yield cluster
        finally:
            seaweed.remove_sockets(cluster.seaweed)
