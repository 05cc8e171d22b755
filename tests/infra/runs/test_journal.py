"""Journals keep each (key, step) once, whatever is killed or resumed (infra/runs/journal.py)."""

import math
import time
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.infra.runs.journal import Journal, read_journal, seal_factor
from vitline.infra.runs.lease import LeaseHolder, LeaseLost, acquire_lease
from vitline.infra.runs.segments import list_segments
from vitline.infra.storage import open_store
from vitline.infra.stores.memory_store import MemoryStore


class Flaky(MemoryStore):
    """A store whose next `create` fails, before or after the object is written."""

    fails: str | None = None

    def create(self, key, data):
        fails, self.fails = self.fails, None
        if fails == "before":
            raise ConnectionError(fails)
        tag = super().create(key, data)
        if fails == "after":
            raise ConnectionError(fails)
        return tag


OPERATIONS = st.lists(
    st.tuples(st.just("record"), st.sets(st.sampled_from("ab"), min_size=1), st.integers(0, 3))
    | st.tuples(st.sampled_from(["seal", "restart", "resume", "fail before", "fail after", "close"])),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_journal_keeps_the_value_sealed_first_for_each_key_and_step(operations):
    run, attempt, values = Flaky(uuid.uuid4().hex), 1, iter(range(1000))
    sealed: dict[tuple[str, int], float] = {}
    pending: dict[tuple[str, int], float] = {}
    journal = Journal(run, attempt, seal_every_s=1e6)
    for operation, *arguments in operations:
        match operation:
            case "record":
                keys, step = arguments
                point = {key: float(next(values)) for key in sorted(keys)}
                journal.record(point, step)
                pending |= {(k, step): v for k, v in point.items() if (k, step) not in sealed | pending}
            case "seal":
                journal.seal()
                sealed, pending = sealed | pending, {}
            case "fail before" | "fail after" if pending:
                run.fails = operation.removeprefix("fail ")
                try:
                    journal.seal()
                    sealed, pending = sealed | pending, {}  # an earlier seal that failed had written it
                except ConnectionError:
                    if operation == "fail after":  # written, although the journal got an error
                        sealed |= pending
                run.fails = None
            case "close":
                journal.close()
                sealed, pending = sealed | pending, {}
                journal = Journal(run, attempt, seal_every_s=1e6)
            case "restart" | "resume":  # after a kill: the journal is not closed
                attempt += operation == "resume"
                pending = {}
                journal = Journal(run, attempt, seal_every_s=1e6)
    records = read_journal(run)
    assert {(r.key, r.step): r.value for r in records} == sealed
    assert len(records) == len(sealed)
    written = [line for key in run.list("journal/") for line in run.read(key).splitlines()]
    assert len(written) == len(sealed)  # duplicates are dropped when recorded, so a sender sends none
    assert [r.seq for r in records] == sorted({r.seq for r in records})


@pytest.fixture
def run(tmp_path):
    return open_store(tmp_path / "run")


def test_segments_are_numbered_json_lines_and_records_keep_their_values(run, tmp_path):
    before_ms = time.time_ns() // 1_000_000
    journal = Journal(run, 3)
    journal.record({"train/loss": 0.1, "optim/lr": math.inf}, 7)
    journal.record({"train/loss": math.nan, "optim/lr": -math.inf}, 8)
    journal.seal()
    journal.seal()
    journal.record({"train/loss": 1 / 3}, 9)
    journal.close()
    closed = ["journal/a1/segment-000000.jsonl", "journal/a2/segment-000000.jsonl"]  # of attempts that sealed nothing
    assert run.list() == [*closed, "journal/a3/segment-000000.jsonl", "journal/a3/segment-000001.jsonl"]
    assert [run.read(key) for key in closed] == [b"", b""]
    assert b'"key": "optim/lr", "value": "inf", "step": 7' in run.read("journal/a3/segment-000000.jsonl")
    records = read_journal(run)
    assert [(r.seq, r.key, r.step) for r in records] == [
        (0, "train/loss", 7),
        (1, "optim/lr", 7),
        (2, "train/loss", 8),
        (3, "optim/lr", 8),
        (4, "train/loss", 9),
    ]
    assert [r.value for r in records if not math.isnan(r.value)] == [0.1, math.inf, -math.inf, 1 / 3]
    assert math.isnan(records[2].value)
    assert before_ms <= records[0].timestamp_ms <= records[-1].timestamp_ms <= time.time_ns() // 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no local file


def test_attempts_are_read_in_numeric_order(run):
    for attempt in (2, 10):
        journal = Journal(run, attempt)
        journal.record({"a": attempt}, attempt)
        journal.close()
    assert [record.value for record in read_journal(run)] == [2.0, 10.0]


def test_replaced_worker_of_the_same_attempt_does_not_duplicate_points(run):
    old, new = Journal(run, 1), Journal(run, 1)
    old.record({"a": 1.0, "b": 1.0}, 0)
    old.seal()
    new.record({"b": 2.0, "c": 2.0}, 0)
    new.close()
    old.close()
    assert [(r.key, r.value) for r in read_journal(run)] == [("a", 1.0), ("b", 1.0), ("c", 2.0)]
    assert b'"b"' not in run.read("journal/a1/segment-000001.jsonl")


def test_writers_have_separate_folders_and_are_read_together(run, tmp_path):
    """The writer of another machine than rank 0's does not repeat a (key, step) in a resumed attempt either."""
    for attempt in (1, 2):
        first, other = Journal(run, attempt), Journal(run, attempt, writer="node-1")
        for step in range(attempt, attempt + 2):
            first.record({"system/node0/x": attempt}, step)
            other.record({"system/node1/x": attempt}, step)
        first.close()
        other.close()
    assert [segment.key for segment in list_segments(run)] == [
        "journal/a1/segment-000000.jsonl",
        "journal/a1/segment-000001.jsonl",  # empty: attempt 2 has closed this journal
        "journal/a1/node-1/segment-000000.jsonl",
        "journal/a1/node-1/segment-000001.jsonl",
        "journal/a2/segment-000000.jsonl",
        "journal/a2/node-1/segment-000000.jsonl",
    ]
    assert [(r.key[-3:], r.step, r.value) for r in read_journal(run)] == [
        ("0/x", 1, 1.0),
        ("0/x", 2, 1.0),
        ("1/x", 1, 1.0),
        ("1/x", 2, 1.0),
        ("0/x", 3, 2.0),
        ("1/x", 3, 2.0),
    ]
    assert not list(tmp_path.glob("journal-*"))


def test_attempt_that_wakes_while_it_seals_writes_nothing_after_its_successor_has_begun(run, monkeypatch):
    """It was suspended after its last look at the lease. Its successor computes the same steps again and seals them first."""

    def take():
        return acquire_lease(run, "owls-0a", job_state=lambda job: "failed", owner="test").attempt

    first = take()
    old = Journal(run, first, seal_every_s=1e6, check_lease=LeaseHolder(run, first).check)
    old.record({"a": 1.0}, 0)
    old.seal()
    old.record({"a": 1.0}, 1)
    create, attempt = run.create, []

    def suspended(key, data):
        """The last segment of attempt 1 arrives before attempt 2 begins, the one after it later."""
        monkeypatch.undo()
        create(key, data)
        old.record({"a": 1.0}, 2)
        monkeypatch.setattr(run, "create", overtaken)

    def overtaken(key, data):
        monkeypatch.undo()
        attempt.append(take())
        new = Journal(run, attempt[0], seal_every_s=1e6, check_lease=LeaseHolder(run, attempt[0]).check)
        new.record({"a": 2.0}, 1)
        new.record({"a": 2.0}, 2)
        new.close()
        return create(key, data)

    monkeypatch.setattr(run, "create", suspended)
    old.seal()
    with pytest.raises(LeaseLost):
        old.seal()
    assert [(record.step, record.value) for record in read_journal(run)] == [(0, 1.0), (1, 1.0), (2, 2.0)]
    before = run.list("journal/")
    Journal(run, attempt[0]).close()  # workers that are started again close nothing twice
    Journal(run, take()).close()
    assert run.list("journal/") == [*before, "journal/a2/segment-000001.jsonl"]


@pytest.mark.parametrize("from_step", [0, 70, 100])
def test_a_resumed_journal_reads_back_to_its_checkpoint_only_and_repeats_no_later_step(run, monkeypatch, from_step):
    """Each segment has a step. The first attempt was killed at step 100, after its checkpoint of step 70; or right after that of 100."""
    first = Journal(run, 1, seal_every_s=1e6)
    for step in range(101):
        first.record({"a": float(step)}, step)
        first.seal()
    reads, read = [], run.read
    monkeypatch.setattr(run, "read", lambda key, *place: reads.append(key) or read(key, *place))
    resumed = Journal(run, 2, seal_every_s=1e6, from_step=from_step)
    assert len(reads) <= {0: 101, 70: 48, 100: 16}[from_step] + 1
    for step in range(from_step + 1, 103):
        resumed.record({"a": -1.0}, step)
    resumed.close()
    assert [(record.seq, record.step, record.value) for record in read_journal(run)] == [
        (step, step, float(step) if step <= 100 else -1.0) for step in range(103)
    ]


def test_segment_that_arrives_while_its_journal_is_closed_is_known(run, overtake):
    overtake(run, "create", lambda: run.create("journal/a1/segment-000000.jsonl", lines(1)[0]))
    journal = Journal(run, 2)
    journal.record({"a": 5.0}, 1)
    journal.close()
    assert [(record.step, record.value) for record in read_journal(run)] == [(1, 1.0)]


def test_sealing_thread_retries_after_a_failed_write():
    run = Flaky(uuid.uuid4().hex)
    run.fails = "before"
    journal = Journal(run, 1, seal_every_s=0.01)
    journal.record({"a": 1.0}, 0)
    while not read_journal(run):
        time.sleep(0.01)
    journal.close()
    assert [record.value for record in read_journal(run)] == [1.0]


def test_sealing_thread_ends_with_one_line_once_the_lease_is_lost(run, caplog):
    def check():
        raise LeaseLost("attempt 1 lost the lease")

    journal = Journal(run, 1, seal_every_s=0.01, check_lease=check)
    journal.record({"a": 1.0}, 0)
    journal._thread.join(30)
    assert not journal._thread.is_alive()
    (line,) = caplog.records
    assert (line.exc_info, line.getMessage()) == (None, "the journal is not sealed any more: attempt 1 lost the lease")
    assert not run.list("journal/")


@pytest.mark.parametrize("odd", [b'{"seq": 1}\n', b"[" * 100_000])
def test_error_of_an_invalid_segment_names_it(run, odd):
    run.write("journal/a1/segment-000000.jsonl", odd)
    with pytest.raises(ValueError, match=r"a1/segment-000000\.jsonl is not a valid journal segment"):
        Journal(run, 2)


def lines(*steps):
    return [b'{"seq": %d, "key": "a", "value": %d.0, "step": %d, "timestamp_ms": 5}\n' % (n, n, n) for n in steps]


def test_fields_that_a_newer_version_wrote_are_ignored(run):
    run.write("journal/a1/segment-000000.jsonl", lines(1)[0].replace(b"}", b', "unit": "s"}'))
    assert [record.value for record in read_journal(run)] == [1.0]


def test_value_that_is_no_number_is_an_error_and_its_step_can_be_recorded_again(run):
    journal = Journal(run, 1)
    with pytest.raises(TypeError):
        journal.record({"a": None}, 1)
    journal.record({"a": 1.0}, 1)
    journal.close()
    assert [record.value for record in read_journal(run)] == [1.0]


@pytest.mark.parametrize(("writers", "most"), [(1, 13_200), (8, 37_500), (125, 147_000)])
def test_segments_of_a_month_stay_few_enough_to_be_listed(writers, most):
    seconds = segments = 0
    while seconds < 30 * 24 * 3600:
        seconds += 30 * seal_factor(segments, writers)
        segments += 1
    assert segments * writers < most
    assert seal_factor(0, 1) == seal_factor(1000, 1) == seal_factor(125, 8) == 1
