"""Processes that stand still: at any time one attempt writes a run."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from unittest.mock import patch

import psutil
import pytest

from vitline.infra.runs import liveness
from vitline.infra.runs.lease import LeaseHeld, acquire_lease, read_lease
from vitline.infra.runs.liveness import Watch
from vitline.infra.runs.run_state import LEASE_LOST_EXIT_CODE

from ..eventually import eventually
from .bench import Training, holder

pytestmark = pytest.mark.slow


def test_suspended_machine(bench):
    """After a suspended machine has woken up, a contender on it does not take the lease of a living attempt on it."""
    run, slept_s = bench.training("suspended-machine"), 0.0
    watch = Watch(lambda: time.monotonic() + slept_s)
    with run.child("hold") as child:
        after_a_heartbeat(run, child)
        os.kill(child.pid, signal.SIGUSR1)
        eventually(lambda: is_stopped(child), awaited="the holder stands still")
        require_refused(run, watch)
        slept_s = 3600.0
        require_refused(run, watch)
        os.kill(child.pid, signal.SIGCONT)
        after_a_heartbeat(run, child)
        require_refused(run, watch)


def test_suspended_holder(bench):
    """An attempt that stood still while another one finished its run ends when it wakes up, and begins no further write."""
    run = bench.training("suspended-holder")
    with run.child("stop", at=7) as child:
        eventually(lambda: is_stopped(child) or child.poll() is not None, awaited="the first attempt reaches step 7")
        assert child.poll() is None, f"the first attempt failed: {child.poll()}"
        watch = Watch(stepping_clock())
        while holder(run.run) == 1:
            with contextlib.suppress(LeaseHeld):
                claimed = acquire_lease(run.run, run.key, job_state=lambda job: None, owner="chaos", watch=watch)
                run.attempt = claimed.attempt
        run.train()
        bench.require_undisturbed(run)
        before, models = run.objects(), bench.place.list("models/")
        os.kill(child.pid, signal.SIGCONT)
        try:
            code = child.wait(120)
        except subprocess.TimeoutExpired:
            code = None
        changed = {key for key, data in (before.items() ^ run.objects().items())}
        assert not changed, f"the first attempt wrote {', '.join(sorted(changed))} after it had lost the lease"
        assert bench.place.list("models/") == models, "the first attempt wrote to the published models"
        assert code == LEASE_LOST_EXIT_CODE, f"the first attempt ended with {code}, not with {LEASE_LOST_EXIT_CODE}"


@pytest.mark.s3
def test_suspended_holder_on_s3(s3_bench):
    test_suspended_holder(s3_bench)


def test_a_contender_that_trusts_a_long_sleep_is_noticed(fresh):
    with patch.object(liveness, "_LONGEST_LOOK_S", math.inf), pytest.raises(AssertionError, match="living attempt"):
        test_suspended_machine(fresh)


def require_refused(training: Training, watch: Watch) -> None:
    """Looks once as a contender whose Ray does not know the job of the holder."""
    try:
        acquire_lease(training.run, training.key, job_state=lambda job: None, owner="contender", watch=watch)
    except LeaseHeld:
        return
    raise AssertionError(f"a contender took the lease of the living attempt {training.attempt}")


def after_a_heartbeat(training: Training, child: "subprocess.Popen[str]") -> None:
    """Returns once the child has written a further heartbeat."""

    def counter() -> int:
        lease = read_lease(training.run)
        return lease.counter if lease else 0

    before = counter()
    eventually(lambda: counter() > before or child.poll() is not None, awaited="a heartbeat of the holder")
    assert child.poll() is None, f"the holder ended with {child.poll()}"


def is_stopped(child: "subprocess.Popen[str]") -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    return False


def stepping_clock() -> Callable[[], float]:
    """A clock that advances by 4 s at each reading, so that a lease times out without a wait."""
    now = iter(range(0, 1_000_000, 4))
    return lambda: float(next(now))
