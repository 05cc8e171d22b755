"""Which processes the worker starts for a flow run, and how it ends. Whole runs are in `tests/end_to_end/`."""

import subprocess
import sys
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.workers.process import ProcessJobConfiguration

from vitline.flows.on_prefect.worker import OneProcess

ENGINE = f"{sys.executable} -P -m prefect.engine"


@pytest.mark.parametrize(
    ("changes", "job_variables", "command"),
    [
        ({}, {}, ENGINE),
        ({}, {"env": {"LOGNAME": "ann"}}, ENGINE),
        ({}, {"env": {"VITLINE_ROOT": "s3://other"}}, None),
        ({}, {"command": "python mine.py"}, "python mine.py"),
        ({"pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": "/code"}}]}, {}, None),
        ({"entrypoint": "others.flow"}, {}, None),
    ],
)
def test_only_installed_flows_are_started_directly(changes, job_variables, command, monkeypatch):
    """Without a command, Prefect starts another process, which fetches the code of the flow."""
    received = []
    monkeypatch.setattr(ProcessJobConfiguration, "prepare_for_flow_run", lambda self, *_: received.append(self.command))
    deployment = DeploymentResponse(
        **{"name": "default", "flow_id": uuid4(), "entrypoint": "vitline.flows.on_prefect.flows.pretrain", **changes}
    )
    OneProcess(**job_variables).prepare_for_flow_run(FlowRun(flow_id=deployment.flow_id), deployment)
    assert received == [command]


CONNECTED = """
import asyncio
from vitline.flows.on_prefect.worker import serve

class Worker:
    async def start(self, printer):
        async def listen(reader, writer):  # as Prefect's worker does, for each flow process
            printer("connected", flush=True)
            await reader.read()

        async with await asyncio.start_server(listen, "127.0.0.1") as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                await asyncio.Event().wait()
            finally:
                writer.close()
                await writer.wait_closed()
                printer("closed")

asyncio.run(serve(Worker()))
"""


@pytest.mark.slow
def test_a_stopped_worker_closes_its_connections_itself():
    """`prefect worker start` cancels its tasks at once, and a flow process that is connected makes Python log a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONNECTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "connected\n"
    process.terminate()
    assert process.communicate(timeout=60) == ("closed\n", "")
    assert process.returncode == 0
