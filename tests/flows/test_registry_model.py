"""The model in MLflow's registry: loaded by MLflow in a process without vitline's settings, and served."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow.parquet as parquet
import pytest
import torch
from mlflow import MlflowClient
from pyarrow import BufferReader
from typer.testing import CliRunner

from vitline.flows.catalog.lists import find_model
from vitline.flows.catalog.records import PipelineRecord, StageRecord, list_run_keys, read_pipeline, write_pipeline
from vitline.flows.cli.main import app
from vitline.flows.nights.night_record import THE_GATE
from vitline.flows.nights.promote import make_champion
from vitline.flows.to_mlflow.child import sync_runs
from vitline.infra.local.processes import free_ports
from vitline.infra.runs.run_state import read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.published.models import load_model

from ..servers.stack import send_everything
from ..trainings import finish

LOAD = """
import base64, json, sys
import mlflow.pyfunc, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
image = base64.b64decode(sys.stdin.read())
print(json.dumps({
    "answers": model.predict(pandas.DataFrame({"image": [image, image]})),
    "example": model.predict(model.input_example),
    "inputs": model.metadata.signature.inputs.to_dict(),
}))
"""


class Candidate(NamedTuple):
    """A version in the registry, and the published model that it points to."""

    client: MlflowClient
    name: str
    model: str


@pytest.fixture
def candidate(stack, s3_uri, train_config):
    """A finished training in the object store of the stack that was sent to its MLflow."""
    torch.set_num_threads(1)
    config = train_config(f"t-{uuid.uuid4().hex[:8]}")
    run, uri = finish(config, s3_uri), stack.env["MLFLOW_TRACKING_URI"]
    assert [*send_everything(s3_uri, uri).values()] == ["sent"]
    return Candidate(MlflowClient(uri, uri), config.name, read_state(run)["model"])


@pytest.fixture
def picture(digits) -> bytes:
    """One of the pictures that the model was trained on."""
    shard = next(key for key in digits.list("train/") if key.endswith(".parquet"))
    return parquet.read_table(BufferReader(digits.read(shard)), columns=["image"])["image"][0]["bytes"].as_py()


def shell(stack) -> dict[str, str]:
    """The environment of a new shell with the address and login of MLflow and the folder of the stack, without the
    credentials of the store and without this installation on PATH."""
    known = {"PATH": "/usr/bin:/bin", "VITLINE_HOME": str(stack.directory.parent), "HOME": os.environ.get("HOME", "/")}
    return known | {name: value for name, value in stack.env.items() if name.startswith("MLFLOW_TRACKING_")}


def test_the_candidate_loads_as_a_pyfunc_in_another_process(stack, candidate, picture, tmp_path):
    uri = f"models:/{candidate.name}@candidate"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, uri], input=base64.b64encode(picture).decode(), text=True, capture_output=True,
        env=shell(stack), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    first, second = output["answers"]
    assert first["classes"] == second["classes"]  # rows of one batch may differ by rounding
    assert first["probabilities"] == pytest.approx(second["probabilities"], rel=1e-5)
    known = load_model(candidate.model).classes
    assert len(first["classes"]) == len(first["probabilities"]) == 5
    assert {*first["classes"]} < {*known}
    assert 0.5 < sum(first["probabilities"]) <= 1
    assert first["probabilities"] == sorted(first["probabilities"], reverse=True)
    assert len(output["example"]) == 1
    assert output["inputs"] == [{"type": "binary", "name": "image", "required": True}]


def test_weights_are_stored_once_and_the_candidate_names_its_rule(candidate):
    version = candidate.client.get_model_version_by_alias(candidate.name, "candidate")
    logged = candidate.client.list_logged_model_artifacts(version.source.removeprefix("models:/"))
    files = {file.path: file.file_size for file in logged}
    assert {"MLmodel", "pointer.json", "card.md", "input_example.json", "requirements.txt"} <= files.keys()
    assert sum(files.values()) < 20_000
    rule = "its training ended last of all versions"
    assert version.tags["vitline.candidate_by"] == rule
    assert version.description.endswith(f"`candidate`, because {rule}")


def test_a_model_is_found_by_its_alias_and_reported(stack, candidate, s3_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stack.env["MLFLOW_TRACKING_URI"])
    messages = []
    name = f"{candidate.name}@candidate"
    assert find_model(s3_uri, name, messages.append) == candidate.model
    assert messages == [f"{name} is {'/'.join(candidate.model.split('/')[-2:])}"]
    with pytest.raises(
        ValueError, match=rf"has no '{candidate.name}@champion'; the models published below .* are: {candidate.name}/"
    ):
        find_model(s3_uri, f"{candidate.name}@champion", messages.append)


def test_a_promotion_gives_the_alias_champion_which_people_may_move(stack, candidate, s3_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stack.env["MLFLOW_TRACKING_URI"])
    monkeypatch.setenv("VITLINE_ROOT", s3_uri)
    root, client, name = open_store(s3_uri), candidate.client, candidate.name
    (run_key,) = [key for key in list_run_keys(root) if key.startswith(name)]
    trained = StageRecord(stage="pretrain", run_key=run_key, reused=False, wall_s=1.0, what="", where="")
    digest = open_store(candidate.model).read_json("config.json")["digest"]
    for number in (1, 2):
        record = PipelineRecord(
            key=f"{name}-{number:012d}", name=name, request={"name": name}, state="finished", started_at=1.0, updated_at=2.0,
            stages=(trained,), model=candidate.model, model_digest=digest,
        )  # fmt: skip
        write_pipeline(root, record)

    def promote(number):
        done = CliRunner().invoke(app, ["model", "promote", f"{name}-{number:012d}", "--reason", f"reason {number}"])
        assert done.exit_code == 0, done.output
        assert "lacks" not in done.output

    promote(1)
    version = client.get_model_version_by_alias(name, "champion")
    assert version.tags["vitline.champion_by"].endswith(": reason 1")
    assert find_model(s3_uri, f"{name}@champion", print) == candidate.model
    client.delete_registered_model_alias(name, "champion")
    report = sync_runs(Settings(), [name])
    assert not report.left
    make_champion(root, read_pipeline(root, f"{name}-{2:012d}"), why="better", by=THE_GATE)
    report = sync_runs(Settings(), [name])
    assert not report.left
    assert "champion" not in client.get_registered_model(name).aliases, "what a person changes in the page stays"
    promote(1)
    version = client.get_model_version_by_alias(name, "champion")
    assert version.tags["vitline.champion_by"].endswith(": reason 1")


@pytest.mark.slow
def test_mlflow_serves_the_candidate_without_this_installation_on_path(stack, candidate, picture, tmp_path):
    (port,) = free_ports(1)
    url, program = f"http://127.0.0.1:{port}", str(Path(sys.executable).parent / "mlflow")
    command = [program, "models", "serve", "-m", f"models:/{candidate.name}@candidate", "--env-manager", "local"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "-h", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log, env=shell(stack), cwd=tmp_path,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not answers(url):
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.5)
        rows = {"dataframe_records": [{"image": base64.b64encode(picture).decode()}]}
        (answer,) = httpx.post(f"{url}/invocations", json=rows, timeout=240).raise_for_status().json()["predictions"]
        assert len(answer["classes"]) == len(answer["probabilities"]) == 5
        nonsense = httpx.post(f"{url}/invocations", json={"dataframe_records": [{"image": "?"}]}, timeout=240)
        assert nonsense.status_code == 400
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(240)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ping", timeout=5).is_success
    except httpx.TransportError:
        return False
