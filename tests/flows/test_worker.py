"""Which processes the worker starts for a flow run. Whole runs are in `tests/end_to_end/`."""

import sys
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.workers.process import ProcessJobConfiguration

from flows.worker import OneProcess

ENGINE = f"{sys.executable} -m prefect.engine"


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
        **{"name": "default", "flow_id": uuid4(), "entrypoint": "flows.deployed.pretrain", **changes}
    )
    OneProcess(**job_variables).prepare_for_flow_run(FlowRun(flow_id=deployment.flow_id), deployment)
    assert received == [command]
