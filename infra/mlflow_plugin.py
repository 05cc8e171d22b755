"""An MLflow plugin that adds no request header, but makes `uvicorn` findable. Every MLflow process here loads it.

`mlflow models serve` starts `uvicorn` by its bare name, which is not found if `.venv/bin/mlflow` was called by its path.
MLflow has no setting for it, and no other code of vitline runs in that process.
"""

from vitline.infra.settings import reach_programs_beside_python


class ProgramsBesidePython:
    """A request header provider (entry point `mlflow.request_header_provider`)."""

    def __init__(self) -> None:
        reach_programs_beside_python("uvicorn")

    def in_context(self) -> bool:
        return False

    def request_headers(self) -> dict[str, str]:
        return {}
