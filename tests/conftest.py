"""What several rooms test with: real small corpora, a config to train on them, and servers that are started once.

Imports of vitline stand in the fixtures: a unit test loads what it tests, and neither flows nor Ray.
"""

import contextlib
import os
import resource
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from vitline.infra.settings import NO_TELEMETRY, join_environment

from . import shape_checks  # noqa: F401 - what `--jaxtyping-packages` names

settings.register_profile("shared machine", deadline=None)  # no test asserts a time
settings.load_profile("shared machine")
join_environment(NO_TELEMETRY)  # before a test module imports what reports home


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
    """Tests that use the stack get the marker `stack`, those that use the Ray of the test run `servers`, and long ones are slow.
    Tests with that Ray run last: it takes no time from the others. `reconcile` looks at all that a stack holds: its tests run
    while that is little."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
        if {"stack", "s3_uri"} & {*item.fixturenames} or item.get_closest_marker("s3"):
            item.add_marker("stack")
        elif "ray_jobs" in item.fixturenames:
            item.add_marker("servers")
    items.sort(key=lambda item: ("servers" not in item.fixturenames, "ray_jobs" in item.fixturenames))


@pytest.fixture
def full_disk():
    """full_disk(n): as long as it is open, every local file ends at n bytes, as on a full disk: the write that reaches them is
    short, the next one fails."""

    @contextlib.contextmanager
    def full(room_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full


@pytest.fixture
def overtake(monkeypatch):
    """overtake(owner, name, act): right before the next call of a method or function, another process does `act()`."""

    def make(owner, name, act):
        real = getattr(owner, name)

        def overtaken(*args, **named):
            monkeypatch.undo()
            act()
            return real(*args, **named)

        monkeypatch.setattr(owner, name, overtaken)

    return make


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory) -> str:
    """A root that holds the scikit-learn digits as a task corpus; read only."""
    from vitline.data_prep.examples import presets
    from vitline.data_prep.prepare.job import prepare

    root = str(tmp_path_factory.mktemp("digits"))
    prepare([presets.digits()], root)
    return root


@pytest.fixture(scope="session")
def digits(digits_root):
    """The store of the digits corpus."""
    from vitline.data_prep.examples import presets
    from vitline.data_prep.find_corpus import corpus_store
    from vitline.infra.storage import open_store

    return corpus_store(open_store(digits_root), presets.digits())


@pytest.fixture(scope="session")
def two_corpora(tmp_path_factory) -> str:
    """A root with the corpora `birds` (48 images) and `city` (48 images), which both have a class `owl`."""
    import numpy as np
    from PIL import Image

    from vitline.data_prep.prepare.job import prepare
    from vitline.flows.runs.prepare_corpus import source_request

    folder = tmp_path_factory.mktemp("mixture")
    root, rng, requests = str(folder / "store"), np.random.default_rng(0), []
    for name, classes in {"birds": ("jay", "owl"), "city": ("bus", "owl", "tram")}.items():
        for label in classes:
            home = folder / name / label
            home.mkdir(parents=True)
            for i in range(48 // len(classes)):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(home / f"{i}.png")
        requests.append(source_request(root, str(folder / name), name))
    prepare(requests, root)
    return root


@pytest.fixture(scope="session")
def tagged(tmp_path_factory):
    """The store of a corpus with several labels per image: which of red, green, blue and grey a noisy image shows. 64 train images,
    24 val, 24 test."""
    import numpy as np
    from PIL import Image

    from vitline.data_prep.config import CorpusConfig, LabelTable
    from vitline.data_prep.find_corpus import corpus_store
    from vitline.data_prep.prepare.job import prepare
    from vitline.infra.storage import open_store

    folder, rng = tmp_path_factory.mktemp("tagged"), np.random.default_rng(0)
    rows = ["image,labels,split"]
    for split, count in {"train": 64, "val": 24, "test": 24}.items():
        for i in range(count):
            shown = (rng.random(3) < 0.5) * 128
            pixels = (rng.integers(0, 128, (8, 8, 3)) + shown).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}{i}.png")
            tags = [name for name, on in zip(("red", "green", "blue"), shown, strict=True) if on] or ["grey"]
            rows.append(f"{split}{i}.png,{' '.join(tags)},{split}")
    (folder / "tags.csv").write_text("\n".join(rows))
    source = LabelTable(path=str(folder / "tags.csv"), label_separator=" ", split_column="split")
    request, root = CorpusConfig(name="tagged", source=source), str(folder / "store")
    prepare([request], root)
    return corpus_store(open_store(root), request)


@pytest.fixture
def train_config(digits):
    """train_config(name, workers, steps, **execution): the tiny training on the digits."""
    from .trainings import tiny_config

    return lambda name, *args, **execution: tiny_config(name, digits.uri, *args, **execution)


@pytest.fixture(autouse=True)
def children_may_import_the_tests(monkeypatch):
    """Commands that run in the process of a test keep the current folder from their children, and so from those of later tests."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """An empty root on this machine's disk."""
    return str(tmp_path / "store")


@pytest.fixture(scope="session")
def ray_jobs(tmp_path_factory):
    """The jobs of a Ray of two cores, started once for the tests that use it."""
    from vitline.infra.local.local_ray import LocalRay
    from vitline.infra.ray_jobs import RayJobs

    with LocalRay(tmp_path_factory.mktemp("ray"), num_cpus=2, object_store_bytes=150_000_000) as ray:
        yield RayJobs(ray.address, token_path=ray.env["RAY_AUTH_TOKEN_PATH"])


@pytest.fixture
def until(ray_jobs):
    """until(condition, job): waits for it, as long as the job has not ended."""

    def wait(condition, job):
        deadline = time.monotonic() + 600
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
                while not (line := process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.001)  # a program that is just being started has none for a moment
                if all(word in " ".join(line) for word in words):
                    found.append(process)
        return found

    return find


@pytest.fixture(scope="session", autouse=True)
def no_stack_of_this_folder(tmp_path_factory):
    """Commands under test do not join the stack that may be up in the folder where the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITLINE_ROOT", str(tmp_path_factory.mktemp("unused") / "store"))
        yield


@pytest.fixture(scope="session")
def planted() -> dict[str, str]:
    """Secrets that people have in their shells, and that must not get into any record."""
    return {name: f"planted-{secrets.token_hex(12)}" for name in ("HF_TOKEN", "GIT_PASSWORD", "WANDB_API_KEY")}


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory) -> Iterator[Path]:
    """A folder with files that are named like modules, as a downloaded one may be. None may be executed until the tests have ended."""
    folder = tmp_path_factory.mktemp("hostile")
    modules = ["random.py", "queue.py", "secrets.py", "ray.py", "prefect.py", "mlflow.py", "uvicorn.py", "aiohttp.py"]
    packages = [f"{name}/__init__.py" for name in ("vitline", "infra", "data_prep", "vit", "flows")]
    for name in modules + packages:
        executed = folder / f"executed-{name.replace('/', '-')}"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"import sys; open({str(executed)!r}, 'w').write(repr((sys.argv, sys.path)))\n")
    yield folder
    assert not {path.name: path.read_text() for path in folder.glob("executed-*")}


@pytest.fixture(scope="session")
def stack(planted, hostile_folder):
    """The whole local stack, real servers all of them, started once for the tests that ask for it."""
    from vitline.infra.local.stack import stack_environment, start_stack, stop_stack

    from .servers.stack import RunningStack, own_ports

    folder = Path(tempfile.mkdtemp(prefix="vl-t-"))
    directory, log_dir = folder / "stack", folder / "logs"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in planted.items():
                patch.setenv(name, value)
            patch.chdir(hostile_folder)
            start_stack(
                directory, log_dir=log_dir, ports=own_ports(), num_cpus=2, ends_with_caller=True, announce=print
            )
        env = stack_environment(directory)
        with pytest.MonkeyPatch.context() as patch:  # clients of MLflow take only the address as an argument
            for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
                patch.setenv(name, env[name])
            yield RunningStack(directory, log_dir, env)
    finally:
        stop_stack(directory)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3_uri(request, monkeypatch) -> str:
    """An empty place on a real S3 service, which this test's process and its children can reach: below
    VITLINE_TEST_S3_URI, with the AWS variables, where a service is to be tested; else in the stack's SeaweedFS."""
    uri = os.environ.get("VITLINE_TEST_S3_URI")
    if uri is None:
        from .servers.stack import use_s3

        uri = use_s3(request.getfixturevalue("stack").env, monkeypatch)
    return f"{uri}/{uuid.uuid4().hex}"


@pytest.fixture
def gs_uri(monkeypatch) -> Iterator[str]:
    """An empty place in a bucket of a small service that speaks Google's protocol."""
    from .servers.small_buckets import service_of

    with service_of("gs", monkeypatch):
        yield f"gs://bucket/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def azurite(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The variables with which a process reaches Azurite, Microsoft's emulator of Azure Blob Storage."""
    from .servers.azurite import running_azurite

    with running_azurite(tmp_path_factory.mktemp("azurite")) as variables:
        yield variables


@pytest.fixture
def az_uri(azurite, monkeypatch) -> str:
    """An empty place in a container of Azurite."""
    for name, value in azurite.items():
        monkeypatch.setenv(name, value)
    return f"az://box/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(s3_uri):
    """A proxy with faults in front of the service behind `s3_uri`."""
    from .servers.faulty_s3 import proxy_before

    with proxy_before() as server:
        yield server


@pytest.fixture
def http():
    """A client for servers that may be busy."""
    import httpx

    with httpx.Client(timeout=60, follow_redirects=True) as client:
        yield client


@pytest.fixture(scope="session")
def flows(stack):
    """The flows, registered with the stack's Prefect, and `pretrain-then-transfer/tiny` beside them: `FlowRuns`."""
    from vitline.infra.settings import Settings

    from .servers.stack import TINY, FlowRuns, environment_of

    with environment_of(stack):
        from vitline.flows.on_prefect.deploy.registration import create, register
        from vitline.flows.on_prefect.deployments import PIPELINE, Deployment
        from vitline.flows.on_prefect.prefect_observer import client

        register(Settings())
        with client() as api:
            create(api, Deployment(PIPELINE, "tiny", TINY, "pipeline", pool="vitline"), Settings())
    runs = FlowRuns(stack.env)
    # What tests break on purpose is not for a reconciler that happens to come by.
    reconcile = runs.api.get("/deployments/name/reconcile/default").json()
    runs.api.patch(f"/deployments/{reconcile['id']}", json={"paused": True}).raise_for_status()
    return runs


@pytest.fixture
def in_stack(stack, flows):
    """This process, like the flow processes and commands of the stack, uses its servers."""
    from vitline.infra.settings import Settings

    from .servers.stack import environment_of

    with environment_of(stack):
        yield Settings()


@pytest.fixture(scope="session")
def pipelines(flows, stack):
    """Two flow runs of the tiny pipeline that were started at once: `Pipelines`."""
    from vitline.flows.catalog.lists import list_pipelines
    from vitline.infra.settings import Settings

    from .servers.stack import Pipelines, environment_of

    asked = ("pretrain-then-transfer/tiny", {"request": {"name": "twice"}})
    runs = [flows.post(*asked, name="Both at once").raise_for_status().json()["id"] for _ in range(2)]
    ended = {flows.wait(run)["state_name"]: run for run in runs}
    assert ended.keys() == {"Completed", "Skipped"}, [flows.find(run)["state"] for run in runs]
    with environment_of(stack):
        records = {record.origin.flow_run_id: record for record in list_pipelines(Settings().root)}
    return Pipelines(ended["Completed"], ended["Skipped"], records[ended["Completed"]])
