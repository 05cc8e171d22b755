"""Settings are read from the documented environment variables, not from others that are named like a field."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from vitline.infra.settings import Settings, join_environment


def test_only_documented_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:  # $HOME is on every machine, $ROOT on some
        monkeypatch.setenv(name.upper(), "/somewhere/else")
    documented = ("VITLINE_ROOT", "VITLINE_HOME", "RAY_ADDRESS", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI")
    for name in ("VITLINE_ROOT", "VITLINE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert (Settings().root, Settings().home) == (f"{tmp_path}/.vitline/store", None)
    for name in documented:
        monkeypatch.setenv(name, "/given")
    read = Settings()
    assert (read.root, read.home, read.ray_address) == ("/given", Path("/given"), "/given")
    assert read.mlflow_tracking_uri == "/given"


OURS = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000", "MLFLOW_TRACKING_USERNAME": "vitline"}
OURS |= {"PREFECT_API_URL": "http://127.0.0.1:4200/api", "PREFECT_API_AUTH_STRING": "vitline:secret"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr("vitline.infra.settings.os", SimpleNamespace(environ=environ))
    return environ


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:5000",
        "http://localhost:5000/",
        "http://127.0.0.1:5000",
        "http://127.0.0.1:5000/",
        "http://LocalHost:5000",
    ],
)
def test_a_server_gets_its_login_under_each_name_of_this_machine(environ: dict[str, str], address: str) -> None:
    environ.update(MLFLOW_TRACKING_URI=address, PREFECT_API_URL="http://localhost:4200/api")
    join_environment(OURS)
    assert environ == OURS  # at the address where the stack listens: another program may listen on [::1]


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:5001",
        "https://localhost:5000",
        "http://localhost.example:5000",
        "http://localhost@evil.example:5000",
        "http://[::1]:5000",
        "http://[",
        "http://localhost:port",
        "http://localhost:5000/other",
        "databricks",
    ],
)
def test_another_server_gets_no_login(environ: dict[str, str], address: str) -> None:
    environ["MLFLOW_TRACKING_URI"] = address
    join_environment(OURS)
    assert environ["MLFLOW_TRACKING_URI"] == address
    assert "MLFLOW_TRACKING_USERNAME" not in environ
    assert environ["PREFECT_API_AUTH_STRING"] == "vitline:secret"
