"""Settings are read from the documented environment variables, not from others that are named like a field."""

import pwd
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitline.flows.on_prefect.alerts.automations import ALERTS
from vitline.flows.on_prefect.deployments import deployment_named
from vitline.flows.to_mlflow.send_run import registered_name
from vitline.infra.settings import Settings, join_environment, user_at_host
from vitline.infra.storage import open_store


def test_only_documented_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:  # $HOME is on every machine, $ROOT on some
        monkeypatch.setenv(name.upper(), "http://somewhere/else")
    documented = ("VITLINE_ROOT", "VITLINE_HOME", "RAY_ADDRESS", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI")
    for name in ("VITLINE_ROOT", "VITLINE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert (Settings().root, Settings().home) == (f"{tmp_path}/.vitline/store", None)
    for name in documented:
        monkeypatch.setenv(name, "http://given" if name.endswith(("URL", "URI")) else "/given")
    read = Settings()
    assert (read.root, read.home, read.ray_address) == ("/given", Path("/given"), "/given")
    assert read.mlflow_tracking_uri == "http://given"


PATHS = {"VITLINE_ROOT": "root", "VITLINE_HOME": "home"}
PATHS |= {"RAY_AUTH_TOKEN_PATH": "ray_auth_token_path", "VITLINE_JOB_PYTHON": "job_python"}


@pytest.mark.parametrize("name", PATHS)
def test_no_folder_is_named_like_what_only_a_shell_replaces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv(name, "~/place")
    assert str(getattr(Settings(), PATHS[name])) == "/home/ada/place"
    for value in ("~nobody-of-this-name/place", "$HOME/place", '"/place"'):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"^{name}.*rite the (whole )?path"):
            Settings()


def test_a_root_or_store_below_the_home_folder_is_found_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert Settings(root="~/store").root == "/home/ada/store"
    assert {open_store(uri).uri for uri in ("~/store", "file://~/store")} == {"file:///home/ada/store"}


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 54321"), OSError("No username set")])
def test_a_user_id_without_a_name_is_recorded_as_a_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def unknown(uid: int) -> None:
        raise error

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert user_at_host() == f"uid-54321@{socket.gethostname()}"


def test_a_project_names_what_several_roots_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLINE_PROJECT", raising=False)
    assert (Settings().project, Settings().named("icons")) == ("vitline", "icons")
    monkeypatch.setenv("VITLINE_PROJECT", "birds")
    deployment = deployment_named("pretrain/birds-default")
    assert (deployment.tags[0], deployment.name) == ("birds", "default")
    assert ALERTS[0].name == "birds: a run failed"
    assert registered_name("s3://store/models/icons/1") == "birds-icons"
    monkeypatch.setenv("VITLINE_PROJECT", "Birds/2")
    with pytest.raises(ValueError, match=r"VITLINE_PROJECT='Birds/2' cannot name a project\. Use up to 40 characters"):
        Settings()


def test_labels_of_nodes_are_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLINE_NODE_LABELS", "pool=birds, ray.io/accelerator-type=H100")
    assert Settings().node_labels == {"pool": "birds", "ray.io/accelerator-type": "H100"}
    assert Settings().node_labels_text() == "pool=birds,ray.io/accelerator-type=H100"
    monkeypatch.setenv("VITLINE_NODE_LABELS", "pool=birds,zone")
    with pytest.raises(
        ValueError, match=r"VITLINE_NODE_LABELS is 'pool=birds,zone', and 'zone' in it is no NAME=VALUE\. Write"
    ):
        Settings()


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
