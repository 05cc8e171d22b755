"""What a Slurm job does with the end of its command, and with a signal before it; Ray and Slurm are stand-ins."""

from signal import SIGTERM, SIGUSR1
from types import SimpleNamespace

import pytest

from vitline.infra.slurm.job import StoppedEarly, run

RESUMABLE = ["sh", "-c", "trap 'exit 143' TERM; while :; do sleep 0.02; done"]


class Runs:
    """The first look sees the signals arrive."""

    def __init__(self, signals, coming, begun):
        self.signals, self.coming, self.have_begun = signals, coming, lambda: begun

    def look(self):
        self.signals.came[:] = self.coming


def end_of(command, coming=(), begun=True, ray_ended=False):
    """Exit code, and whether the job is requeued."""
    signals = SimpleNamespace(came=[], wait=False)
    ray = SimpleNamespace(env={}, has_ended=lambda: ray_ended)
    return run(command, ray, Runs(signals, list(coming), begun), signals)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_command_and_nothing_is_requeued(code):
    assert end_of(["sh", "-c", f"exit {code}"]) == (code, False)


def test_a_killed_command_has_the_code_of_a_shell():
    assert end_of(["sh", "-c", "kill -9 $$"]) == (137, False)


@pytest.mark.parametrize(
    ("coming", "begun", "requeued"),
    [
        ((SIGUSR1,), True, True),
        ((SIGUSR1,), False, False),
        ((SIGTERM,), True, False),
        ((SIGUSR1, SIGTERM), True, False),
    ],
    ids=["time limit", "time limit while all waits", "cancelled", "cancelled at the time limit"],
)
def test_only_the_time_limit_of_a_job_that_works_requeues_it(coming, begun, requeued):
    assert end_of(RESUMABLE, coming, begun) == (143, requeued)


def test_a_command_that_finishes_at_the_time_limit_is_not_requeued():
    done = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.02; done"]
    assert end_of(done, (SIGUSR1,)) == (0, False)


def test_a_command_does_not_outlive_its_ray():
    assert end_of(RESUMABLE, ray_ended=True) == (1, False)


def test_a_signal_before_the_command_starts_nothing():
    signals = SimpleNamespace(came=[SIGUSR1], wait=False)
    with pytest.raises(StoppedEarly, match="SIGUSR1"):
        run(["false"], None, None, signals)
