"""Metrics of a training reach its journal, whatever the machine's own disk does (infra/runs/journal.py)."""

import tempfile
import uuid

import pytest

from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import LeaseLost, acquire_lease
from vitline.infra.storage import open_store
from vitline.vit.training.reporter import Reporter, close_quietly
from vitline.vit.training.timing.input_waits import wait_fractions, wait_reason


@pytest.fixture
def held():
    """The first attempt of a run, which holds its lease."""
    run = open_store(f"memory://{uuid.uuid4().hex}")
    return Run(run, acquire_lease(run, "owls-0a", job_state=lambda job: None, owner="test").attempt)


def test_full_local_disk_stops_no_training_and_loses_no_metric(tmp_path, monkeypatch, full_disk, held):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Reporter(held, total_steps=4, active=True) as reporter:
        reporter.record(1, {"optim/lr": 0.1})
        with full_disk(150):
            reporter.record(2, {"optim/lr": 0.2})
            reporter.seal()
            reporter.record(3, {"optim/lr": 0.3})
        reporter.record(4, {"optim/lr": 0.4})
    run = held.store
    assert [(record.step, record.value) for record in read_journal(run)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_what_an_attempt_without_its_lease_does_not_write_is_said_once_in_plain_lines(caplog, monkeypatch, held):
    def check(*_):
        raise LeaseLost("attempt 1 lost the lease")

    monkeypatch.setattr(Run, "check", check)
    monkeypatch.setattr("vitline.vit.training.reporter.PROGRESS_EVERY_S", -1.0)
    reporter = Reporter(held, total_steps=9, active=True)
    for step in range(1, 5):
        reporter.record(step, {"train/loss": 0.1, "throughput/images_per_s": 1.0})
        reporter.writing.result()
    with pytest.raises(LeaseLost):
        reporter.__exit__()
    beside = held.journal("node-1")
    beside.record({"system/node1/cpu_fraction": 0.5}, 1)
    close_quietly(beside)
    assert [(line.exc_info, line.getMessage()) for line in caplog.records] == [
        (None, "progress.json is not written any more, because another attempt holds the lease"),
        (None, "the last system metrics of this machine are not written: attempt 1 lost the lease"),
    ]
    assert held.store.list() == ["lease.json"]


def test_a_step_that_is_not_recorded_is_shown_too(monkeypatch, held):
    monkeypatch.setattr("vitline.vit.training.reporter.STEPS_EVERY_S", 0.0)
    run = held.store
    with Reporter(held, total_steps=90, active=True, devices="2 CPUs") as reporter:
        for step in (1, 9):
            reporter.reached(step)
            reporter.writing.result()
        assert run.read_json("progress.json") == {"step": 9, "total_steps": 90, "devices": "2 CPUs"}
        reporter.record(50, {"train/loss": 0.1, "throughput/images_per_s": 1.0})
        reporter.writing.result()
        reporter.reached(51)
    assert run.read_json("progress.json").items() >= {"step": 51, "loss": 0.1}.items()
    assert {record.step for record in read_journal(run)} == {50}, "only what was recorded is in the journal"


def test_the_reason_of_waits_is_logged_once_and_stands_in_the_progress(caplog, monkeypatch, held):
    monkeypatch.setattr("vitline.vit.training.reporter.PROGRESS_EVERY_S", -1.0)
    run = held.store
    loss = {"train/loss": 0.1, "throughput/images_per_s": 1.0}
    with Reporter(held, total_steps=9, active=True) as reporter:
        for step, (store, decode) in enumerate(
            [(0.5, 0.0), (0.1, 0.33), (0.1, 0.34), (0.05, 0.0), (0.4, 0.1)], start=1
        ):
            reporter.record(step, loss | wait_fractions(store + decode, store, decode, 1.0))
            if step == 1:
                reporter.writing.result()
                assert run.read_json("progress.json")["input_wait"] == ""
    first = "waits 43 % of the time for data: decoding is slow"
    last = "waits 50 % of the time for data: the store is slow"
    assert [record.getMessage() for record in caplog.records] == [
        f"step=2: training {first}; `vitline data bench` says what to change",
        f"step=5: training {last}; `vitline data bench` says what to change",
    ]
    assert run.read_json("progress.json")["input_wait"] == last
    assert run.read_json("progress.json")["slow_rank"] == ""
    assert wait_reason(wait_fractions(0.05, 0.05, 0.0, 1.0)) == ""
