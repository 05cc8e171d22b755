"""Killed processes and full disks: a training goes on as if nothing had happened."""

import itertools
import random
import signal
from unittest.mock import patch

import pytest

from vitline.infra.runs.run_state import StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import StoreFailed, open_store
from vitline.vit.checkpoints.restore import newest_checkpoint

from ..servers import small_disk as disks
from .bench import SAVE_EVERY, STEPS, Training, from_the_first_batch

pytestmark = pytest.mark.slow

AFTER_A_SAVE = 2 * SAVE_EVERY + 2  # the first checkpoint was committed before the second one began


def test_killed_process(bench):
    """A training that was killed at any moment resumes from its newest checkpoint, and ends bit for bit as without the kill."""
    run, at = bench.training("killed"), random.randrange(AFTER_A_SAVE, STEPS)
    with run.child("kill", at=at) as child:
        _, log = child.communicate()
        assert child.returncode == -signal.SIGKILL, f"the process ended by itself before step {at}: {log[-500:]}"
    newest_step_of_whole(run)
    run.lease()
    run.train()
    bench.require_undisturbed(run)


def test_full_disk(bench):
    """With a full local disk a training whose root lies elsewhere goes on; one on that disk ends with an error, leaves no
    half-written checkpoint, and once there is room ends bit for bit as without the fault."""
    run = bench.training("full-disk")
    with run.child("full-disk", at=AFTER_A_SAVE) as child:
        _, log = child.communicate()
    if bench.on_s3:
        assert child.returncode == 0, f"the training failed for want of a local disk: {log[-500:]}"
        bench.require_undisturbed(run)
        return
    assert child.returncode != 0, "the training leases to have finished without room for its checkpoints"
    assert "File too large" in log or "No space left" in log, f"no error names the full disk: {log[-500:]}"
    saved = newest_step_of_whole(run)
    assert saved > 0, "no checkpoint is left of those that were saved before"
    run.lease()
    run.train()
    bench.require_undisturbed(run)


def test_full_file_system(bench):
    """A training whose root has no room left ends with an error that says so, leaves no half-written checkpoint, and once there is
    room ends bit for bit as without the fault."""
    _ = bench.undisturbed
    with disks.small_disk() as disk:
        run, steps = Training(open_store(disk).uri, bench.config("full-file-system")), itertools.count(1)

        def asked(poller: StopPoller) -> StopReason | None:
            if next(steps) == AFTER_A_SAVE:
                disks.fill(disk)
            return None

        try:
            with patch.object(StopPoller, "asked", asked):
                ended = run.train()
            assert ended == "failed", f"without room for its checkpoints the training ended as {ended}"
            said = run.reason
        except (OSError, StoreFailed) as error:
            said = str(error)
        assert "No space left" in said, f"the error does not name the full file system: {said}"
        saved = newest_step_of_whole(run)
        assert saved > 0, "no checkpoint is left of those that were saved before"
        disks.make_room(disk)
        run.lease()
        run.train()
        bench.require_undisturbed(run)


@pytest.mark.s3
def test_full_disk_on_s3(s3_bench):
    test_full_disk(s3_bench)


@pytest.mark.parametrize("scenario", [test_killed_process, test_full_disk, test_full_file_system])
def test_a_training_that_resumes_at_other_batches_is_noticed(scenario, fresh):
    with from_the_first_batch(), pytest.raises(AssertionError, match="than an undisturbed training"):
        scenario(fresh)


def newest_step_of_whole(training: Training) -> int:
    """The step of the newest checkpoint, each of which must be whole; 0 without one."""

    def damaged(*what: object) -> None:
        raise AssertionError(f"a checkpoint of {training.key} is visible and damaged: {' '.join(map(str, what))}")

    newest = newest_checkpoint(training.run, rejected=damaged)
    return newest[0].step if newest else 0
