"""Killed processes and full disks: a training goes on as if nothing had happened."""

import itertools
import random
import signal
from unittest.mock import patch

from vitline.flows.chaos.bench import SAVE_EVERY, STEPS, Bench, Training
from vitline.flows.chaos.promises import NotTried, require
from vitline.flows.chaos.scenario import scenario
from vitline.flows.chaos.small_disk import fill, make_room, small_disk
from vitline.infra.runs.run_state import StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import StoreFailed, open_store
from vitline.vit.training.checkpoints.search import newest_checkpoint

AFTER_A_SAVE = 2 * SAVE_EVERY + 2  # the first checkpoint was committed before the second one began


@scenario("SIGKILL at a random step after a checkpoint", "the store", about_s=15)
def killed_process(bench: Bench) -> str:
    """A training that was killed at any moment resumes from its newest checkpoint, and ends bit for bit as without the kill."""
    run, at = bench.training("killed"), random.randrange(AFTER_A_SAVE, STEPS)
    with run.child("kill", at=at) as child:
        _, log = child.communicate()
        if child.returncode != -signal.SIGKILL:
            raise NotTried(f"the process ended by itself before step {at}: {log[-500:]}")
    saved = newest_step_of_whole(run)
    run.claim()
    run.train()
    bench.require_undisturbed(run)
    return f"killed after step {at}, resumed from step {saved}"


@scenario(f"the local disk is full from step {AFTER_A_SAVE} on", "the store", about_s=15)
def full_disk(bench: Bench) -> str:
    """With a full local disk a training whose root lies elsewhere goes on; one on that disk ends with an error, leaves no
    half-written checkpoint, and once there is room ends bit for bit as without the fault."""
    run = bench.training("full-disk")
    with run.child("full-disk", at=AFTER_A_SAVE) as child:
        _, log = child.communicate()
    if bench.on_s3:
        require(child.returncode == 0, f"the training failed for want of a local disk: {log[-500:]}")
        bench.require_undisturbed(run)
        return "the training needed no local disk"
    require(child.returncode != 0, "the training claims to have finished without room for its checkpoints")
    require("File too large" in log or "No space left" in log, f"no error names the full disk: {log[-500:]}")
    saved = newest_step_of_whole(run)
    require(saved > 0, "no checkpoint is left of those that were saved before")
    run.claim()
    run.train()
    bench.require_undisturbed(run)
    return f"ended with an error, resumed from step {saved}"


@scenario(
    f"the file system of the root is full from step {AFTER_A_SAVE} on", "a Linux that lets its users mount", about_s=6
)
def full_file_system(bench: Bench) -> str:
    """A training whose root has no room left ends with an error that says so, leaves no half-written checkpoint, and once there is
    room ends bit for bit as without the fault."""
    _ = bench.undisturbed
    with small_disk() as disk:
        run, steps = Training(open_store(disk).uri, bench.config("full-file-system")), itertools.count(1)

        def asked(poller: StopPoller) -> StopReason | None:
            if next(steps) == AFTER_A_SAVE:
                fill(disk)
            return None

        try:
            with patch.object(StopPoller, "asked", asked):
                ended = run.train()
            require(ended == "failed", f"without room for its checkpoints the training ended as {ended}")
            said = run.reason
        except (OSError, StoreFailed) as error:
            said = str(error)
        require("No space left" in said, f"the error does not name the full file system: {said}")
        saved = newest_step_of_whole(run)
        require(saved > 0, "no checkpoint is left of those that were saved before")
        make_room(disk)
        run.claim()
        run.train()
        bench.require_undisturbed(run)
    return f"ended with an error, resumed from step {saved}"


def newest_step_of_whole(training: Training) -> int:
    """The step of the newest checkpoint, each of which must be whole; 0 without one."""

    def damaged(*what: object) -> None:
        require(False, f"a checkpoint of {training.key} is visible and damaged: {' '.join(map(str, what))}")

    newest = newest_checkpoint(training.run, rejected=damaged)
    return newest[0].step if newest else 0
