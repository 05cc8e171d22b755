"""The MLflow server of the local stack without its settings; with them it runs in `local/test_stack.py` and `test_stack_access.py`."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_server_whose_mlflow_reads_other_variables_does_not_start():
    """It would keep its runs in another database than that of the stack."""
    env = {"_MLFLOW_SERVER_FILE_STORE": "sqlite://", "MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}
    ended = subprocess.run(
        [sys.executable, "-m", "vitline.infra.local.access.mlflow_server", "--port=1"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    wanted = "_MLFLOW_SERVER_ARTIFACT_DESTINATION, _MLFLOW_SERVER_ARTIFACT_ROOT, _MLFLOW_SERVER_SERVE_ARTIFACTS"
    assert f"reads {wanted}, which infra/mlflow/mlflow_private.py does not set" in ended.stderr
