"""A stack that uses an existing store: only the missing services are started, and no second store."""

import os

import pytest

from vitline.infra.local.processes import free_ports
from vitline.infra.local.stack import check_services, find_stack, stack_environment, start_stack, stop_stack
from vitline.infra.local.stack_config import load_stack_config, prepare_stack_config
from vitline.infra.storage import open_store

from ...eventually import eventually

pytestmark = pytest.mark.servers


@pytest.fixture
def start(tmp_path):
    """start(root) starts a stack that uses the store `root` and runs MLflow only, and returns its folder."""
    directory = tmp_path / "stack"
    wanted = dict(zip(("mlflow", "prefect", "ray"), free_ports(3), strict=True))

    def begin(root):
        start_stack(
            directory,
            log_dir=tmp_path / "logs",
            services=("s3", "mlflow"),
            ports=wanted,
            root=root,
            ends_with_caller=True,
            announce=lambda text: None,
        )
        return directory

    yield begin
    stop_stack(directory)


def test_mlflow_stores_its_artifacts_in_the_existing_store(start, s3_uri):
    directory = start(s3_uri)
    assert [service.name for service in find_stack(directory).services] == ["mlflow"]
    eventually(lambda: check_services(directory) == {"mlflow": ""}, awaited="a check that succeeds")
    assert open_store(s3_uri).read("mlflow-artifacts/.stack/probe") == b"vitline"
    env = stack_environment(directory)
    assert (env["VITLINE_ROOT"], env["AWS_ENDPOINT_URL"]) == (s3_uri, os.environ["AWS_ENDPOINT_URL"])
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & env.keys()
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    written = [
        path for folder in (directory, directory.parent / "logs") for path in folder.rglob("*") if path.is_file()
    ]
    assert len(written) > 4
    assert not [path for path in written if secret in path.read_bytes()]


def test_stack_can_use_an_existing_folder_and_refuses_another_store(tmp_path, monkeypatch):
    directory, root = tmp_path / "stack", tmp_path / "data" / "store"
    config, notes = prepare_stack_config(directory, {}, f"file://{root}/")
    assert (config.root, config.artifacts, config.object_store) == (str(root), f"{root}/mlflow-artifacts", False)
    assert f"using the store {root} with the credentials of this environment" in notes
    assert not (directory / "credentials.json").exists()
    monkeypatch.chdir(tmp_path)
    for again in (None, "data/store", str(root)):
        assert prepare_stack_config(directory, {}, again)[0].root == str(root)
    with pytest.raises(
        ValueError, match=r"VITLINE_ROOT is s3://other, but the stack in .* uses .*/data/store.*VITLINE_HOME"
    ):
        prepare_stack_config(directory, {}, "s3://other")
    with pytest.raises(ValueError, match=r"--s3-port=4000: this stack uses .*/data/store and has no s3 of its own"):
        prepare_stack_config(directory, {"s3": 4000}, None)


def test_stack_with_a_store_of_its_own_refuses_another_root(tmp_path, monkeypatch):
    own, _ = prepare_stack_config(tmp_path / "own", {})
    with pytest.raises(
        ValueError, match=r"uses .*, a store of its own, and its runs are stored there. Unset VITLINE_ROOT"
    ):
        prepare_stack_config(tmp_path / "own", {}, str(tmp_path / "other"))
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    assert (
        prepare_stack_config(tmp_path / "own", {}, own.store_root)[0].root is None
    )  # in a shell with this stack's own environment
    assert load_stack_config(tmp_path / "own").object_store == own.object_store
