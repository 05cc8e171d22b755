"""Secrets stay in the environment of processes: every record that a pipeline leaves behind is searched for them."""

import base64
import contextlib
import json
import sqlite3
import urllib.parse

import psutil
import pytest

from vitline.infra.children import processes_with
from vitline.infra.local.stack_config import OWNER_VARIABLE, load_stack_config
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.storage import open_store


@pytest.fixture
def secrets(stack, planted) -> dict[str, str]:
    """Those of the stack itself, and what the shell that started it held."""
    # An access key's id is no secret: it stands in every signed request, and S3 servers log it.
    found = {name: stack.env[name] for name in ("AWS_SECRET_ACCESS_KEY",) if name in stack.env}
    return found | planted | {"ray-token": (stack.directory / "ray-token").read_text().strip()}


def forms_of(secret: str) -> list[bytes]:
    """As it is, as in a URL, as in a header of HTTP."""
    return [
        secret.encode(),
        urllib.parse.quote(secret, safe="").encode(),
        base64.b64encode(secret.encode()).rstrip(b"="),
    ]


def test_processes_have_secrets_in_their_environment_and_nowhere_else(stack, planted):
    processes = processes_with(OWNER_VARIABLE, load_stack_config(stack.directory).id)
    words, environments = [], []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # workers of Ray end by themselves
            words += process.cmdline()
            environments.append(process.environ())
    assert len(environments) > 5
    assert "mlflow" in " ".join(words)
    for name, value in planted.items():
        assert any(environment.get(name) == value for environment in environments)
        assert value not in " ".join(words)


def test_no_record_of_a_pipeline_holds_a_secret(stack, pipelines, in_stack, secrets):
    root, config = open_store(in_stack.root), load_stack_config(stack.directory)
    records = {}
    for key in root.list(""):
        with contextlib.suppress(FileNotFoundError):  # the sender deletes what it has sent
            records[f"store: {key}"] = root.read(key)
    jobs = RayJobs(in_stack.ray_address)
    for job in jobs.list():
        records[f"job: {job.id}"] = json.dumps(job.metadata).encode() + jobs.logs(job.id).encode()
    for database in ("mlflow/mlflow.db", "prefect/prefect.db"):
        with sqlite3.connect(stack.directory / database, timeout=240) as connection:
            records[database] = "\n".join(connection.iterdump()).encode()
    for folder in (stack.log_dir, config.folder):
        records |= {
            str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
        }
    assert pipelines.record.key.encode() in records["prefect/prefect.db"]
    assert pipelines.record.key.encode() in records["mlflow/mlflow.db"]
    assert any(".log" in name for name in records)
    found = [
        f"{name} of {secret}"
        for secret, value in secrets.items()
        for name, data in records.items()
        if any(form in data for form in forms_of(value))
    ]
    assert found == []
