"""Loaded by every MLflow process of this installation, as a plugin that adds no header to any request.

`mlflow models serve` starts `uvicorn` by its bare name, which a shell that called `.venv/bin/mlflow` by its path does not
find. MLflow has no setting for it, and no other code of ours runs in that process.
"""

from infra.settings import reach_programs_beside_python


class ProgramsBesidePython:
    """A request header provider (entry point `mlflow.request_header_provider`)."""

    def __init__(self) -> None:
        reach_programs_beside_python("uvicorn")

    def in_context(self) -> bool:
        return False

    def request_headers(self) -> dict[str, str]:
        return {}
