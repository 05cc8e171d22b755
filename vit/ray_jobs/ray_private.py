"""What a training needs of Ray that Ray does not promise to keep. No other file of `vit` uses such names.

pyproject.toml bounds the versions, and tests/vit/test_ray_private.py names what another version lacks. There is no public way: a
`UserCallback` learns nothing of placement, and the public elastic policy counts room that others use. Ray is imported inside, because
evaluations need no more of it than `declared_resources`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vitline.infra.runs.ray_work import living_nodes
from vitline.vit.ray_jobs.start_policy import StartPolicy
from vitline.vit.run.devices import Node

UNUSED_CALLBACKS = {"PlacementGroupCleanerCallback", "DatasetsCallback"}


def declared_resources() -> Mapping[str, float] | None:
    """The resources of all nodes that the cluster's autoscaler may start; None if no autoscaler has declared them to Ray."""
    from ray._private.state import state

    # Ray Data uses the same function.
    return state.get_max_resources_from_cluster_config()


def draining_nodes() -> dict[str, Any]:
    """The nodes that the cluster is going to take away, by id, as a cloud does with spot machines."""
    from ray._private.state import state

    # Ray Train's public function for this is a barrier over all ranks.
    return state.get_draining_nodes()


def cluster_nodes(*, free: bool = False) -> list[Node]:
    """The nodes that are up, with all their resources or the free ones."""
    from ray._private.state import state

    # Ray's public functions give what is free of the cluster as a whole.
    available = state.available_resources_per_node() if free else {}
    return [
        Node(available.get(node["NodeID"], {}) if free else node["Resources"], node["Labels"])
        for node in living_nodes()
    ]


def scaling_policies() -> Any:
    """Ray Train's module of scaling policies, whose decisions are its controller's."""
    from ray.train.v2._internal.execution import scaling_policy

    return scaling_policy


def resources_per_worker(scaling_config: Any) -> Any:
    return scaling_config._resources_per_worker_not_none


def starts_callback(starts: StartPolicy) -> Any:
    """Tells `starts`, in Ray Train's controller, what becomes of each start. What it raises ends `fit`."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState, SchedulingState

    class Starts(ControllerCallback):
        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            if isinstance(current_state, SchedulingState):
                starts.begin()
            elif isinstance(current_state, RunningState):
                starts.placed()
            elif isinstance(current_state, ReschedulingState):
                error = current_state.training_failed_error
                cause = getattr(error, "controller_failure", error)
                if isinstance(cause, WorkerGroupStartupTimeoutError):
                    starts.unplaced()
                else:
                    starts.failed(cause)

    return Starts()


def trainer_class(scaling_policy: Callable[[Any], Any] | None = None) -> type[Any]:
    """Ray Train's trainer without callbacks that start a process of their own for something that vitline does not use, and with a
    policy made from its scaling config; None for Ray's own.

    `PlacementGroupCleaner` is a detached process of each run that watches the controller from its start on. If a run is stopped
    earlier, the process stays until the cluster ends. It is not needed, as Ray removes a placement group with its job.
    `DatasetManager` serves Ray Datasets to workers, which read shards from the store.
    """
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            return [each for each in callbacks if type(each).__name__ not in UNUSED_CALLBACKS]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            if scaling_policy:
                given["scaling_policy"] = scaling_policy(self.scaling_config)
            return super()._initialize_and_run_controller(**given)  # type: ignore[misc]

    return Trainer
