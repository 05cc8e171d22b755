"""The Ray job driver of a training whose rank 0 suffers a fault at its first start: `chaos.json` of the run says which one.

python -m tests.chaos.ray_driver --run URI --attempt N
"""

import itertools
import os
import time
from typing import Any
from unittest.mock import patch

from vitline.infra.runs.attempt import driver_main
from vitline.infra.runs.run_state import StopReason, request_stop
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import Store, open_store
from vitline.vit.ray_jobs import train_driver

FAULT, REACHED = "chaos.json", "chaos-reached.json"
AT = 12
WAIT_S = 600.0


def train_worker(job: dict[str, Any]) -> None:
    """What Ray Train calls on each worker, and calls again after the loss of one."""
    run, steps, asked = open_store(job["run"]), itertools.count(1), StopPoller.asked
    if run.list("starts/"):
        return train_driver.train_worker(job)
    fault = run.read_json(FAULT)["fault"]

    def suffering(poller: StopPoller) -> StopReason | None:
        if next(steps) == AT:
            if fault == "wait":
                wait(run, poller)
            else:
                request_stop(run, fault, by="chaos", attempt=job["attempt"])
                poller.read()
        return asked(poller)

    with patch.object(StopPoller, "asked", suffering):
        train_driver.train_worker(job)


def wait(run: Store, poller: StopPoller) -> None:
    """Says which node this process is on, for the test to harm it, and waits for a stop request."""
    run.write_json(REACHED, {"pid": os.getpid(), "node": train_driver.node_id()})
    until = time.monotonic() + WAIT_S
    while poller.asked() is None and time.monotonic() < until:
        time.sleep(0.1)


def drive(run: Store, attempt: int) -> int:
    with patch.object(train_driver, "train_worker", train_worker):
        return train_driver.drive(run, attempt)


if __name__ == "__main__":
    driver_main(__doc__, drive)
