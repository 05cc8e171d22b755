"""What several rooms test with: real small corpora, prepared once per test run, and a config to train on them."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

from data_prep.corpora import presets
from data_prep.find_corpus import corpus_store
from data_prep.prepare import prepare
from infra.local.processes import free_ports
from infra.local.stack import stack_environment, start_stack, stop_stack
from infra.settings import NO_TELEMETRY, join_environment
from infra.storage import Store, open_store
from vit.config import ExecutionConfig, InputConfig, OptimConfig, TrainConfig, TrainRecipe, ViTConfig
from vit.input.config import AugmentConfig

join_environment(NO_TELEMETRY)  # before a test module imports what reports home


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
                    **execution,
                }
            ),
        )

    return make


@pytest.fixture
def root(tmp_path: Path) -> str:
    """An empty root on this machine's disk."""
    return str(tmp_path / "store")


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
def stack():
    """The whole local stack, real servers all of them, started once for the tests that ask for it."""
    folder = Path(tempfile.mkdtemp(prefix="vl-t-"))
    directory, log_dir = folder / "stack", folder / "logs"
    ports = dict(zip(("s3", "mlflow", "prefect", "ray"), free_ports(4, twin=10_000), strict=True))
    try:
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
