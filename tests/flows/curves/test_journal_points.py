"""What a reader of curves gets while the run's store or the reader itself is away."""

from pathlib import Path

import pytest

from vitline.flows.curves.journal_points import Curves
from vitline.infra.runs.claims import take_claim
from vitline.infra.runs.journal import Journal
from vitline.infra.storage import open_store


class Reader(Curves):
    """Takes points while it is there, and tells no points that it has."""

    def __init__(self, run):
        super().__init__(run)
        self.got, self.there = [], True

    def points(self):
        return ()

    def add(self, record):
        if not self.there:
            raise ConnectionError("the reader is away")
        self.got.append(record.step)

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def run(root):
    return open_store(root).child("runs/birds-0a1b")


@pytest.fixture
def journal(run):
    take_claim(run, "birds-0a1b", job_state=lambda job: "running", owner="test")
    return Journal(run, 1)


def sealed(journal, step):
    journal.record({"train/loss": 1.0}, step)
    journal.seal()


def test_a_reader_that_was_away_gets_all_points_anew(run, journal):
    reader = Reader(run)
    sealed(journal, 1)
    assert reader.write() == 1
    sealed(journal, 2)
    reader.there = False
    with pytest.raises(ConnectionError):
        reader.write()
    reader.there = True
    assert (reader.write(), reader.got) == (2, [1, 1, 2])


def test_a_segment_that_cannot_be_read_sends_no_point_twice(run, journal, root):
    reader = Reader(run)
    sealed(journal, 1)
    reader.write()
    sealed(journal, 2)
    segment = sorted(Path(root).rglob("segment-*.jsonl"))[-1]
    whole = segment.read_bytes()
    segment.write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=segment.name):
        reader.write()
    segment.write_bytes(whole)
    assert (reader.write(), reader.got) == (1, [1, 2])
