"""The names of Ray that it does not promise to keep. If one is gone, this says which, and trainings need another way."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NAMES = {
    "ray._private.state": ("state.get_max_resources_from_cluster_config", "state.get_draining_nodes"),
    "ray.train.v2._internal.exceptions": ("WorkerGroupStartupTimeoutError",),
    "ray.train.v2._internal.execution.callback": ("ControllerCallback.after_controller_state_update",),
    "ray.train.v2._internal.execution.controller.state": ("SchedulingState", "RunningState", "ReschedulingState"),
    "ray.train.v2._internal.execution.scaling_policy": (
        "NoopDecision",
        "ResizeDecision",
        "FixedScalingPolicy.after_controller_start",
        "FixedScalingPolicy.make_decision_for_non_running_worker_group",
        "FixedScalingPolicy.make_decision_for_running_worker_group",
        "FixedScalingPolicy._maybe_send_resource_request",
    ),
    "ray.train.v2.api.config": ("ScalingConfig._resources_per_worker_not_none",),
    "ray.train.torch": ("TorchTrainer._create_default_callbacks", "TorchTrainer._initialize_and_run_controller"),
    "ray._private.services": ("get_node", "start_raylet"),
    "ray._raylet": ("persist_port",),
    "ray.scripts.scripts": ("main",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_ray_has_what_trainings_and_the_start_of_a_node_need(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module} of Ray {importlib.import_module('ray').__version__} has no {name}"
        found = getattr(found, part)


def test_each_room_has_one_file_that_uses_such_names():
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ("flows", "vit", "data_prep", "infra")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"ray\._|ray\.train\.v2|from ray import _|ray\.scripts", path.read_text())
    }
    assert users == {"vit/ray_jobs/ray_private.py", "infra/local/ray_node.py"}
