"""Prefect's process worker, which refuses invalid requests itself, without starting a process for the flow.

To start that process takes several seconds, more on a busy machine; the worker is already running. It starts every flow run
that it does not refuse, and the flow checks its request again, so that refusing here only saves time.
"""

import argparse
import asyncio
import contextlib
import signal
from abc import ABC
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from vitline.flows.forms.forms import FORMS
from vitline.flows.on_prefect.deployments import ENTRYPOINTS
from vitline.flows.on_prefect.flow_run import check_user_functions, read_request
from vitline.flows.on_prefect.flow_states import state_of
from vitline.flows.on_prefect.prefect_private import flow_process_command
from vitline.flows.on_prefect.request_checks import check_request
from vitline.flows.on_prefect.run_names import descriptive_name, given_name
from vitline.infra.settings import Settings, import_nothing_from_here, inherited_environment
from vitline.infra.settings_file import use_settings_file

_PATIENCE_S = 20.0  # if the store takes longer to answer, or this machine to check, the flow checks the request
_SETTINGS = ("VITLINE_", "AWS_", "AZURE_", "GOOGLE_", "MLFLOW_", "RAY_")


def refusal(flow: str, parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> State | None:
    """The final state of a flow run whose request is invalid; None if no error is found.

    `parameters` are those of the run, `defaults` those of its deployment.
    """
    if flow not in FORMS:
        return None
    try:
        request = read_request(FORMS[flow], parameters.get("request") or {}, defaults.get("request") or {})
        check_user_functions(request)
        check_request(Settings().root, flow, request)
    except ValueError as error:
        return state_of(error)
    except Exception:  # the flow hits it again and reports it with its traceback
        return None
    return None


def shares_our_settings(configuration: ProcessJobConfiguration) -> bool:
    """Whether the process of a flow run has our store and settings. Job variables of its deployment may give it others."""
    ours = inherited_environment(without=())
    names = [name for name in {*ours, *configuration.env} if name.startswith(_SETTINGS)]
    return configuration.working_dir is None and all(configuration.env.get(name) == ours.get(name) for name in names)


class OneProcess(ProcessJobConfiguration):
    """Starts the process of a flow directly, for flows that are installed modules. Otherwise Prefect starts a process that fetches
    the flow's code, and that one starts the flow, so that Prefect is imported twice."""

    def prepare_for_flow_run(
        self, flow_run: FlowRun, deployment: DeploymentResponse | None = None, *more: Any, **named: Any
    ) -> None:
        installed = (
            deployment is not None
            and (deployment.entrypoint or "").startswith(ENTRYPOINTS)
            and not deployment.pull_steps
        )
        # Prefect then calls the hook for cancelled runs in this process, which needs the same settings.
        if installed and self.command is None and not any(name.startswith(_SETTINGS) for name in self.env):
            self.command = flow_process_command()
        super().prepare_for_flow_run(flow_run, deployment, *more, **named)


class RefusingWorker(ProcessWorker, ABC):  # ABC keeps it from replacing Prefect's own worker in its registry of types
    """Runs flows in processes of this machine, except those that it refuses."""

    job_configuration = OneProcess

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        refused = await self._refusal(flow_run) if shares_our_settings(configuration) else None
        if refused is None:
            return await super().run(flow_run, configuration, task_status)
        await self.client.set_flow_run_state(flow_run.id, refused)
        if task_status:
            task_status.started(0)  # no process
        return ProcessWorkerResult(status_code=0, identifier="refused")

    async def _refusal(self, run: FlowRun) -> State | None:
        if run.deployment_id is None:
            return None
        deployment = await self.client.read_deployment(run.deployment_id)
        if not (deployment.entrypoint or "").startswith(ENTRYPOINTS):
            return None  # not a flow of vitline, even if it has the same name
        flow = (await self.client.read_flow(deployment.flow_id)).name
        refused = None
        with anyio.move_on_after(_PATIENCE_S):
            refused = await anyio.to_thread.run_sync(
                refusal, flow, run.parameters, deployment.parameters, abandon_on_cancel=True
            )
        if refused and not given_name(run.name):
            request = run.parameters.get("request") or {}
            await self.client.update_flow_run(run.id, name=descriptive_name(flow, request, datetime.now(UTC)))
        return refused


def main() -> None:
    """As `prefect worker start --type process`, with this worker."""
    parser = argparse.ArgumentParser(prog="python -P -m vitline.flows.on_prefect.worker", description=__doc__)
    parser.add_argument("--pool", required=True, help="name of the work pool, of the type process")
    parser.add_argument("--name", required=True, help="name of this worker")
    parser.add_argument(
        "--with-healthcheck",
        action="store_true",
        help="answer /health at PREFECT_WORKER_WEBSERVER_HOST and _PORT, with 503 once it no longer asks for work",
    )
    arguments = parser.parse_args()
    import_nothing_from_here()
    use_settings_file()
    refresh_global_settings_context()  # Prefect was imported before
    worker = RefusingWorker(
        work_pool_name=arguments.pool,
        name=arguments.name,
        heartbeat_interval_seconds=int(get_current_settings().worker.heartbeat_seconds),
    )
    asyncio.run(serve(worker, arguments.with_healthcheck))
    print(f"Worker {arguments.name!r} stopped!")


async def serve(worker: ProcessWorker, with_healthcheck: bool = False) -> None:
    """Runs the worker until SIGTERM, SIGINT or SIGHUP.

    `prefect worker start` ends by KeyboardInterrupt instead, which cancels all its tasks at once. While a flow process is
    connected, Python 3.11 then logs a traceback.
    """
    running = asyncio.create_task(worker.start(with_healthcheck=with_healthcheck, printer=print))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    main()
