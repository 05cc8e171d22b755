"""What vitline needs of MLflow that MLflow does not promise to keep. No other file uses such names.

pyproject.toml bounds the versions, and tests/infra/mlflow/test_mlflow_private.py names what another version lacks. MLflow is imported
inside, because pages and settings need no more of it than names.
"""

from collections.abc import Mapping
from typing import Any

VIEW_TAG = "mlflow.sharedViewState."
"""With a key behind it the tag of an experiment that holds a saved view."""

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""For pages of MLflow that read the tag; those of 3.17 go by the address alone."""

TRAINING_PAGES = "?workflowType=machine_learning"
"""Without it MLflow's pages show every experiment as one of a chat model, with other menus. The pages of MLflow 3.17 read no tag for
this, and go back to the choice of the browser where a link of their own leaves it out."""


def server_environment(database: str, artifacts: str) -> dict[str, str]:
    """The variables by which `mlflow server` hands its options over to the process that serves. MLflow reads them while it is loaded;
    `server_app` checks that it does."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": artifacts,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }


def server_app(given: Mapping[str, str]) -> Any:
    """MLflow's own web application, with its database opened now and not at the first request.

    `given` is the environment. Raises RuntimeError where this MLflow reads its settings from other variables, and what MLflow raises
    for a database that it cannot use.
    """
    import mlflow
    from mlflow import server
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    names: Any = server  # names that MLflow does not export for type checkers
    needed = {
        names.BACKEND_STORE_URI_ENV_VAR,
        names.ARTIFACT_ROOT_ENV_VAR,
        names.ARTIFACTS_DESTINATION_ENV_VAR,
        names.SERVE_ARTIFACTS_ENV_VAR,
    }
    if missing := needed - given.keys():
        raise RuntimeError(
            f"MLflow {mlflow.__version__} reads {', '.join(sorted(missing))}, which infra/mlflow/mlflow_private.py does not set. "
            "Install the version of requirements.lock: make install."
        )
    database = given[names.BACKEND_STORE_URI_ENV_VAR]
    initialize_backend_stores(database, database, given[names.ARTIFACT_ROOT_ENV_VAR])
    return app
