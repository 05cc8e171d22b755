"""`vitline.toml`: where it is found, what wins over it, and what it may not say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitline.infra.local.access.mutual_tls import make_certificates
from vitline.infra.local.running_stack import local_store
from vitline.infra.settings import KEYS, Settings, join_environment, variables_of
from vitline.infra.settings_file import SETTINGS_FILE, file_variables, find_file, use_settings_file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in a repository, without any setting in the environment."""
    for field in Settings.model_fields:
        for name in variables_of(field):
            monkeypatch.setenv(name, "")  # counts as absent, and what a test sets is undone
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    inner = tmp_path / "repository" / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    return inner


def write(folder: Path, text: str) -> Path:
    (folder / SETTINGS_FILE).write_text(text)
    return folder / SETTINGS_FILE


def test_the_nearest_file_up_to_the_repository_or_home_folder_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = write(folder.parent.parent, "")
    assert find_file(folder) is None
    outer = write(folder.parent, "")
    assert find_file(folder) == outer
    inner = write(folder, "")
    assert find_file(folder) == inner
    inner.unlink()
    monkeypatch.setenv("HOME", str(folder))
    assert find_file(folder) is None
    (folder.parent / ".git").rmdir()
    monkeypatch.setenv("HOME", str(folder.parent.parent))
    outer.unlink()
    assert find_file(folder) == beyond


def test_a_found_file_of_another_user_is_left_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder, 'root = "planted"')
    os.chown(path, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert file_variables() == ({}, "")
    assert f"{path} is of another user and was not read; VITLINE_CONFIG={path} names it." in capsys.readouterr().err


def test_a_value_has_the_effect_of_its_variable_and_the_environment_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder.parent, 'root = "store"\ns3_endpoint_url = "http://s3:9000"\ns3_region = "eu"\nproject = "birds"\n')
    monkeypatch.setenv("VITLINE_PROJECT", "city")
    monkeypatch.setenv("AWS_REGION", "us")
    use_settings_file()
    found = Settings()
    assert (found.root, found.project, found.s3_region) == (f"{folder.parent}/store", "city", "us")
    assert os.environ["AWS_ENDPOINT_URL"] == "http://s3:9000"  # for libraries, and for children
    assert not os.environ["AWS_DEFAULT_REGION"]
    assert Settings(root="given").root == "given"
    path = str(folder.parent / SETTINGS_FILE)
    assert found.sources == {
        "root": path,
        "project": "VITLINE_PROJECT",
        "s3_endpoint_url": path,
        "s3_region": "AWS_REGION",
    }
    assert Settings(root="given").sources["root"] == "the command"


def test_a_server_of_the_file_gets_the_login_of_the_environment_and_another_does_not_get_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 'mlflow_tracking_uri = "http://mlflow:5000"\nmlflow_tracking_username = "ada"\n')
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    use_settings_file()
    assert Settings().mlflow_login() == "ada:secret"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:5000")
    use_settings_file()
    assert Settings().mlflow_tracking_username is None


def test_a_named_file_is_read_from_anywhere_and_a_missing_one_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = folder.parent.parent / "named.toml"
    named.write_text('recipe_packages = ["birds", "nets"]\njob_python = "/opt/python"\n')
    monkeypatch.setenv("VITLINE_CONFIG", str(named))
    write(folder, 'project = "found"')
    assert file_variables() == (
        {"VITLINE_RECIPE_PACKAGES": "birds,nets", "VITLINE_JOB_PYTHON": "/opt/python"},
        str(named),
    )
    named.unlink()
    with pytest.raises(ValueError, match=r"/named\.toml cannot be read \(No such file .*VITLINE_CONFIG"):
        file_variables()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('\nmlflow_tracking_url = "x"', "line 2: 'mlflow_tracking_url' is no setting; .* Did you mean 'mlflow_tracking_uri'"),
        ('[ray]\naddress = "x"', "line 1: 'ray' is no setting"),
        ('config = "x"', "'config' is no setting"),
        ('time_left_s = "1"', "'time_left_s' is no setting"),
        ('prefect_api_key = "x"', "line 1: prefect_api_key is a secret, .* Set PREFECT_API_KEY in the environment"),
        ('ray_auth_token = "x"', "RAY_AUTH_TOKEN in the environment, or name a file .* by ray_auth_token_path"),
        ('mlflow_tracking_uri = "https://ada:secret@mlflow"', "mlflow_tracking_uri has a user or password in the address"),
        ('prefect_api_url = "prefect:4200"', "line 1: prefect_api_url is prefect:4200, but an address begins with http"),
        ('node_labels = "birds"', "line 1: node_labels is 'birds', and 'birds' in it is no NAME=VALUE"),
        ("project = 3", "project is 3, but must be a text in quotes"),
        ('job_python = "/x/python"', "job_python decides which code runs, .* Set VITLINE_JOB_PYTHON, or VITLINE_CONFIG="),
        ('root = "a"\nroot = "b"', "is not TOML: Cannot overwrite a value"),
        ('root = "$HOME/store"', "with the quotes or variables of a shell"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line(folder: Path, text: str, problem: str) -> None:
    path = write(folder, text)
    with pytest.raises(ValueError, match=f"^{path}.*{problem}"):
        file_variables()
    assert "secret" not in os.environ.get("MLFLOW_TRACKING_URI", "")


def test_a_file_may_name_each_setting_that_a_person_sets_and_no_secret() -> None:
    assert {"root", "home", "project", "ray_address", "mlflow_tracking_uri", "prefect_api_url"} <= KEYS
    assert not [key for key in KEYS if key.endswith(("password", "token", "key", "auth_string"))]


def test_a_command_uses_the_file_and_refuses_a_wrong_one_in_a_sentence(folder: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vitline.flows.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    write(folder, 'root = "here"\n')
    assert f"no corpus 'nope' below {folder}/here" in run("data", "show", "nope").stderr
    write(folder, 'rot = "here"\n')
    done = run("data", "ls")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {folder}/{SETTINGS_FILE}, line 1: 'rot' is no setting")
    assert run("data", "ls", "--help").returncode == 0


def test_python_code_that_loads_a_model_uses_the_file(folder: Path) -> None:
    write(folder.parent, 'root = "store"\n')
    with local_store() as (root, _):
        assert root == f"{folder.parent}/store"
    assert not os.environ["VITLINE_ROOT"]


def test_a_worker_reads_the_file_although_it_has_imported_prefect(folder: Path) -> None:
    authority = make_certificates(folder)[0]
    write(folder, f'prefect_api_url = "http://prefect:4200/api"\nca = "{authority.name}"\n')
    program = """
import asyncio, sys
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_SSL_CERT_FILE
from vitline.flows.on_prefect import worker
async def serve(worker, with_healthcheck):
    print(get_client().api_url)
    print(PREFECT_API_SSL_CERT_FILE.value())
worker.serve = serve
sys.argv[1:] = ["--pool", "vitline", "--name", "w"]
worker.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    url, trusted, *_ = done.stdout.splitlines()
    assert url == "http://prefect:4200/api/", done.stderr
    assert authority.read_text() in Path(trusted).read_text()


def test_what_was_joined_is_a_source_only_as_long_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    join_environment({"RAY_ADDRESS": "http://127.0.0.1:8265"}, source="the local stack")
    assert Settings().sources == {"ray_address": "the local stack"}
    monkeypatch.setenv("RAY_ADDRESS", "http://ray:8265")
    assert Settings().sources == {"ray_address": "RAY_ADDRESS"}
