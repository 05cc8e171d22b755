"""Which processes the worker starts for a flow run, and how it ends. Whole runs are in `tests/end_to_end/`."""

import json
import os
import re
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


CHECKS = """
import json, sys
from vitline.flows.on_prefect.worker import refusal

for request in json.loads(sys.argv[1]):
    refused = refusal("finetune", {"request": request}, {})
    print(refused and refused.message)
print({"torch", "ray"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_the_worker_refuses_wrong_finetunings_and_loads_no_torch(digits_root, tiny, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: vit-paper\nprotocol: {totl_steps: 5}\n")
    says = {
        r"The override protocol='mine' is no user-defined protocol: give PACKAGE\.MODULE:FUNCTION, .*": {"overrides": {"protocol": "mine"}},
        r"There is no protocol '/no/mine\.yaml': no such file\.": {"overrides": {"protocol": "/no/mine.yaml"}},
        r".*/mine\.yaml: .*totl_steps.*": {"overrides": {"protocol": str(mine)}},
        r"The protocol 'os:abort' is Python code of 'os', which forms may not import.*": {"overrides": {"protocol": "os:abort"}},
        r"vit-paper-transfer chooses peak_lr among 0\.001, 0\.003, 0\.01, 0\.03: set it.*": {"protocol": "vit-paper-transfer"},
        r".*'recipe\.optim\.peak_lrr'.*Did you mean 'recipe\.optim\.peak_lr'\?": {"overrides": {"recipe.optim.peak_lrr": 1}},
        "None": {"protocol": "vit-paper", "peak_lr": 0.01},
        r"set\(\)": None,
    }  # fmt: skip
    requests = [{"model": tiny, "corpus": "digits", **fields} for fields in says.values() if fields is not None]
    env = os.environ | {"VITLINE_ROOT": digits_root}
    command = [sys.executable, "-c", CHECKS, json.dumps(requests)]
    answers = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    for expected, answer in zip(says, answers, strict=True):
        assert re.fullmatch(expected, answer), answer


CONNECTED = """
import asyncio
from vitline.flows.on_prefect.worker import serve

class Worker:
    async def start(self, with_healthcheck, printer):
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
    assert process.communicate(timeout=240) == ("closed\n", "")
    assert process.returncode == 0
