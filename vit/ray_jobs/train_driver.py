"""The Ray job driver of a training: runs `train()` on W Ray Train workers.

    python -m vitline.vit.ray_jobs.train_driver --run URI --attempt N

Ray Train receives neither checkpoints nor metrics. A restarted worker group finds the newest checkpoint in the store, and
the outcome is `state.json`, which determines the exit code of the driver.
"""

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from vitline.infra.config import replace
from vitline.infra.plain_text import last_words
from vitline.infra.provenance import require_same_versions
from vitline.infra.redact import cleaned
from vitline.infra.runs.attempt import Ending, driver_main, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.in_background import in_background
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.run_state import request_stop
from vitline.infra.runs.stopping import joining_ray
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store
from vitline.vit.config import TrainConfig
from vitline.vit.ray_jobs.probe_tasks import probe_checkpoints
from vitline.vit.ray_jobs.ray_private import (
    cluster_nodes,
    declared_resources,
    draining_nodes,
    starts_callback,
    trainer_class,
)
from vitline.vit.ray_jobs.start_policy import NoRoom, StartPolicy, StartsFailed, report_waiting, waits
from vitline.vit.run.devices import choose_workers, devices_text, places
from vitline.vit.run.run_spec import START_TRY_S, RunSpec
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World

log = logging.getLogger(__name__)
BACKENDS = {True: "nccl", False: "gloo"}
"""Backend of torch.distributed, by whether workers have GPUs."""
COLLECTIVE_MARGIN_S = 120
DRAIN_LOOK_S = 5.0
DEFAULT_COLLECTIVE_TIMEOUT_S = 1800  # that of Ray Train


def drive(run: Store, attempt: int) -> int:
    """Runs one attempt to its end and returns the exit code. This process writes the heartbeat of the lease."""
    config = RunSpec.model_validate(run.read_json("config.json")).config
    execution = config.execution

    def work(held: Run) -> Ending:
        try:
            with tempfile.TemporaryDirectory(prefix="vitline-train-") as folder:
                fit(run.uri, attempt, config, folder, lambda: held.stopped() is not None)
        except Exception as error:
            log.exception("the worker group failed")
            # Ray Train wraps what `starts_callback` raises in a paragraph of its own.
            cause = getattr(error, "controller_failure", error)
            told = isinstance(cause, NoRoom | StartsFailed)
            # Ray's errors quote the traceback of a worker, with colours.
            text = str(cause) if told else f"{type(error).__name__}: {last_words(str(error))}"
            return "failed", {"reason": f"{text[:2000]}{resources()}", "no_room": isinstance(cause, NoRoom)}
        return "failed", {"reason": "the workers ended without a result"}

    saves_on_cancel = execution.on_cancel == "checkpoint"
    return run_attempt(
        run,
        attempt,
        work,
        grace_s=execution.grace_s,
        saves_on_cancel=saves_on_cancel,
        workers_write_state=True,
        workers_wait=lambda: waits(run),
    )


def fit(
    run_uri: str, attempt: int, config: TrainConfig, folder: str, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Blocks until the worker group is done, and the last checkpoint probed, unless `stopped()`.

    Ray Train restarts workers without limit. The workers themselves end the run if restarts bring no progress, which
    Ray's count of restarts could not tell; starts that fail before that are counted by `StartPolicy`. Raises Ray Train's
    ControllerError of NoRoom or StartsFailed.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    from vitline.vit.ray_jobs.exclusive_training import exclusive_training

    with joining_ray():
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    declared, execution, steps = declared_resources(), config.execution, config.recipe.total_steps
    labels = {**Settings().node_labels, **execution.placement.node_labels}
    execution = replace(execution, **{"placement.node_labels": labels})
    nodes, free = cluster_nodes(), cluster_nodes(free=True)
    chosen = choose_workers(execution, nodes, declared, one_node=Settings().one_node_ray, free=free)
    devices, where, placement = chosen.devices, chosen.where, execution.placement
    workers, gpus = devices.num_workers, devices.use_gpu
    log.info("training on %s%s: %s", devices.text, where, devices.why)
    fewest = min(execution.min_workers or workers, workers)
    if chosen.room < fewest:
        text = f"{devices_text('cuda' if gpus else 'cpu', fewest)}{where}, of which the cluster has {chosen.room}"
        log.warning("waiting for %s", text)
        report_waiting(open_store(run_uri), attempt, steps, text)
    # Waiting for another training is not a failure; if there is a deadline, the wait may last until then.
    queue_s = max(execution.queue_timeout_s, Settings().time_left_s or 0)
    failures = execution.max_restarts_without_progress
    have_room = partial(nodes_suffice, chosen.resources, chosen.labels, fewest)
    starts = StartPolicy(run_uri, attempt, steps, f"{fewest} workers{where}", queue_s, failures, have_room)
    elastic = (fewest, run_uri, steps) if fewest < workers else None
    trainer = trainer_class(scaling_policy(elastic))(
        train_worker,
        train_loop_config={"run": run_uri, "attempt": attempt, "device": "cuda" if gpus else "cpu"},
        torch_config=TorchConfig(BACKENDS[gpus], timeout_s=collective_timeout_s(execution.progress_timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpus,
            resources_per_worker=dict(chosen.resources),
            placement_strategy=placement.strategy.upper(),
            # Ray's type annotations are those of Train v1, here and below.
            label_selector=dict(chosen.labels) or None,  # type: ignore[call-arg]
        ),
        run_config=RunConfig(
            name=f"a{attempt}",
            storage_path=folder,  # Ray Train writes one marker file there; vitline does not use it
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),  # type: ignore[call-arg]
            worker_runtime_env={"env_vars": placement.environment} if placement.environment else None,
            callbacks=[starts_callback(starts)],
        ),
    )
    with (
        probe_checkpoints(
            run_uri, attempt, execution.probes, on_gpus=gpus, grows=declared is not None, given_up=stopped
        ),
        exclusive_training(min(START_TRY_S, execution.queue_timeout_s / 4), starts.begin, starts.unplaced),
    ):
        trainer.fit()


def nodes_suffice(worker: Mapping[str, float], labels: Mapping[str, str], number: int) -> bool:
    """Whether the nodes that are up, busy or not, have room for so many workers. Called in Ray Train's controller, too."""
    return places(cluster_nodes(), worker, labels) >= number


def collective_timeout_s(progress_timeout_s: float | None) -> int:
    """How long a rank waits for the others in torch.distributed: longer than it may go without progress, so that each rank of a
    group that hangs leaves its stacks."""
    return DEFAULT_COLLECTIVE_TIMEOUT_S if progress_timeout_s is None else int(progress_timeout_s) + COLLECTIVE_MARGIN_S


def scaling_policy(elastic: tuple[int, str, int] | None = None) -> Callable[[Any], Any] | None:
    """What decides how many workers there are, from Ray Train's scaling config; None for Ray's own. `elastic`: the fewest workers, the
    URI of the run and its number of steps."""
    from vitline.vit.ray_jobs.elastic import Elastic, OneNode, OneNodeElastic

    one_node = Settings().one_node_ray
    if elastic is None:
        return OneNode if one_node else None
    policy = OneNodeElastic if one_node else Elastic
    return lambda scaling_config: policy(scaling_config, *elastic)


def resources() -> str:
    """The free and total resources of the cluster, as the end of an error message."""
    import ray

    if not ray.is_initialized():
        return ""
    total, free = ray.cluster_resources(), ray.available_resources()
    return "; the cluster has " + ", ".join(
        f"{free.get(k, 0):g} of {total.get(k, 0):g} {k} free" for k in ("CPU", "GPU")
    )


@contextlib.contextmanager
def stop_on_drain(run: Store, attempt: int) -> Iterator[None]:
    """Meanwhile, Ray's notice that it drains the node of this worker becomes a stop request: the training writes a checkpoint
    while it can, and the next attempt starts on another node. Ray itself would lose what was done since the last checkpoint."""
    if Settings().one_node_ray:
        yield
        return

    def watch(over: threading.Event) -> None:
        while not over.wait(DRAIN_LOOK_S):
            with contextlib.suppress(Exception):  # Ray or the store did not answer; the next look tries again
                if node_drains():
                    request_stop(run, "preempted", by="Ray, which drains a node of this training", attempt=attempt)
                    return

    with in_background(watch, name="drain-watch"):
        yield


def node_drains() -> bool:
    """Whether the cluster is going to take the node of this process away."""
    return node_id() in draining_nodes()


def node_id() -> str:
    """Ray's name of the node that this process runs on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def train_worker(job: dict[str, Any]) -> None:
    """The training function of each worker. After the loss of a worker, Ray calls it again in a new group."""
    from ray.train import get_context

    run, context = open_store(job["run"]), get_context()
    try:
        require_same_versions()
        world = World.current(context.get_node_rank(), context.get_local_rank(), job["device"])
        with stop_on_drain(run, job["attempt"]):
            TrainingRun(run, job["attempt"], world).execute()
    except LeaseLost:
        raise
    except Exception as error:
        at, rank = time.time(), context.get_world_rank()
        record = {"at": at, "rank": rank, "error": cleaned(f"{type(error).__name__}: {error}")[:4000]}
        run.write_json(f"errors/a{job['attempt']}-{int(at * 1000)}-rank{rank}.json", record)
        raise


if __name__ == "__main__":
    driver_main(__doc__, drive)
