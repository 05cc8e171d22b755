"""The names of MLflow that it does not promise to keep. If one is gone, this says which, and the stack or its pages need another way."""

import importlib
import re
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from vitline.infra.mlflow.mlflow_private import server_environment

ROOT = Path(__file__).parents[3]
MLFLOW = Path(str(distribution("mlflow").locate_file("mlflow")))

NAMES = {
    "mlflow.server": (
        "BACKEND_STORE_URI_ENV_VAR",
        "ARTIFACT_ROOT_ENV_VAR",
        "ARTIFACTS_DESTINATION_ENV_VAR",
        "SERVE_ARTIFACTS_ENV_VAR",
    ),
    "mlflow.server.fastapi_app": ("app",),
    "mlflow.server.handlers": ("initialize_backend_stores",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_mlflow_has_what_the_server_of_the_local_stack_needs(module, name):
    assert hasattr(importlib.import_module(module), name), f"{module} of MLflow {version('mlflow')} has no {name}"


def test_mlflow_reads_the_variables_that_the_stack_sets():
    read = {getattr(importlib.import_module("mlflow.server"), name) for name in NAMES["mlflow.server"]}
    assert read == server_environment("", "").keys()


@pytest.mark.parametrize("name", ["mlflow.sharedViewState", "workflowType"])
def test_the_pages_of_mlflow_know_what_views_and_links_contain(name):
    scripts = (MLFLOW / "server/js/build/static/js").rglob("*.js")
    assert any(name in path.read_text("utf-8") for path in scripts), (
        f"the pages of MLflow {version('mlflow')} have no {name}"
    )


def test_one_file_uses_such_names():
    private = r"mlflow\.server\b|from mlflow import server|_MLFLOW_SERVER_|mlflow\.(sharedViewState|experimentKind)|workflowType"
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("flows", "vit", "data_prep", "infra")
        for path in (ROOT / room).rglob("*.py")
        if re.search(private, path.read_text("utf-8"))
    }
    assert users == {"infra/mlflow/mlflow_private.py"}
