"""Who watches the tasks of an attempt, and how often a task may hang."""

import pytest

from vitline.infra.runs.task_watch import MOST_ENDS, TaskWatch
from vitline.infra.runs.watchdog import Watchdog, note_progress
from vitline.infra.storage import open_store


def test_a_task_that_hung_too_often_in_this_attempt_fails_with_its_last_error(tmp_path):
    run, watch = open_store(tmp_path), TaskWatch(str(tmp_path), 2)
    for number in range(MOST_ENDS):
        assert isinstance(watch.over("write-a-7"), Watchdog)
        for name in (f"a2-{number}-write-a-7", f"a1-{number}-write-a-8", f"a2-{number}-write-a-9"):
            run.write_json(f"errors/{name}.json", {"error": f"it is in read, {name}"})
    with pytest.raises(
        RuntimeError,
        match=r"write-a-7 was tried 3 times, and its process ended each time; the last error: it is in read, a2-2-write-a-7",
    ):
        watch.over("write-a-7")
    assert isinstance(watch.over("write-a-8"), Watchdog)


def test_progress_of_code_that_knows_no_watchdog_reaches_those_that_are_open(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Watchdog, "progress", lambda watchdog: told.append(watchdog._who))
    watch = TaskWatch(str(tmp_path), 1)
    note_progress()
    with watch.over("outer"), watch.over("inner"):
        note_progress()
    note_progress()
    assert told == ["outer", "inner"]
