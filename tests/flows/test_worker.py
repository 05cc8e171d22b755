"""Which processes the worker starts for a flow run. Whole runs are in `tests/end_to_end/`."""

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse

from flows.worker import OneProcess


@pytest.mark.parametrize(
    ("changes", "job_variables", "direct"),
    [
        ({}, {}, True),
        ({}, {"env": {"LOGNAME": "ann"}}, True),
        ({}, {"env": {"VITLINE_ROOT": "s3://other"}}, False),
        ({}, {"command": "python mine.py"}, True),  # as configured by a user
        ({"pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": "/code"}}]}, {}, False),
        ({"entrypoint": "others.flow"}, {}, False),
    ],
)
def test_prefect_prepares_a_workspace_only_for_flows_that_are_not_installed(changes, job_variables, direct):
    deployment = DeploymentResponse(
        **{"name": "default", "flow_id": uuid4(), "entrypoint": "flows.deployed.pretrain", **changes}
    )
    configuration = OneProcess(**job_variables)
    configuration.prepare_for_flow_run(FlowRun(flow_id=deployment.flow_id), deployment)
    assert configuration._command_configured is direct  # by this Prefect decides
    assert configuration.command.endswith(job_variables.get("command", " -m prefect.engine"))
