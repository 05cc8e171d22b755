"""Two starters, wrong clocks and processes that stand still: at any time one attempt writes a run."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import psutil

from vitline.flows.chaos.bench import Bench, Training, holder
from vitline.flows.chaos.promises import require, wait_until
from vitline.flows.chaos.scenario import scenario
from vitline.infra.runs.claims import Claim, ClaimHeld, read_claim, take_claim
from vitline.infra.runs.run_state import CLAIM_LOST_EXIT_CODE
from vitline.infra.runs.watching import Watch
from vitline.infra.storage import open_store

STARTERS, ROUNDS = 8, 5
TIMEOUT_S = 60.0
AHEAD_S = (61.0, 3600.0)


@scenario("eight starters claim one run at the same moment", "the store", about_s=1)
def two_starters(bench: Bench) -> str:
    """Of several starters of the same run one gets the claim, and the others are told who has it."""
    for number in range(ROUNDS):
        uri, barrier = bench.place.uri_of(f"runs/chaos-race-{number}"), threading.Barrier(STARTERS)

        def start(which: int, uri: str = uri, barrier: threading.Barrier = barrier) -> Claim:
            run = open_store(uri)
            barrier.wait()
            try:
                return take_claim(run, "chaos-race", job_state=lambda job: None, owner=f"starter {which}")
            except ClaimHeld as held:
                return held.claim

        with ThreadPoolExecutor(STARTERS) as pool:
            nonces = {claim.nonce for claim in pool.map(start, range(STARTERS))}
        require(len(nonces) == 1, f"in round {number + 1} {len(nonces)} starters believe that they hold the claim")
    return f"{ROUNDS} times one of {STARTERS} starters"


@scenario("the clock of a claimant is 61 s or an hour ahead", "the store", about_s=5)
def clock_ahead(bench: Bench) -> str:
    """A claimant whose clock is wrong does not take the claim of a living attempt."""
    run, real = bench.training("clock"), time.time
    with run.child("hold") as child:
        for ahead_s in AHEAD_S:
            with patch("time.time", lambda ahead_s=ahead_s: real() + ahead_s):
                watch = Watch()
                for _ in range(5):
                    require_refused(run, watch)
                    after_a_heartbeat(run, child)
    require(holder(run.run) == run.attempt, "another attempt holds the claim")
    return f"refused with clocks {' and '.join(f'{s:g} s' for s in AHEAD_S)} ahead"


@scenario("the machine of holder and claimant is suspended for an hour", "the store", about_s=4)
def suspended_machine(bench: Bench) -> str:
    """After a suspended machine has woken up, a claimant on it does not take the claim of a living attempt on it."""
    run, slept_s = bench.training("suspended-machine"), 0.0
    watch = Watch(lambda: time.monotonic() + slept_s)
    with run.child("hold") as child:
        after_a_heartbeat(run, child)
        require_refused(run, watch)
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(child), "the holder stands still")
        slept_s = 3600.0
        require_refused(run, watch)
        os.kill(child.pid, signal.SIGCONT)
        after_a_heartbeat(run, child)
        require_refused(run, watch)
    return "refused before and after the first heartbeat of the holder"


@scenario("the holder of a claim stands still, loses the claim, and wakes up", "the store", about_s=15)
def suspended_holder(bench: Bench) -> str:
    """An attempt that stood still while another one finished its run ends when it wakes up, and begins no further write."""
    run = bench.training("suspended-holder")
    with run.child("stop", at=7) as child:
        wait_until(lambda: is_stopped(child) or child.poll() is not None, "the first attempt reaches step 7")
        require(child.poll() is None, f"the first attempt failed: {child.poll()}")
        watch = Watch(stepping_clock())
        while holder(run.run) == 1:
            with contextlib.suppress(ClaimHeld):
                claimed = take_claim(run.run, run.key, job_state=lambda job: None, owner="chaos", watch=watch)
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
        require(not changed, f"the first attempt wrote {', '.join(sorted(changed))} after it had lost the claim")
        require(bench.place.list("models/") == models, "the first attempt wrote to the published models")
        require(code == CLAIM_LOST_EXIT_CODE, f"the first attempt ended with {code}, not with {CLAIM_LOST_EXIT_CODE}")
    return "attempt 2 finished the run; attempt 1 woke up, wrote nothing and ended"


def require_refused(training: Training, watch: Watch) -> None:
    """Looks once as a claimant whose Ray does not know the job of the holder."""
    try:
        take_claim(training.run, training.key, job_state=lambda job: None, owner="claimant", watch=watch)
    except ClaimHeld:
        return
    require(False, f"a claimant took the claim of the living attempt {training.attempt}")


def after_a_heartbeat(training: Training, child: "subprocess.Popen[str]") -> None:
    """Returns once the child has written a further heartbeat."""

    def counter() -> int:
        claim = read_claim(training.run)
        return claim.counter if claim else 0

    before = counter()
    wait_until(lambda: counter() > before or child.poll() is not None, "a heartbeat of the holder")
    require(child.poll() is None, f"the holder ended with {child.poll()}")


def is_stopped(child: "subprocess.Popen[str]") -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    return False


def stepping_clock() -> Callable[[], float]:
    """A clock of which every look takes 4 s: nobody has to wait for the time-out of a claim."""
    now = iter(range(0, 1_000_000, 4))
    return lambda: float(next(now))
