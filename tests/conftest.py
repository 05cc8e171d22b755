"""What several rooms test with: real small corpora, prepared once per test run, and a config to train on them."""

import contextlib
import os
import secrets
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from data_prep.corpora import presets
from data_prep.find_corpus import corpus_store
from data_prep.prepare import prepare
from flows.catalog import list_pipelines
from flows.records import PipelineRecord
from infra.local.processes import free_ports
from infra.local.ray_node import LocalRay
from infra.local.stack import stack_environment, start_stack, stop_stack
from infra.ray_jobs import RayJobs
from infra.settings import NO_TELEMETRY, Settings, join_environment
from infra.storage import Store, open_store
from vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe
from vit.input.config import AugmentConfig, InputConfig
from vit.models.config import ViTConfig

join_environment(NO_TELEMETRY)  # before a test module imports what reports home

# Parts of module names, by what a module starts; the first that fits counts.
_OWN_RAY = ("test_kills", "_on_ray", "test_ray_node", "test_interchange")
_STACK = ("end_to_end/", "flows/", "infra/", "test_class_folders")


def company(nodeid: str) -> str:
    """Which tests a test shares a process with: those that use the stack, those that start only a Ray of their own, or
    its module."""
    module = nodeid.partition("::")[0]
    for name, parts in {"own ray": _OWN_RAY, "stack": _STACK}.items():
        if any(part in module for part in parts):
            return name
    return module


def pytest_addoption(parser):
    parser.addoption(
        "--other-rounding", action="store_true", help="Round matrix products otherwise, as another processor does."
    )


@pytest.fixture(autouse=True, scope="session")
def as_on_another_processor(request):
    """With `--other-rounding`: what compares digits that another processor computes otherwise fails here, too."""
    if not request.config.getoption("--other-rounding"):
        yield
        return
    from .other_rounding import other_rounding

    with other_rounding():
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    """Whoever asks for the stack or a Ray gets the marker `servers`; what takes longest begins first."""
    for item in items:
        if {"stack", "s3_uri", "ray_jobs"} & {*item.fixturenames} or item.get_closest_marker("s3"):
            item.add_marker("servers")
    items.sort(key=lambda item: ("stack", "own ray", company(item.nodeid)).index(company(item.nodeid)))


def pytest_xdist_make_scheduler(config, log):
    """Companies are dealt to the processes whole: the stack is started once, and at most one other Ray runs beside it.
    (xdist's own groups do nothing under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Companies(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return company(nodeid)

    return Companies(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory) -> str:
    """A root that holds the scikit-learn digits as a task corpus; read only."""
    root = str(tmp_path_factory.mktemp("digits"))
    prepare([presets.digits()], root)
    return root


@pytest.fixture(scope="session")
def digits(digits_root) -> Store:
    """The digits corpus."""
    return corpus_store(open_store(digits_root), presets.digits())


@pytest.fixture
def train_config(digits):
    """train_config(name, workers, steps): a network that takes milliseconds a step, with dropout and decay."""

    def make(name: str, workers: int = 1, steps: int = 20, **execution) -> TrainConfig:
        return TrainConfig(
            name=name,
            corpus=digits.uri,
            val_split="val",
            recipe=TrainRecipe(
                model=ViTConfig(
                    image_size_px=16, patch_size_px=8, embed_dim=32, depth=2, num_heads=2, mlp_dim=64, dropout_rate=0.1
                ),
                input=InputConfig(global_batch_size=16, num_lanes=4, augment=AugmentConfig(image_size_px=16)),
                optim=OptimConfig(warmup_steps=2, weight_decay=0.1),
                total_steps=steps,
            ),
            execution=ExecutionConfig(
                **{
                    "num_workers": workers,
                    "micro_batch_size": 8,
                    "save_every_steps": 10,
                    "log_every_steps": 1,
                    "inspect_images": 0,
                    **execution,
                }
            ),
        )

    return make


@pytest.fixture
def root(tmp_path: Path) -> str:
    """An empty root on this machine's disk."""
    return str(tmp_path / "store")


@pytest.fixture(scope="module")
def ray_jobs(tmp_path_factory):
    """The jobs of a Ray of two cores, which is the module's own."""
    with LocalRay(tmp_path_factory.mktemp("ray"), num_cpus=2, object_store_bytes=150_000_000) as ray:
        yield RayJobs(ray.address, token_path=ray.env["RAY_AUTH_TOKEN_PATH"])


@pytest.fixture
def until(ray_jobs):
    """until(condition, job): waits for it, as long as the job has not ended."""

    def wait(condition, job):
        deadline = time.monotonic() + 300
        while not condition():
            state = ray_jobs.find(job)
            assert not state.terminal, f"{state}\n{ray_jobs.logs(job)}"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait


@pytest.fixture
def processes():
    """processes(word, ...): ours (descendants of this test) whose command line has all the words."""

    def find(*words):
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    return find


@pytest.fixture(scope="session", autouse=True)
def no_stack_of_this_folder(tmp_path_factory):
    """Commands under test do not join the stack that may be up in the folder where the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITLINE_ROOT", str(tmp_path_factory.mktemp("unused") / "store"))
        yield


class RunningStack(NamedTuple):
    """The servers of this test run: where they keep their things, and what a process needs to use them."""

    directory: Path
    log_dir: Path
    env: dict[str, str]


@pytest.fixture(scope="session")
def planted() -> dict[str, str]:
    """Secrets that people have in their shells, and that must not get into any record."""
    return {name: f"planted-{secrets.token_hex(12)}" for name in ("HF_TOKEN", "GIT_PASSWORD", "WANDB_API_KEY")}


@pytest.fixture(scope="session")
def stack(planted):
    """The whole local stack, real servers all of them, started once for the tests that ask for it."""
    folder = Path(tempfile.mkdtemp(prefix="vl-t-"))
    directory, log_dir = folder / "stack", folder / "logs"
    ports = dict(zip(("s3", "mlflow", "prefect", "ray"), free_ports(4, twin=10_000), strict=True))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in planted.items():
                patch.setenv(name, value)
            start_stack(directory, log_dir=log_dir, ports=ports, num_cpus=2, ends_with_caller=True, announce=print)
        yield RunningStack(directory, log_dir, stack_environment(directory))
    finally:
        stop_stack(directory)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3_uri(request, monkeypatch) -> str:
    """An empty place on a real S3 service, which this test's process and its children can reach: below
    VITLINE_TEST_S3_URI, with the AWS variables, where a service is to be tested; else in the stack's SeaweedFS."""
    uri = os.environ.get("VITLINE_TEST_S3_URI")
    if uri is None:
        env = request.getfixturevalue("stack").env
        uri = env["VITLINE_ROOT"]
        if not uri.startswith("s3://"):
            pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
        for name, value in env.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
    return f"{uri}/{uuid.uuid4().hex}"


class Patient(httpx.HTTPTransport):
    """Asks again after a 503, by which Prefect says that its SQLite was busy; as Prefect's own client does."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for wait_s in (0.2, 0.5, 1, 2, 4):
            response = super().handle_request(request)
            if response.status_code != 503:
                return response
            response.close()
            time.sleep(wait_s)
        return super().handle_request(request)


@pytest.fixture
def http():
    """A client for servers that may be busy."""
    with httpx.Client(timeout=60, transport=Patient(), follow_redirects=True) as client:
        yield client


class FlowRuns:
    """Prefect's API as its UI uses it, with the flows registered; flow runs by their ids."""

    def __init__(self, url: str):
        self.api = httpx.Client(base_url=url, timeout=60, transport=Patient())

    def post(self, deployment: str, parameters: dict, **run) -> httpx.Response:
        """The answer to `create_flow_run`; `run` holds fields of the run itself, such as its name."""
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        return self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters, **run})

    def start(self, deployment: str, **request) -> str:
        return self.post(deployment, {"request": request}).raise_for_status().json()["id"]

    def find(self, run: str) -> dict:
        return self.api.get(f"/flow_runs/{run}").raise_for_status().json()

    def wait(self, run: str, until=lambda found: found["state_type"] in FINAL, timeout_s: float = 600) -> dict:
        """The flow run once it has ended, or once `until` is true of it."""
        deadline = time.monotonic() + timeout_s
        while not until(found := self.find(run)):
            assert time.monotonic() < deadline, f"{found['name']} is {found['state_name']}: {self.lines(run)}"
            time.sleep(0.3)
        return found

    def cancel(self, run: str) -> None:
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.api.post(f"/flow_runs/{run}/set_state", json={"state": state}).raise_for_status()

    def parts(self, run: str) -> list[dict]:
        """Its subflows, as they began."""
        wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC"}
        return self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()

    def lines(self, run: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.api.post("/logs/filter", json=wanted).raise_for_status().json()]

    def artifacts(self, run: str) -> dict[str, dict]:
        """By key; the data of tables and links as text."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [run]}}}
        found = self.api.post("/artifacts/filter", json=wanted).raise_for_status().json()
        return {artifact["key"]: artifact for artifact in found}


FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
# A whole pipeline of a few steps, on digits, in the store of the stack.
TINY = {
    "name": "tiny",
    "corpus": "digits-0-to-4",
    "recipe": "digits",
    "tasks": ["digits-5-to-9"],
    "overrides": {
        "recipe.total_steps": 6,
        "recipe.optim.warmup_steps": 1,
        "execution.save_every_steps": 3,
        "execution.log_every_steps": 1,
        "protocol.total_steps": 3,
        "protocol.warmup_steps": 1,
        "protocol.learning_rates": [0.03, 0.1],
    },
}


@pytest.fixture(scope="session")
def flows(stack) -> FlowRuns:
    """The flows, registered with the stack's Prefect, and `pretrain-then-transfer/tiny` beside them."""
    with environment_of(stack):
        from flows.on_prefect.deployments import PIPELINE, Deployment
        from flows.on_prefect.prefect_observer import client
        from flows.on_prefect.registration import PoolSettings, create, register
        from flows.requests.forms import PipelineRequest

        register(Settings())
        with client() as api:
            create(api, Deployment(PIPELINE, "tiny", PipelineRequest, TINY, "pipeline"), PoolSettings())
    runs = FlowRuns(stack.env["PREFECT_API_URL"])
    # What tests break on purpose is not for a reconciler that happens to come by.
    reconcile = runs.api.get("/deployments/name/reconcile/default").json()
    runs.api.patch(f"/deployments/{reconcile['id']}", json={"paused": True}).raise_for_status()
    return runs


@pytest.fixture
def in_stack(stack, flows):
    """This process, like the flow processes and commands of the stack, uses its servers."""
    with environment_of(stack):
        yield Settings()


@contextlib.contextmanager
def environment_of(stack):
    """The stack's environment, also for a Prefect that was imported before."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.env.items():
            patch.setenv(name, value)
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        yield
    refresh_global_settings_context()


class Pipelines(NamedTuple):
    """Flow runs of the tiny pipeline: two that were started at once, one of them Skipped, and the record of the other."""

    worked: str
    skipped: str
    record: PipelineRecord


@pytest.fixture(scope="session")
def pipelines(flows, stack) -> Pipelines:
    asked = ("pretrain-then-transfer/tiny", {"request": {"name": "twice"}})
    runs = [flows.post(*asked, name="Both at once").raise_for_status().json()["id"] for _ in range(2)]
    ended = {flows.wait(run)["state_name"]: run for run in runs}
    assert ended.keys() == {"Completed", "Skipped"}, [flows.find(run)["state"] for run in runs]
    with environment_of(stack):
        records = {record.origin.flow_run_id: record for record in list_pipelines(Settings().root)}
    return Pipelines(ended["Completed"], ended["Skipped"], records[ended["Completed"]])
