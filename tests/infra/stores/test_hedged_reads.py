"""Second requests for late reads: by rule, and on a real S3 service behind a proxy with faults."""

import asyncio
import itertools
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from vitline.infra.storage import open_store
from vitline.infra.stores import hedged_reads, remote_store
from vitline.infra.stores.hedged_reads import HedgedReads

from ...servers import faulty_s3


@pytest.fixture
def late_at_once(monkeypatch):
    monkeypatch.setattr(hedged_reads, "_FIRST_PATIENCE_S", 0.001)
    monkeypatch.setattr(hedged_reads, "_LEAST_PATIENCE_S", 0.001)


class Requests:
    """Each call does the next of `answers`: raises an error, never answers ("never"), or returns."""

    def __init__(self, *answers):
        self.answers, self.done = iter(answers), Counter()

    async def __call__(self):
        answer = next(self.answers)
        try:
            if answer == "never":
                await asyncio.Event().wait()
            await asyncio.sleep(0.005)
            if isinstance(answer, Exception):
                raise answer
            return answer
        except asyncio.CancelledError:
            self.done["cancelled"] += 1
            raise


def read(hedged, requests):
    async def run():
        try:
            return await hedged.read(8, requests)
        finally:
            await asyncio.sleep(0)  # a cancelled request ends

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answers", [("never", "b"), ("b", "never"), (OSError("cut"), "b"), ("b", OSError("cut"))], ids=str
)
def test_the_first_answer_counts_and_the_other_request_is_cancelled(late_at_once, answers):
    requests = Requests(*answers)
    assert read(HedgedReads(), requests) == "b"
    if "never" in answers:
        assert requests.done["cancelled"] == 1


def test_if_both_fail_the_error_is_that_of_the_first(late_at_once):
    with pytest.raises(OSError, match=r"^first$"):
        read(HedgedReads(), Requests(OSError("first"), OSError("second")))


def test_a_read_that_fails_in_time_is_not_asked_again():
    hedged = HedgedReads()
    with pytest.raises(OSError, match=r"^first$"):
        read(hedged, Requests(OSError("first")))
    assert hedged.num_second == 0


def test_a_store_where_all_reads_are_late_or_fail_gets_few_second_requests(late_at_once, monkeypatch):
    monkeypatch.setattr(hedged_reads, "_MOST_MEDIANS", 0.1)
    late, failing = HedgedReads(), HedgedReads()
    for _ in range(100):
        assert read(late, Requests("a", "b")) in "ab"
    assert 8 <= late.num_second <= 8 + 10
    for _ in range(30):
        with pytest.raises(OSError, match="first"):
            read(failing, Requests(OSError("first"), OSError("second")))
    assert failing.num_second <= 8


@pytest.mark.parametrize(
    ("seconds", "patience_s"),
    [
        ([], 2.0),
        ([1.0] * 100, 2.0),
        ([1.0] * 90 + [3.0] * 10, 3.0),
        ([1.0] * 80 + [60.0] * 20, 5.0),
        ([0.001] * 100, 0.1),
    ],
)
def test_a_read_is_late_after_95_percent_of_the_others_within_bounds(seconds, patience_s):
    assert hedged_reads._patience_s(hedged_reads.deque(seconds), 4_000_000) == patience_s


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["slow bytes", "503", "reset", "reply lost", "reply cut"])
def test_bytes_are_right_and_further_requests_are_few_whatever_the_fault(s3_uri, proxy, monkeypatch, caplog, fault):
    monkeypatch.setattr(faulty_s3, "_SLOW_BYTES_S", 20.0)  # less than the silence after which a read fails
    store, data = open_store(s3_uri), os.urandom(400_000)
    store.write("shard", data)
    spans = [(start, start + 1000) for start in range(0, len(data), 1000)]

    def read_all(spans):
        with ThreadPoolExecutor(8) as threads:
            return b"".join(threads.map(lambda span: store.read("shard", *span), spans))

    assert read_all(spans[:20]) == data[:20_000]
    before = proxy.suffered.total()
    proxy.faults, proxy.every = itertools.repeat(fault), 20
    assert read_all(spans) == data
    hedged = remote_store.hedged_reads(os.getpid(), store._service)
    requests = proxy.suffered.total() - before
    assert proxy.suffered[fault] >= len(spans) // 20
    assert hedged.num_second <= 8 + (len(spans) + 20) // 10
    # Each request that suffered is made again, here or, on a connection that was kept alive, by aiohttp.
    assert requests <= len(spans) + hedged.num_second + proxy.suffered[fault]
    if fault == "slow bytes":
        assert hedged.num_second > 0
        assert "trying again" not in caplog.text
