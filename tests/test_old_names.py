"""Old names that running stacks, stored models and users refer to keep working for one release after a move."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from infra.config import replace
from vit.config import OptimConfig

MOVED = {
    "vit.registry_model": ("_load_pyfunc", "vit.serving.registry_model"),
    "vit.serving": ("load_served", "vit.serving.mlflow_model"),
    "infra.tracking": ("serve_images", "infra.mlflow.tracking"),
    "flows.ship_left": ("main", "flows.to_mlflow.ship_left"),
}


@pytest.mark.parametrize("old", MOVED)
def test_old_name_refers_to_the_moved_object(old):
    name, new = MOVED[old]
    assert getattr(importlib.import_module(old), name) is getattr(importlib.import_module(new), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["data_prep.prepare", "vit.ray_train", "vit.ray_workers", "flows.worker", "flows.ship_left", "flows.cli"]
)
def test_module_that_is_started_by_name_runs(module):
    """Entrypoints of Ray jobs, services of a stack and the command."""
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_and_the_plugin_are_registered():
    (command,) = entry_points(group="console_scripts", name="vitline")
    (plugin,) = entry_points(group="mlflow.request_header_provider", name="vitline")
    assert callable(command.load())
    assert callable(plugin.load())


def test_flows_keep_the_entrypoints_of_registered_deployments():
    from flows import deployed

    names = ("prepare_corpus", "pretrain_flow", "finetune", "evaluate", "pretrain_then_transfer_flow", "compare_runs")
    assert all(callable(getattr(deployed, name)) for name in names)


def test_renamed_field_is_read_by_both_names_and_keeps_digests():
    staircase = {"schedule": "staircase", "warmup_steps": 0}
    config = OptimConfig(**staircase, milestones=(0.5,))
    stored = config.model_dump(mode="json")
    assert (stored["falls_at"], "milestones" in stored) == ([0.5], False)
    assert OptimConfig.model_validate(stored) == config
    for name in ("milestones", "falls_at"):
        assert replace(config, **{name: (0.7,)}).milestones == (0.7,)
