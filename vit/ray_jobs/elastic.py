"""How many workers Ray Train starts, as a policy of its controller.

Ray's own elastic policy counts what its coordinator has promised even if others use it meanwhile, and takes the workers away wherever the
training is. This one counts what is free, and resizes after a checkpoint.
"""

import logging
import time
from typing import Any

from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.ray_jobs.ray_private import cluster_nodes, resources_per_worker, scaling_policies
from vitline.vit.run.devices import places

log = logging.getLogger(__name__)
_ray_train = scaling_policies()
FixedScalingPolicy: Any = _ray_train.FixedScalingPolicy

SETTLE_S = 15.0
"""Seconds for which a start waits for all workers before it takes fewer: so long may a cluster know of nodes and places too late."""
LOOK_S = 10.0
"""Seconds between two looks for further room."""


class OneNode(FixedScalingPolicy):  # type: ignore[misc]
    """The requested number of workers. Requests no further nodes: `AutoscalingCoordinator` is a process that stays until
    the cluster ends."""

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class Elastic(FixedScalingPolicy):  # type: ignore[misc]
    """Between `fewest` and the requested number of workers, which an autoscaler is always asked for."""

    def __init__(self, scaling_config: Any, fewest: int, run_uri: str, total_steps: int) -> None:
        super().__init__(scaling_config)
        self._fewest, self._most = fewest, int(scaling_config.num_workers)
        self._run_uri, self._total_steps = run_uri, total_steps
        self._waits_since: float | None = None
        self._looked_at = time.monotonic()
        self._grows_after: int | None = None

    def make_decision_for_non_running_worker_group(self) -> Any:
        self._maybe_send_resource_request()
        now, free = time.monotonic(), self._free()
        self._waits_since = now if self._waits_since is None else self._waits_since
        if free < self._most and now - self._waits_since < SETTLE_S:
            return _ray_train.NoopDecision()
        number = max(self._fewest, min(free, self._most))
        if number < self._most:
            log.warning(
                "starting with %d of %d workers, for which there is room; the others join later", number, self._most
            )
        return self._resized(number)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        self._maybe_send_resource_request()
        self._waits_since, now = None, time.monotonic()
        running = worker_group_state.num_workers
        if running == self._most or now - self._looked_at < LOOK_S:
            return _ray_train.NoopDecision()
        self._looked_at = now
        free = self._free()
        newest = self._newest_step() if free else None
        before, self._grows_after = self._grows_after, newest
        if newest is None or before is None or not before < newest < self._total_steps:
            return _ray_train.NoopDecision()
        number = min(running + free, self._most)
        log.warning("going on with %d workers instead of %d from the checkpoint of step %d", number, running, newest)
        self._grows_after = None
        return self._resized(number)

    def _resized(self, number: int) -> Any:
        return _ray_train.ResizeDecision(number, resources_per_worker(self.scaling_config))

    def _free(self) -> int:
        """Further workers for which there is room now."""
        worker = resources_per_worker(self.scaling_config)
        return places(cluster_nodes(free=True), worker, self.scaling_config.label_selector or {})

    def _newest_step(self) -> int | None:
        """The newest step with a checkpoint; -1 before the first, None where the store does not answer."""
        try:
            newest = newest_step(open_store(self._run_uri))
        except (OSError, RuntimeError):
            log.warning("the store did not answer", exc_info=True)
            return None
        return -1 if newest is None else newest


class OneNodeElastic(OneNode, Elastic):
    """Between two numbers of workers, on a Ray of one node."""
