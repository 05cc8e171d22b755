"""Starts `train()` on W Ray Train workers: the driver of a training job, and what each worker does (DESIGN 3.3, 3.4).

    python -m vit.ray_train --run URI --attempt N

Ray Train is told of neither checkpoints nor metrics: a restarted group looks in the store, and the outcome is
`state.json`. The driver's exit code follows from that state.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any

from infra.claims import ClaimHolder, ClaimLost
from infra.run_state import OUTCOMES, read_state, request_stop, write_state
from infra.storage import Store, open_store
from vit.config import TrainConfig
from vit.run import RunSpec, TrainingRun
from vit.world import World

log = logging.getLogger(__name__)
# Refused by a guard: another attempt is at work.
CLAIM_LOST_EXIT_CODE = 3


def main(argv: list[str] | None = None) -> None:
    """The job driver. Leaves by os._exit with the code of the run's state, so that no handler of Ray's changes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="URI of the run: <root>/runs/<run key>")
    parser.add_argument("--attempt", required=True, type=int)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    code = drive(args.run, args.attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def drive(run_uri: str, attempt: int) -> int:
    """Runs one attempt to its end; returns the exit code. The claim's heartbeat beats as long as this process lives."""
    run = open_store(run_uri)
    config = RunSpec.model_validate(run.read_json("config.json")).config
    with ClaimHolder(run, attempt) as claim:
        watch_signals(run_uri, attempt, config.execution.grace_s)
        try:
            fit(run_uri, attempt, config)
        except Exception as error:  # the worker's own record, if it left one, says more
            log.exception("the worker group ended")
            return conclude(run, attempt, claim, f"{type(error).__name__}: {str(error)[:2000]}")
        return conclude(run, attempt, claim, "the workers left without a result")


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


def fit(run_uri: str, attempt: int, config: TrainConfig) -> None:
    """Blocks until the worker group is done. Workers are restarted without limit; they themselves see a lack of
    progress (`count_start`), which a counter of restarts cannot."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Signal handlers first: ray.init replaces SIGTERM's.
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    ray.init(ignore_reinit_error=True, logging_level=logging.WARNING, log_to_driver=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= config.execution.num_workers
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"run": run_uri, "attempt": attempt},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=config.execution.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=f"a{attempt}",
            # Ray Train keeps one marker file; it is given a place of its own and no part in ours.
            storage_path=tempfile.mkdtemp(prefix="vitline-train-"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()


def watch_signals(run_uri: str, attempt: int, grace_s: float) -> None:
    """SIGTERM and SIGINT ask the workers to stop, through the store; after `grace_s` the process leaves all the same."""

    def on_signal(number: int, frame: Any) -> None:
        leave = threading.Timer(grace_s, lambda: os._exit(OUTCOMES["preempted"].exit_code))
        leave.daemon = True
        leave.start()
        signal.signal(number, signal.SIG_IGN)
        # The handler may interrupt a store operation of this thread; a thread of its own cannot deadlock with it.
        threading.Thread(
            target=lambda: request_stop(
                open_store(run_uri), "preempted", by=signal.Signals(number).name, attempt=attempt
            )
        ).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def train_worker(job: dict[str, Any]) -> None:
    """What every worker runs; Ray calls it again on a fresh group after the loss of one."""
    run = open_store(job["run"])
    started = time.time()
    try:
        TrainingRun(run, job["attempt"], World.current()).execute()
    except ClaimLost:
        raise
    except Exception as error:
        from ray.train import get_context

        record = {"rank": get_context().get_world_rank(), "error": f"{type(error).__name__}: {error}"[:4000]}
        run.write_json(f"errors/a{job['attempt']}-{int(started)}-rank{record['rank']}.json", record)
        raise


if __name__ == "__main__":
    main()
