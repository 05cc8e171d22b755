"""One attempt of a tiny training in a process of its own, which brings a fault upon itself.

    python -m tests.chaos.child_attempt --run URI --attempt N --fault kill|stop|full-disk|none|hold --at STEP

`hold` trains nothing: it only holds the lease, until its standard input is closed. SIGUSR1 makes the process stand still, as
`stop` does. The exit code is 0 if the run finished.
"""

import argparse
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from unittest.mock import patch

from vitline.infra.redact import log_to_stderr
from vitline.infra.runs.lease import Lease, LeaseHolder, LeaseLost
from vitline.infra.runs.run_state import LEASE_LOST_EXIT_CODE, StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import Store, open_store

HEARTBEAT_S, IN_FLIGHT_S = 0.1, 1.0
BEATING = threading.Lock()


def beat(holder: LeaseHolder, real: Callable[[LeaseHolder], Lease] = LeaseHolder.beat) -> Lease:
    with BEATING:
        return real(holder)


def fill_disk() -> None:
    """From now on every write to a local file of this process fails, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def stand_still() -> None:
    """Stops this process once what is on its way to the store has arrived: a request in flight cannot be called back."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint-saver":
            thread.join()
    time.sleep(IN_FLIGHT_S)
    with BEATING:  # whoever stands still in the middle of a swap keeps its lock, and with it everyone else
        os.kill(os.getpid(), signal.SIGSTOP)


def stand_still_when_told() -> None:
    """A handler would run in the main thread, which may be in the middle of a swap itself."""
    signal.sigwait({signal.SIGUSR1})
    stand_still()


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stand_still,
    "full-disk": fill_disk,
    "none": lambda: None,
}


def train(run: Store, attempt: int, fault: str, at: int) -> int:
    """Trains, with the fault after step `at` of this attempt; the exit code."""
    import torch

    from vitline.vit.run.training_run import TrainingRun
    from vitline.vit.training.world import World

    torch.set_num_threads(1)
    steps, asked = itertools.count(1), StopPoller.asked

    def suffering(poller: StopPoller) -> StopReason | None:
        if next(steps) == at:
            FAULTS[fault]()
        return asked(poller)

    with patch.object(StopPoller, "asked", suffering):
        return 0 if TrainingRun(run, attempt, World()).execute() == "finished" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--fault", required=True, choices=(*FAULTS, "hold"))
    parser.add_argument("--at", type=int, default=0)
    options = parser.parse_args()
    log_to_stderr()
    run = open_store(options.run)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # in all threads to come as well
    threading.Thread(target=stand_still_when_told, daemon=True).start()
    try:
        with patch.object(LeaseHolder, "beat", beat), LeaseHolder(run, options.attempt, every_s=HEARTBEAT_S):
            if options.fault == "hold":
                sys.stdin.read()
                return 0
            return train(run, options.attempt, options.fault, options.at)
    except LeaseLost:
        return LEASE_LOST_EXIT_CODE


if __name__ == "__main__":
    # No thread of torch or of the store's client is waited for.
    code = main()
    sys.stderr.flush()
    os._exit(code)
