"""A Prefect server without workers, for what becomes of flow runs in Prefect alone."""

import contextlib
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import pytest

from vitline.infra.children import child_environment, end_with_parent
from vitline.infra.local.databases import prepare_database
from vitline.infra.local.processes import free_ports, tail
from vitline.infra.settings import NO_TELEMETRY, Settings

from ...servers.stack import FlowRuns, environment_of


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    """A Prefect server of its own, with vitline's deployments: its API."""
    home, (port,) = tmp_path_factory.mktemp("stack") / "prefect", free_ports(1)
    prepare_database(home.parent, "prefect", print)
    env = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_API_AUTH_STRING": "ann:secret"}
    servers = {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_API_AUTH_STRING": env["PREFECT_API_AUTH_STRING"],
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",  # no flow runs but those of the tests
    }
    command = [sys.executable, "-m", "vitline.flows.on_prefect.local_server", "--host=127.0.0.1", f"--port={port}"]
    with open(home / "log", "wb") as log:
        environment = child_environment(NO_TELEMETRY | servers, prefixes=("PREFECT_",))
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        deadline = time.monotonic() + 300
        while not answers(port, env["PREFECT_API_AUTH_STRING"]):
            assert server.poll() is None, tail(home / "log")
            assert time.monotonic() < deadline, tail(home / "log")
            time.sleep(0.2)
        with environment_of(SimpleNamespace(env=env)):
            from vitline.flows.on_prefect.deploy.registration import register

            runs = FlowRuns(env)
            runs.api.post("/work_pools/", json={"name": "vitline", "type": "process"}).raise_for_status()
            register(Settings())
            yield runs
    finally:
        server.terminate()
        server.wait(240)


def answers(port, login):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/api/health", auth=tuple(login.split(":"))).json() is True
    return False
