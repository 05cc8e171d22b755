"""Starts `train()` on W Ray Train workers: the driver of a training job, and what each worker does (DESIGN 3.3, 3.4).

    python -m vit.ray_train --run URI --attempt N

Ray Train is told of neither checkpoints nor metrics: a restarted group looks in the store, and the outcome is
`state.json`. The driver's exit code follows from that state.
"""

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from typing import Any

from infra.claims import ClaimHolder, ClaimLost
from infra.redact import cleaned, log_to_stderr
from infra.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, read_state, write_state
from infra.stopping import handlers_kept, stop_on_signals
from infra.storage import Store, open_store
from vit.config import TrainConfig
from vit.run import TrainingRun
from vit.run_spec import START_TRIES, RunSpec
from vit.world import World

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """The job driver. Leaves by os._exit with the code of the run's state, so that no handler of Ray's changes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="URI of the run: <root>/runs/<run key>")
    parser.add_argument("--attempt", required=True, type=int)
    args = parser.parse_args(argv)
    log_to_stderr()
    code = drive(args.run, args.attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def drive(run_uri: str, attempt: int) -> int:
    """Runs one attempt to its end; returns the exit code. The claim's heartbeat beats as long as this process lives."""
    run = open_store(run_uri)
    config = RunSpec.model_validate(run.read_json("config.json")).config
    with ClaimHolder(run, attempt) as claim, tempfile.TemporaryDirectory(prefix="vitline-train-") as folder:
        stop_on_signals(run_uri, attempt, config.execution.grace_s)
        leave_when_lost(claim)
        try:
            fit(run_uri, attempt, config, folder)
        except Exception as error:  # the worker's own record, if it left one, says more
            log.exception("the worker group ended")
            return conclude(run, attempt, claim, f"{type(error).__name__}: {str(error)[:2000]}{resources()}")
        return conclude(run, attempt, claim, "the workers left without a result")


def leave_when_lost(claim: ClaimHolder) -> None:
    """Ends this process, and with it the workers, once a heartbeat found the claim in other hands."""

    def watch() -> None:
        while not claim.lost:
            time.sleep(1.0)
        log.warning("the claim is another attempt's; this one leaves")
        os._exit(CLAIM_LOST_EXIT_CODE)

    threading.Thread(target=watch, name="claim-watch", daemon=True).start()


def conclude(run: Store, attempt: int, claim: ClaimHolder, reason: str) -> int:
    """The exit code of the state that the workers left; without one the run has failed for `reason`.

    An attempt that lost its claim leaves the state to the one that holds it.
    """
    try:
        claim.check()
    except ClaimLost as lost:
        log.warning("run=%s attempt=%d: %s", run.uri, attempt, lost)
        return CLAIM_LOST_EXIT_CODE
    state = read_state(run)
    if state is None or state["state"] == "running" or state["attempt"] != attempt:
        write_state(run, "failed", attempt, reason=reason)
        return OUTCOMES["failed"].exit_code
    log.info("run=%s attempt=%d state=%s", run.uri, attempt, state["state"])
    return OUTCOMES[state["state"]].exit_code


def fit(run_uri: str, attempt: int, config: TrainConfig, folder: str) -> None:
    """Blocks until the worker group is done. Workers are restarted without limit; they themselves see a lack of
    progress, which a counter of restarts cannot. A group that cannot be placed within `queue_timeout_s` raises."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    with handlers_kept():
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    wanted, gpus = config.execution.num_workers, int(ray.cluster_resources().get("GPU", 0))
    workers = min(wanted, gpus) if gpus else wanted
    if workers < wanted:
        # One worker a GPU; the numbers do not depend on W, only the time does.
        log.warning("the cluster has %d GPUs for %d workers: training on %d workers", gpus, wanted, workers)
    trainer = trainer_class()(
        train_worker,
        train_loop_config={"run": run_uri, "attempt": attempt},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=bool(gpus)),
        run_config=RunConfig(
            name=f"a{attempt}",
            storage_path=folder,  # Ray Train keeps one marker file; it has no part in ours
            # Ray's annotations still show the class of Train v1, which has no limit for the controller.
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=START_TRIES - 1),  # type: ignore[call-arg]
        ),
    )
    trainer.fit()


def trainer_class() -> type[Any]:
    """Ray Train's trainer without its `PlacementGroupCleaner`.

    That is a detached process of each run, told to watch the controller once it has started: of a run that is stopped
    earlier it stays for as long as the cluster does. Nor is it needed: a placement group ends with the job that made it.
    """
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    return Trainer


def resources() -> str:
    """What the cluster has and what of it is free, for the reason of a group that could not be placed."""
    import ray

    if not ray.is_initialized():
        return ""
    total, free = ray.cluster_resources(), ray.available_resources()
    return "; the cluster has " + ", ".join(
        f"{free.get(k, 0):g} of {total[k]:g} {k} free" for k in ("CPU", "GPU") if k in total
    )


def train_worker(job: dict[str, Any]) -> None:
    """What every worker runs; Ray calls it again on a fresh group after the loss of one."""
    from ray.train import get_context

    run, context = open_store(job["run"]), get_context()
    try:
        world = World.current(context.get_node_rank(), context.get_local_rank())
        TrainingRun(run, job["attempt"], world).execute()
    except ClaimLost:
        raise
    except Exception as error:
        at, rank = time.time(), context.get_world_rank()
        record = {"at": at, "rank": rank, "error": cleaned(f"{type(error).__name__}: {error}")[:4000]}
        run.write_json(f"errors/a{job['attempt']}-{int(at * 1000)}-rank{rank}.json", record)
        raise


if __name__ == "__main__":
    main()
