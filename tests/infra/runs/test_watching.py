"""Death is decided by what a process saw, not by clocks."""

from infra.runs.watching import Watch


def test_time_counts_while_a_sign_stands_still_and_starts_anew_when_it_moves():
    clock = iter([0.0, 2.0, 4.0, 5.0, 6.0])
    watch = Watch(lambda: next(clock))
    assert [watch.unchanged_s(counter) for counter in (7, 7, 7, 8, 8)] == [0, 2, 4, 0, 1]


def test_a_process_that_was_stopped_between_two_looks_saw_nothing_meanwhile():
    """A frozen virtual machine whose monotonic clock went on: the holder of a claim was frozen, too."""
    clock = iter([0.0, 3600.0, 3601.0])
    watch = Watch(lambda: next(clock))
    assert [watch.unchanged_s(7) for _ in range(3)] == [0, 5, 6]
