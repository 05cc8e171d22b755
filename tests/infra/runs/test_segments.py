"""Segments of a journal and their merge: readers see the same records before, during and after (infra/runs/segments.py)."""

import uuid

import pytest

from vitline.infra.runs.journal import Journal, read_journal
from vitline.infra.runs.segments import list_segments, merge_journal, read_segments
from vitline.infra.storage import PreconditionFailed
from vitline.infra.stores.memory_store import MemoryStore


class Killed(BaseException):
    """Stands for the end of the process."""


class Mortal(MemoryStore):
    """A store whose process is killed before or after a write, by the number of writes that are left."""

    writes_left = 10**9

    def create(self, key, data):
        self._count()
        tag = super().create(key, data)
        self._count()
        return tag

    def delete(self, key):
        self._count()
        super().delete(key)

    def _count(self):
        self.writes_left -= 1
        if self.writes_left < 0:
            self.writes_left = 10**9
            raise Killed


def seal(journal, *steps):
    for step in steps:
        journal.record({"a": step + 0.5}, step)
        journal.seal()


@pytest.fixture
def run():
    """Two attempts, the first of which was killed, and a second machine."""
    run = Mortal(uuid.uuid4().hex)
    seal(Journal(run, 1, 1e6), 0, 1)
    journal, other = Journal(run, 2, 1e6), Journal(run, 2, 1e6, writer="node-1")
    seal(journal, 2, 3)
    other.record({"system/node1/x": float("nan")}, 3)
    other.close()
    return run


def content(run):
    segments = list_segments(run)
    return segments, [run.read(s.key) if run.exists(s.key) else None for s in segments], repr(read_journal(run))


def merge(run):
    for key in merge_journal(run):
        run.delete(key)


def test_merged_journal_is_one_object_that_is_read_as_its_segments(run):
    segments, texts, records = content(run)
    parts = repr(read_segments(run, segments))
    assert len(segments) == 7
    assert b"" in texts  # the segments that close journals
    merge(run)
    assert run.list() == ["journal/merged-000000.jsonl"]
    assert (list_segments(run), repr(read_journal(run))) == (segments, records)
    assert repr(read_segments(run, segments)) == parts
    assert repr(read_segments(run, [segments[5], segments[1]])) == repr(
        [read_segments(run, [segments[k]])[0] for k in (5, 1)]
    )
    assert merge_journal(run) == []  # a second merge has nothing to do


def test_merge_that_is_killed_anywhere_loses_nothing_and_is_repeated(run):
    segments, _, records = content(run)
    objects, kills = {key: run.read(key) for key in run.list()}, 0
    for writes in range(100):
        for key in run.list():
            run.delete(key)
        for key, data in objects.items():
            run.write(key, data)
        run.writes_left = writes
        try:
            merge(run)
        except Killed:
            kills += 1
            assert (list_segments(run), repr(read_journal(run))) == (segments, records)
            merge(run)
        else:
            break
        assert run.list() == ["journal/merged-000000.jsonl"]
        assert (list_segments(run), repr(read_journal(run))) == (segments, records)
    assert kills == 2 + len(objects)


def test_reader_that_a_merge_overtakes_sees_all_segments(run, monkeypatch):
    """Everything is merged and deleted between two requests of a reader, wherever they are."""
    segments, _, records = content(run)
    objects, number = {key: run.read(key) for key in run.list()}, 0
    for number in range(100):
        for key in run.list():
            run.delete(key)
        for key, data in objects.items():
            run.write(key, data)
        left = [number]
        with monkeypatch.context() as patch:
            for name, method in (("list", run.list), ("read", run.read)):

                def overtaken(*args, real=method, left=left, patch=patch):
                    left[0] -= 1
                    if left[0] < 0:
                        patch.undo()
                        merge(run)
                    return real(*args)

                patch.setattr(run, name, overtaken)
            assert list_segments(run) == segments
            assert repr(read_journal(run)) == records
        if left[0] >= 0:
            break
    assert number > len(objects)


def test_run_that_is_resumed_after_its_merge_goes_on_and_is_merged_again(run):
    before = read_journal(run)
    merge(run)
    journal = Journal(run, 3, 1e6)
    seal(journal, 3, 4)  # step 3 is sealed in the merged object
    records = read_journal(run)
    assert records[:5] != records
    assert repr([r for r in records if r.step < 4]) == repr(before)
    merge(run)
    segments = list_segments(run)
    assert run.list() == ["journal/merged-000000.jsonl", "journal/merged-000001.jsonl"]
    merge(run)  # what is replaced goes at the next time, for whoever reads it meanwhile
    assert run.list() == ["journal/merged-000001.jsonl"]
    assert (list_segments(run), repr(read_journal(run))) == (segments, repr(records))


def test_attempt_that_wakes_after_the_merge_changes_nothing(run):
    """It was suspended before it sealed; the segment that its successor had closed its journal with is merged and deleted."""
    records, closing = repr(read_journal(run)), max(s for s in list_segments(run) if s.attempt == 1 and not s.writer)
    merge(run)
    run.create(closing.key, b'{"seq": 9, "key": "a", "value": 7.0, "step": 9, "timestamp_ms": 5}\n')
    assert repr(read_journal(run)) == records
    merge(run)
    assert run.list() == ["journal/merged-000000.jsonl"]
    assert repr(read_journal(run)) == records


def test_of_two_merges_at_once_one_is_refused(run, overtake):
    records = repr(read_journal(run))
    overtake(run, "create", lambda: merge(run))
    with pytest.raises(PreconditionFailed):
        merge_journal(run)
    assert repr(read_journal(run)) == records


def test_journal_with_an_invalid_segment_is_not_merged(run):
    run.write("journal/a2/segment-000001.jsonl", b'{"seq": 1}\n')
    before = run.list()
    with pytest.raises(ValueError, match=r"a2/segment-000001\.jsonl is not a valid journal segment"):
        merge(run)
    assert run.list() == before


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}\n",
        b"[]\n",
        b'{"schema_version": 1, "segments": [["b", 0, 1]]}\n',
        b'{"schema_version": 2, "segments": []}\n',
    ],
)
def test_error_of_an_invalid_merged_journal_names_it(run, header):
    run.write("journal/merged-000007.jsonl", header)
    with pytest.raises(ValueError, match=r"journal/merged-000007\.jsonl is not a merged journal"):
        list_segments(run)


def test_long_journals_are_read_too(run):
    """The first line, with the place of each segment, is longer than what is read at first."""
    line = b'{"seq": %d, "key": "a", "value": 1.0, "step": %d, "timestamp_ms": 5}\n'
    for number in range(5000):
        run.write(f"journal/a3/segment-{number:06d}.jsonl", line % (number, number))
    merge(run)
    assert run.list() == ["journal/merged-000000.jsonl"]
    assert len(read_journal(run)) == 5001
