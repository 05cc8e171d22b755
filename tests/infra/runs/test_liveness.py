"""Death is decided by what a process saw, not by clocks."""

import itertools
from functools import partial

import pytest

from vitline.infra.runs.liveness import Watch, watch_until_moved


def test_time_counts_while_a_sign_stands_still_and_starts_anew_when_it_moves():
    clock = iter([0.0, 2.0, 4.0, 5.0, 6.0])
    watch = Watch(lambda: next(clock))
    assert [watch.unchanged_s(counter) for counter in (7, 7, 7, 8, 8)] == [0, 2, 4, 0, 1]


def test_a_process_that_was_stopped_between_two_looks_saw_nothing_meanwhile():
    """A frozen virtual machine whose monotonic clock went on: the holder of a lease was frozen, too."""
    clock = iter([0.0, 3600.0, 3601.0])
    watch = Watch(lambda: next(clock))
    assert [watch.unchanged_s(7) for _ in range(3)] == [0, 5, 6]


def test_signs_are_watched_side_by_side_until_each_has_moved_or_stood_still():
    """The first look says nothing. What has moved is not read again, and the others do not start anew."""
    seen, waits = {"dead": [], "alive": [], "late": []}, []

    def look(key):
        seen[key].append(key)
        return {"dead": 0, "alive": len(seen[key]), "late": len(waits) >= 5}[key]

    watches = {key: Watch(lambda: len(waits)) for key in seen}
    moved = watch_until_moved({key: partial(look, key) for key in seen}, 10.0, lambda: waits.append(None), watches)
    assert moved == {"alive", "late"}
    assert {key: len(looks) for key, looks in seen.items()} == {"dead": 11, "alive": 2, "late": 6}
    assert watches["dead"].unchanged_s(0) == 10.0


def test_nothing_is_waited_for_where_everything_moves_or_there_is_nothing_to_watch():
    looks = itertools.count()
    assert watch_until_moved({"alive": lambda: next(looks)}, 1e6, lambda: None) == {"alive"}
    assert watch_until_moved({}, 1e6, lambda: pytest.fail("it waits")) == set()
