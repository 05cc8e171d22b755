"""Every point of a journal is in the event files of its run exactly once, whoever was interrupted, and others can read them."""

import struct
import time
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from vitline.flows.curves import curve_writer, event_files
from vitline.flows.curves.curve_writer import CurveWriter, readers
from vitline.flows.curves.event_files import write_curves
from vitline.infra.runs.claims import take_claim
from vitline.infra.runs.journal import Journal
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def journal(store):
    """The journal of a run that has just begun."""
    run = store.child("runs/birds-0a1b")
    run.write_json("config.json", {})
    take_claim(run, "birds-0a1b", job_state=lambda job: "running", owner="test")
    return Journal(run, 1)


def written(folder: Path) -> list[tuple[str, int, float, float]]:
    """Tag, step, value and time of every event, read as TensorBoard's format is published: length, checksum, event, checksum."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value, event.wall_time) for value in event.summary.value]
            data = data[16 + length :]
    return sorted(found)


def sealed(journal, *steps):
    for step in steps:
        journal.record({"train/loss": 1 / step, "optim/lr": 0.25}, step)
    journal.seal()


def test_points_are_added_once_by_any_number_of_calls(store, journal, tmp_path):
    said = []

    def write():
        said.clear()
        write_curves(store, tmp_path / "curves", [], follow=False, report=said.append)
        return said

    sealed(journal, 1, 2)
    assert write() == ["birds-0a1b: 4 points"]
    assert write() == []
    sealed(journal, 4)
    assert write() == ["birds-0a1b: 2 points"]
    found = written(tmp_path / "curves/birds-0a1b")
    assert [(tag, step, value) for tag, step, value, _ in found] == [
        ("optim/lr", 1, 0.25), ("optim/lr", 2, 0.25), ("optim/lr", 4, 0.25),
        ("train/loss", 1, 1.0), ("train/loss", 2, 0.5), ("train/loss", 4, 0.25),
    ]  # fmt: skip
    assert all(time > 1.7e9 for *_, time in found)


def test_a_file_that_was_cut_short_loses_no_point(store, journal, tmp_path):
    sealed(journal, 1, 2)
    write_curves(store, tmp_path, [], follow=False, report=lambda text: None)
    (file,) = (tmp_path / "birds-0a1b").iterdir()
    data, said = file.read_bytes(), []
    file.write_bytes(data[:-10])
    write_curves(store, tmp_path, ["birds"], follow=False, report=said.append)
    assert said == ["birds-0a1b: 1 points"]


def test_a_run_is_followed_to_its_end(store, journal, tmp_path, monkeypatch):
    run, said = store.child("runs/birds-0a1b"), []

    def meanwhile(seconds):
        assert said, "nothing was written before the wait"
        sealed(journal, 2)
        run.write_json("state.json", {"state": "finished", "attempt": 1, "updated_at": 0.0})

    monkeypatch.setattr(event_files.time, "sleep", meanwhile)
    sealed(journal, 1)
    write_curves(store, tmp_path, ["birds-0a1b"], follow=True, report=said.append)
    assert said == ["birds-0a1b: 2 points", "birds-0a1b: 2 points"]
    assert {step for _, step, *_ in written(tmp_path / "birds-0a1b")} == {1, 2}


def test_a_flow_writes_the_curves_of_its_runs_and_nothing_that_goes_wrong_disturbs_it(
    store, journal, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(curve_writer, "POLL_S", 0.01)
    sealed(journal, 1)
    with CurveWriter(store.uri, readers(Settings(tensorboard=tmp_path / "curves"))) as curves:
        curves.follow("birds-0a1b")
        curves.follow("birds-0a1b")
        while not (tmp_path / "curves").exists():
            time.sleep(0.01)
        sealed(journal, 2)
    assert [step for _, step, *_ in written(tmp_path / "curves/birds-0a1b")] == [1, 2, 1, 2]
    (tmp_path / "file").write_text("in the way")
    with CurveWriter(store.uri, readers(Settings(tensorboard=tmp_path / "file"))) as curves:
        curves.follow("birds-0a1b")
    with CurveWriter(store.uri, readers(Settings())) as curves:
        curves.follow("birds-0a1b")
    assert [record.getMessage() for record in caplog.records] == [f"curves could not be written to {tmp_path / 'file'}"]


def test_a_key_that_matches_no_run_is_named(store, journal, tmp_path):
    with pytest.raises(ValueError, match=r"no run 'brids' below .*available: birds-0a1b"):
        write_curves(store, tmp_path, ["brids"], follow=False, report=print)
