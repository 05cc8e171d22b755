"""Probes of committed checkpoints as Ray tasks of the training's job."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from vitline.infra.runs.in_background import in_background
from vitline.infra.runs.ray_work import RayTask, run_keyed
from vitline.infra.runs.run_state import state_of
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.config import CheckpointProbeConfig
from vitline.vit.features.checkpoint_follow import ProbeFollower
from vitline.vit.ray_jobs.ray_private import cluster_nodes
from vitline.vit.run.devices import places

LOW_PRIORITY = 10
"""Niceness of a task: where cores are scarce, the training has them."""


@contextlib.contextmanager
def probe_checkpoints(
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
    run, over = open_store(run_uri), threading.Event()
    thread = ThreadPoolExecutor(1, thread_name_prefix="probe")

    def begin(prefix: str) -> Future[dict[str, float]]:
        num_cpus, num_gpus = probes.cpus if on_gpus else 0, int(probes.device == "cuda")
        if not grows:
            check_room(num_cpus, num_gpus)
        # In a process of its own, which gives memory and priority back. A training cannot wait for a probe, so none is repeated.
        work, task = partial(score_in_task, run_uri, probes), RayTask(prefix, prefix, num_cpus, num_gpus)
        results = run_keyed(work, deque([task]), watch=None, stop=over.is_set)
        return thread.submit(lambda: dict(results)[prefix])

    follower = ProbeFollower(run, attempt, probes.every_steps, begin)
    try:
        with in_background(follower.follow, name="probes"):
            yield
        if state_of(run, attempt) == "finished":
            follower.finish(given_up)
    finally:
        over.set()
        thread.shutdown()
        follower.close()


def check_room(num_cpus: int, num_gpus: int) -> None:
    """Raises RuntimeError where no node that the job may use has as many CPUs and GPUs, busy ones included."""
    needs = {kind: number for kind, number in (("CPU", num_cpus), ("GPU", num_gpus)) if number}
    if needs and not places(cluster_nodes(), needs, Settings().node_labels):
        wanted = " and ".join([f"{num_cpus} CPUs"] * bool(num_cpus) + ["a GPU"] * bool(num_gpus))
        raise RuntimeError(
            f"no node of the cluster has {wanted}; change execution.probes.cpus or execution.probes.device"
        )


def score_in_task(run_uri: str, probes: CheckpointProbeConfig, prefix: str) -> dict[str, float]:
    """Scores a checkpoint on CPUs or the GPU of this task. Called in the process of the task."""
    import torch

    from vitline.vit.features.checkpoint_score import score_checkpoint

    os.nice(LOW_PRIORITY)
    torch.set_num_threads(probes.cpus)
    return score_checkpoint(open_store(run_uri), prefix, torch.device(probes.device))
