"""What needs a person, looked for again and again in a store, with jobs that make steps and jobs that do not."""

import pytest

from vitline.flows.on_prefect.alerts import problems
from vitline.flows.on_prefect.alerts.problems import SEEN, notify_new
from vitline.infra.ray_jobs import Job
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


@pytest.fixture
def looks(tmp_path, monkeypatch):
    """look(minutes): what a check reports, `minutes` after the first one."""
    root = open_store(str(tmp_path / "store"))
    settings = Settings(root=root.uri, prefect_api_url=None)
    jobs = [Job(id="pretrain-1", state="running", exit_code=None, message="", metadata={"run_key": "city-0a"})]

    def look(minutes, min_free_bytes=0.0):
        told = []
        monkeypatch.setattr(problems.time, "time", lambda: 1e9 + 60 * minutes)
        notify_new(settings, root, jobs, told.append, stalled_minutes=30.0, min_free_bytes=min_free_bytes)
        return [(problem.kind, problem.subject) for problem in told]

    return root, look


def step(root, number):
    root.write_json("runs/city-0a/config.json", {})
    root.write_json("runs/city-0a/progress.json", {"step": number, "total_steps": 100})


def test_a_job_without_a_step_is_told_once_and_again_after_it_went_on(looks):
    root, look = looks
    step(root, 1)
    assert look(0) == []
    step(root, 2)
    assert look(29) == []
    assert look(58) == []
    assert look(60) == [("stalled", "city-0a")]
    assert look(75) == []
    step(root, 3)
    assert look(90) == []
    assert look(120) == [("stalled", "city-0a")]


def test_a_full_disk_is_told_once_and_an_alert_that_failed_is_told_again(looks, monkeypatch):
    root, look = looks
    assert look(0) == []
    (found,) = look(5, min_free_bytes=1e18)
    assert found[0] == "disk"
    assert look(10, min_free_bytes=1e18) == []
    assert look(15) == []

    def away(_):
        raise OSError("Prefect is away")

    with pytest.raises(OSError, match="away"):
        notify_new(Settings(root=root.uri), root, [], away, stalled_minutes=30.0, min_free_bytes=1e18)
    assert len(look(20, min_free_bytes=1e18)) == 1


def test_a_record_that_cannot_be_read_costs_one_repeated_alert(looks):
    root, look = looks
    look(0, min_free_bytes=1e18)
    root.write(SEEN, b'{"told": 3}')
    assert len(look(15, min_free_bytes=1e18)) == 1
    assert look(30, min_free_bytes=1e18) == []


def test_a_preparation_is_seen_by_its_units_and_a_trial_is_left_to_its_watchdog(looks):
    root, look = looks
    root.write_json("runs/city-0a/config.json", {"requests": [{"name": "city"}]})
    assert look(0) == []
    assert look(31) == [("stalled", "city-0a")]
    root.write_json("runs/city-0a/config.json", {})
    root.write_json("runs/city-0a/progress.json", {"step": 3, "total_steps": 9, "unit": "trials"})
    assert look(40) == []
    assert look(99) == []
