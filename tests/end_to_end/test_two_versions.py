"""A new version of vitline beside a training of the old one, as the guide of own clusters describes it (section 9): with an installation,
a Ray, a work pool and a worker of its own, on the same store, Prefect and MLflow."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

import vitline
from vitline.infra.children import child_environment
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.runs.run_state import read_state
from vitline.vit.run.run_spec import read_starts

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
NEW = "99.0"
POOL = "vitline-2"


class Installed:
    """A version of vitline: the environment of its commands, and the job server of its Ray."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.jobs = RayJobs(env["RAY_ADDRESS"], token_path=env["RAY_AUTH_TOKEN_PATH"])

    def call(self, *command: str) -> str:
        """What a command of vitline says."""
        called = [sys.executable, "-P", "-m", "vitline.flows.cli.main", *command]
        done = subprocess.run(called, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def old(stack) -> Installed:
    """The version of the stack."""
    return Installed(child_environment(stack.env))


@pytest.fixture
def new(stack, old, flows, tmp_path, monkeypatch) -> Iterator[Installed]:
    """This code, installed elsewhere under another number, with a Ray of one CPU, a work pool and a worker. At the end the old version has
    the deployments again."""
    path = str(installed_as(NEW, tmp_path / "new"))
    with contextlib.ExitStack() as services:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            ray = services.enter_context(LocalRay(tmp_path / "logs", num_cpus=1))
        env = child_environment(stack.env | ray.env | {"PYTHONPATH": path})
        services.enter_context(flows.pool(POOL, env, stack.log_dir / "worker-of-new.log"))
        services.callback(old.call, "flows", "deploy", "--pool", "vitline")
        yield Installed(env)


def installed_as(number: str, folder: Path) -> Path:
    """A folder for PYTHONPATH with the package and its metadata."""
    metadata = folder / f"vitline-{number}.dist-info"
    metadata.mkdir(parents=True)
    (folder / "vitline").symlink_to(Path(vitline.__file__).parent)
    for name in ("METADATA", "entry_points.txt"):
        text = distribution("vitline").read_text(name) or ""
        (metadata / name).write_text(re.sub(r"^Version: .*$", f"Version: {number}", text, flags=re.MULTILINE))
    return folder


def test_a_new_version_works_beside_a_training_of_the_old_one(work, old, new):
    of_old = work.pretrain("of-the-old", 100)
    key_of_old = work.key(of_old)
    work.reach(key_of_old, 5)
    with work.frozen_training():
        said = new.call("flows", "deploy", "--pool", POOL)
        assert re.search(f"pretrain/default: updated: .*work pool vitline -> {POOL}", said), said
        of_new = work.pretrain("of-the-new", 20)
        work.flows.completes(of_new)
        (job,) = new.jobs.list({"flow_run_id": of_new})
        key_of_new = job.metadata["run_key"]
        work.eventually(lambda: work.mlflow_status(key_of_new) == "FINISHED")
        new.call("ops", "reconcile")
        assert read_state(work.run(key_of_old))["state"] == "running"
    work.flows.completes(of_old)
    work.eventually(lambda: work.mlflow_status(key_of_old) == "FINISHED")
    ran = [[start["versions"]["vitline"] for start in read_starts(work.run(key))] for key in (key_of_old, key_of_new)]
    assert ran == [[distribution("vitline").version], [NEW]]
