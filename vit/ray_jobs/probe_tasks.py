"""Probes of committed checkpoints as Ray tasks of the training's job."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from vitline.infra.provenance import require_same_versions
from vitline.infra.runs.beside import beside
from vitline.infra.runs.run_state import state_of
from vitline.infra.storage import open_store
from vitline.vit.config import CheckpointProbeConfig
from vitline.vit.features.checkpoint_follow import ProbeFollower, Scoring

LOW_PRIORITY = 10
"""Niceness of a task: where cores are scarce, the training has them."""


@contextlib.contextmanager
def checkpoints_probed(
    run_uri: str,
    attempt: int,
    probes: CheckpointProbeConfig,
    *,
    on_gpus: bool,
    grows: bool,
    given_up: Callable[[], bool],
) -> Iterator[None]:
    """Meanwhile, checkpoints of the run are probed; where the training has finished, its last one is, too, unless `given_up()`.

    `on_gpus`: whether the training is. One on CPUs may need every CPU for its next start of workers, so a probe asks Ray for none.
    `grows`: whether the cluster's autoscaler may bring nodes; else a probe that no node has room for is not begun.
    """
    if not probes.every_steps:
        yield
        return
    run = open_store(run_uri)

    def begin(prefix: str) -> Scoring:
        num_cpus = probes.cpus if on_gpus else 0
        if not grows:
            check_room(num_cpus, int(probes.device == "cuda"))
        return RayScoring(run_uri, prefix, probes, num_cpus=num_cpus)

    follower = ProbeFollower(run, attempt, probes.every_steps, begin)
    try:
        with beside(follower.follow, name="probes"):
            yield
        if state_of(run, attempt) == "finished":
            follower.finish(given_up)
    finally:
        follower.close()


def check_room(num_cpus: int, num_gpus: int) -> None:
    """Raises RuntimeError where no node of the cluster has as many CPUs and GPUs, busy ones included."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes):
        wanted = " and ".join([f"{num_cpus} CPUs"] * bool(num_cpus) + ["a GPU"] * bool(num_gpus))
        raise RuntimeError(
            f"no node of the cluster has {wanted}; change execution.probes.cpus or execution.probes.device"
        )


class RayScoring:
    """The scoring of one checkpoint in a process of its own."""

    def __init__(self, run_uri: str, prefix: str, probes: CheckpointProbeConfig, *, num_cpus: int) -> None:
        import ray

        # Each in a new process, which gives memory and priority back. A training cannot wait for a probe, so none is repeated.
        task: Any = ray.remote(max_calls=1, max_retries=0)(score_in_task)
        placed = task.options(num_cpus=num_cpus, num_gpus=int(probes.device == "cuda"))
        self._ref = placed.remote(run_uri, prefix, probes)

    def result(self) -> dict[str, float] | None:
        """The scores; None as long as there are none. Raises what the task has raised."""
        import ray

        if not ray.wait([self._ref], timeout=0)[0]:
            return None
        try:
            scores: dict[str, float] = ray.get(self._ref)
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        return scores

    def cancel(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray itself has ended, and the task with it
            ray.cancel(self._ref, force=True)


def score_in_task(run_uri: str, prefix: str, probes: CheckpointProbeConfig) -> dict[str, float]:
    """Scores a checkpoint on CPUs or the GPU of this task. Called in the process of the task."""
    require_same_versions()
    import torch

    from vitline.vit.features.checkpoint_score import score_checkpoint

    os.nice(LOW_PRIORITY)
    torch.set_num_threads(probes.cpus)
    return score_checkpoint(open_store(run_uri), prefix, torch.device(probes.device))
