"""The names of Ray, Prefect and MLflow that they do not promise to keep. If one is gone, this says which; its user needs another way."""

import importlib
import inspect
import re
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from vitline.flows.on_prefect.prefect_private import LAST_LINE, RUN_LOG
from vitline.infra.mlflow.mlflow_private import server_environment

ROOT = Path(__file__).parents[1]
NAMES = {
    "ray._private.state": (
        "state.get_max_resources_from_cluster_config",
        "state.get_draining_nodes",
        "state.available_resources_per_node",
    ),
    "ray.train.v2._internal.exceptions": ("WorkerGroupStartupTimeoutError",),
    "ray.train.v2._internal.execution.callback": ("ControllerCallback.after_controller_state_update",),
    "ray.train.v2._internal.execution.controller.state": ("SchedulingState", "RunningState", "ReschedulingState"),
    "ray.train.v2._internal.execution.scaling_policy": (
        "NoopDecision",
        "ResizeDecision",
        "FixedScalingPolicy.after_controller_start",
        "FixedScalingPolicy.make_decision_for_non_running_worker_group",
        "FixedScalingPolicy.make_decision_for_running_worker_group",
        "FixedScalingPolicy._maybe_send_resource_request",
    ),
    "ray.train.v2.api.config": ("ScalingConfig._resources_per_worker_not_none",),
    "ray.train.torch": ("TorchTrainer._create_default_callbacks", "TorchTrainer._initialize_and_run_controller"),
    "ray._private.services": ("get_node", "start_raylet"),
    "ray._raylet": ("persist_port",),
    "ray.scripts.scripts": ("main",),
    "coolname.data": ("config",),
    "prefect.cli": ("app",),
    "prefect.engine": ("__name__",),
    "prefect.logging.handlers": ("Console.on_broken_pipe",),  # that of rich, which can outlive its pipe
    "prefect.server.database.configurations": ("SQLITE_BEGIN_MODE.get", "AioSqliteConfiguration.begin_sqlite_stmt"),
    "prefect.server.schemas.schedules": ("SCHEDULE_TYPES", "CronSchedule.get_dates", "IntervalSchedule.get_dates"),
    "prefect.utilities.engine": ("engine_logger",),
    "prefect.workers.process": ("ProcessWorker.run", "ProcessJobConfiguration.prepare_for_flow_run"),
    "mlflow.server": (
        "BACKEND_STORE_URI_ENV_VAR",
        "ARTIFACT_ROOT_ENV_VAR",
        "ARTIFACTS_DESTINATION_ENV_VAR",
        "SERVE_ARTIFACTS_ENV_VAR",
    ),
    "mlflow.server.fastapi_app": ("app",),
    "mlflow.server.handlers": ("initialize_backend_stores",),
}
TEXTS = {
    "prefect.flow_engine": f'f"{LAST_LINE} {{',
    "prefect.logging.loggers": f'get_logger("{RUN_LOG}")',
    "prefect.utilities.engine": 'get_logger("engine")',
    "prefect.utilities.names": "coolname.generate(",
}
ADAPTERS = {
    r"ray\._|ray\.train\.v2|from ray import _|ray\.scripts": {"vit/ray_jobs/ray_private.py", "infra/local/ray_node.py"},
    r"prefect\._|prefect\.(server|utilities|cli|engine|flow_engine)\b|coolname|prefect\.flow_runs|Finished in state": {
        "flows/on_prefect/prefect_private.py"
    },
    r"mlflow\.server\b|from mlflow import server|_MLFLOW_SERVER_|mlflow\.(sharedViewState|experimentKind)|workflowType": {
        "infra/mlflow/mlflow_private.py"
    },
}


def beside(module):
    package = module.partition(".")[0]
    return f"{module} of {package} {version(package)}"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_packages_have_what_vitline_needs(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{beside(module)} has no {name}"
        found = getattr(found, part)


@pytest.mark.parametrize(("module", "text"), TEXTS.items())
def test_prefect_logs_and_names_as_flows_expect(module, text):
    assert text in inspect.getsource(importlib.import_module(module)), f"{beside(module)} no longer contains {text}"


def test_mlflow_reads_the_variables_that_the_stack_sets():
    read = {getattr(importlib.import_module("mlflow.server"), name) for name in NAMES["mlflow.server"]}
    assert read == server_environment("", "").keys()


@pytest.mark.parametrize("name", ["mlflow.sharedViewState", "workflowType"])
def test_the_pages_of_mlflow_know_what_views_and_links_contain(name):
    scripts = (
        Path(str(distribution("mlflow").locate_file("mlflow"))).joinpath("server/js/build/static/js").rglob("*.js")
    )
    assert any(name in path.read_text("utf-8") for path in scripts), f"the pages of {version('mlflow')} have no {name}"


@pytest.mark.parametrize(("pattern", "adapters"), ADAPTERS.items())
def test_only_its_adapters_use_such_names(pattern, adapters):
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("flows", "vit", "data_prep", "infra")
        for path in (ROOT / room).rglob("*.py")
        if re.search(pattern, path.read_text("utf-8"))
    }
    assert users == adapters
