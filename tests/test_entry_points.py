"""What is started or found by name: the command, modules that jobs and services run, the plugin, `load_model`."""

import ast
import random
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from PIL import Image

from vitline.infra.config import replace
from vitline.vit.config import OptimConfig

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "vitline.data_prep.prepare.job",
        "vitline.vit.ray_jobs.train_driver",
        "vitline.vit.ray_jobs.task_driver",
        "vitline.flows.on_prefect.worker",
        "vitline.flows.to_mlflow.send",
        "vitline.flows.cli.main",
    ],
)
def test_module_that_is_started_by_name_runs(module, hostile_folder):
    """Entrypoints of Ray jobs, services of a stack and the command."""
    command = [sys.executable, "-P", "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=hostile_folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_preparation_executes_no_file_of_the_current_folder(hostile_folder, tmp_path):
    for number in range(20):
        image = tmp_path / "src" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (40, 40), random.Random(number).randbytes(4800)).save(image)
    command = [str(Path(sys.executable).with_name("vitline")), "data", "prepare", "--source", str(tmp_path / "src")]
    command += ["--name", "pets", "--root", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=hostile_folder)
    assert done.returncode == 0, done.stderr
    assert not {path.name: path.read_text() for path in hostile_folder.glob("executed-*")}


def test_every_child_that_runs_a_module_is_started_without_the_current_folder():
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}": [getattr(each, "value", None) for each in node.elts]
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.List)
    }
    commands = {place: words for place, words in found.items() if "-m" in words}
    assert len(commands) > 10
    assert not {place for place, words in commands.items() if words[words.index("-m") - 1] != "-P"}


def test_the_command_and_the_plugin_are_registered():
    (command,) = entry_points(group="console_scripts", name="vitline")
    (plugin,) = entry_points(group="mlflow.request_header_provider", name="vitline")
    assert callable(command.load())
    assert callable(plugin.load())


def test_flows_keep_the_entrypoints_of_registered_deployments():
    from vitline.flows.on_prefect import flows

    names = ("prepare_corpus", "pretrain_flow", "finetune", "evaluate", "pretrain_then_transfer_flow")
    assert all(callable(getattr(flows, name)) for name in names)


def test_a_field_that_is_digested_under_another_name_is_read_back_from_it():
    staircase = {"schedule": "staircase", "warmup_steps": 0}
    config = OptimConfig(**staircase, milestones=(0.5,))
    stored = config.model_dump(mode="json")
    assert (stored["falls_at"], "milestones" in stored) == ([0.5], False)
    assert OptimConfig.model_validate(stored) == config
    assert replace(config, milestones=(0.7,)).milestones == (0.7,)


@pytest.mark.slow
def test_wheel_installs_one_package_that_needs_no_folder_beside_it(tmp_path):
    """Other distributions have packages called `flows`, `infra` and `vit`."""
    source, installed = tmp_path / "source", tmp_path / "site-packages"
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "tests", "docs", "*.egg-info")
    )
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    files = {
        str(path.relative_to(installed / "vitline")) for path in (installed / "vitline").rglob("*") if path.is_file()
    }
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"vitline"}
    expected = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    native = {name for name in expected if name.startswith("vit/native/")}
    for_clusters = {"infra/kubernetes/base/team/flow-run.json", "infra/observability/grafana.json"}  # read by no code
    for_clusters |= {name for name in expected if name.startswith("infra/buckets/")}
    kept = {
        name
        for name in expected - native - for_clusters
        if name.endswith((".py", ".j2", ".css", ".csv", ".json", ".toml"))
    }
    assert files == kept | {"__init__.py"}
    for room in ROOMS:
        (installed / room).mkdir()
        (installed / room / "__init__.py").write_text("raise RuntimeError('a package of somebody else')")
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import vitline.flows.cli.main as c; print(c.__file__); c.main()"
    done = subprocess.run([sys.executable, "-P", "-c", code, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, str(installed / "vitline") in done.stdout) == (0, True), done.stderr
