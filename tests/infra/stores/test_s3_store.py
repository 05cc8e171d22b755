"""How s3:// stores handle lost replies and failing services; test_storage.py tests what all stores promise."""

import contextlib
import itertools
import os
import pickle
import re
import subprocess
import sys
import threading

import pytest

pytest.importorskip("s3fs", reason="the extra `prep` is not installed")

from vitline.infra.storage import PreconditionFailed, StoreFailed, StoreRefused, open_store
from vitline.infra.stores import remote_store, s3_store
from vitline.infra.stores.remote_store import Answer

from ...servers.small_buckets import service_of


@pytest.fixture
def service(monkeypatch, no_waits):
    with service_of("s3", monkeypatch) as server:
        yield server


@pytest.fixture
def store(service):
    return open_store("s3://bucket/runs")


@pytest.mark.parametrize("faults", [[500, 503], ["reply lost"], [429, "reply lost", 503]])
def test_transient_faults_are_retried(store, service, faults):
    service.faults = list(faults)
    store.write("a", b"1")
    service.faults = list(faults)
    assert store.read("a") == b"1"
    assert service.requests == ["PUT"] * (len(faults) + 1) + ["GET"] * (len(faults) + 1)


_WITHOUT_ETAG, _OF_NOTHING = b"200 OK\n", b'200 OK\r\nETag: "d41d8cd98f00b204e9800998ecf8427e"\n'
_OTHER_RANGE = b'206 OK\r\nETag: "x"\r\nContent-Range: bytes 0-1/10\n01'
_SHORT_RANGE = b'206 OK\r\nETag: "x"\r\nContent-Range: bytes 2-5/10\n23'


@pytest.mark.parametrize(
    "odd", [_WITHOUT_ETAG, _OF_NOTHING, _OTHER_RANGE, _SHORT_RANGE, b'200 OK\r\nETag: "x"\n0123456789', 416]
)
def test_an_odd_reply_to_a_range_is_repeated(store, service, odd):
    store.write("a", b"0123456789")
    service.faults = [odd]
    assert store.read("a", 2, 6) == b"2345"
    assert store.read("a", 10) == store.read("a", 12, 14) == b""


@pytest.mark.parametrize("odd", [_WITHOUT_ETAG, _OF_NOTHING])
def test_success_without_its_result_is_repeated(store, service, odd):
    service.faults = [_WITHOUT_ETAG]
    store.write("a", b"0123456789")  # else it would be lost
    service.faults = [odd]
    assert store.read("a") == b"0123456789"
    service.faults = [_WITHOUT_ETAG]
    assert store.size("a") == 10
    service.faults = [_WITHOUT_ETAG, 503]
    tag = store.create("b", b"")
    assert store.read_tagged("b") == (b"", tag)
    service.faults = [_WITHOUT_ETAG] * 9
    with pytest.raises(StoreFailed, match=r"put_object of .* at attempt 9.*no ETag"):
        store.write("a", b"1")
    assert service.objects["/bucket/runs/a"] == b"0123456789"


@pytest.mark.parametrize(
    ("status", "code", "waits"),
    [
        (429, "", [0.4, 0.8]),
        (503, "SlowDown", [0.4, 0.8]),
        (503, "ServiceUnavailable", [0.2, 0.4]),
        (0, "", [0.02, 0.4]),
    ],
)
def test_a_throttled_request_waits_longer_and_one_on_a_broken_connection_hardly(monkeypatch, status, code, waits):
    monkeypatch.setattr(remote_store.random, "uniform", lambda low, high: high)
    answer = Answer(status, code)
    assert [answer.wait_s(attempt) for attempt in (1, 2)] == pytest.approx(waits)
    assert answer.wait_s(9) == 10.0


def test_error_of_a_permanent_fault_names_operation_object_and_attempts(store, service):
    service.faults = [503] * 20
    with pytest.raises(RuntimeError, match=r"put_object of s3://bucket/runs/a failed at attempt 9, after \d+ s: .*"):
        store.write("a", b"1")
    assert len(service.requests) == 9


@pytest.mark.parametrize("first", [[], [403], [412]], ids=["success", "forbidden", "condition"])
def test_a_service_that_has_answered_is_asked_longer_than_one_that_never_has(
    store, service, monkeypatch, caplog, first
):
    monkeypatch.setattr(remote_store, "_PATIENCE_S", 300.0)
    service.faults = [503] * 20
    with pytest.raises(RuntimeError, match="failed at attempt 9"):
        store.write("a", b"1")
    service.faults = list(first)
    with contextlib.suppress(RuntimeError):
        store.write("a", b"1")
    service.faults = [503] * 20
    caplog.clear()
    with contextlib.suppress(FileNotFoundError):  # what was never written
        store.read("a")
    assert [record.args[2] for record in caplog.records] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("status", [400, 401, 403, 414])
def test_object_that_can_never_be_read_is_refused_at_once(store, service, status):
    service.faults = [status]
    with pytest.raises(
        StoreRefused, match=r"get_object of s3://bucket/runs/a failed at attempt 1.*injected"
    ) as refused:
        store.read("a")
    assert status != 403 or "credentials" in str(refused.value)
    assert service.requests == ["GET"]


def test_error_of_an_unreachable_service_names_object_and_next_step(service, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        RuntimeError, match=r"get_object of s3://bucket/a failed at attempt 9.*Check that the store runs"
    ):
        open_store("s3://bucket").read("a")


def test_conditional_write_succeeds_if_its_reply_is_lost(store, service):
    service.faults = ["reply lost"]
    tag = store.create("lease", b"nonce 1")
    assert store.read_tagged("lease") == (b"nonce 1", tag)
    service.faults = ["reply lost"]
    tag = store.compare_and_swap("lease", b"nonce 2", tag)
    assert store.read_tagged("lease") == (b"nonce 2", tag)


@pytest.mark.parametrize("operation", ["create", "compare_and_swap"])
def test_retried_conditional_write_fails_if_another_writer_was_first(store, service, operation):
    before = store.create("compare_and_swap", b"before")

    def another_writer_wins():
        service.objects[f"/bucket/runs/{operation}"] = b"someone else"
        service.writers[f"/bucket/runs/{operation}"] = "someone else"

    service.faults = [503, another_writer_wins]
    with pytest.raises(PreconditionFailed):
        store.create("create", b"mine") if operation == "create" else store.compare_and_swap(operation, b"mine", before)
    assert store.read(operation) == b"someone else"


def test_create_fails_if_another_writer_wrote_equal_bytes(store):
    store.create("lease", b"same")
    with pytest.raises(PreconditionFailed):
        store.create("lease", b"same")


def test_conditional_write_is_retried_after_a_conflict(store, service):
    service.faults = [409]
    store.create("lease", b"1")
    assert service.requests == ["PUT", "PUT"]


def test_request_without_a_reply_is_retried_after_a_timeout(service, monkeypatch):
    monkeypatch.setattr(remote_store, "SILENCE_S", 0.2)
    s3_store._filesystem.cache_clear()
    service.faults = [threading.Event().wait] * 2  # forever
    store = open_store("s3://bucket/runs")
    store.write("a", b"1")
    assert store.read("a") == b"1"
    s3_store._filesystem.cache_clear()


def test_store_failure_keeps_status_and_code_when_pickled(store, service):
    service.faults = [403]
    with pytest.raises(StoreFailed) as failed:
        store.read("a")
    again = pickle.loads(pickle.dumps(failed.value))
    assert (again.status, again.code, str(again)) == (403, "Fault403", str(failed.value))


@pytest.fixture
def profiles(tmp_path, monkeypatch, service):
    """AWS files with the profile `lab` for the service, while the variables name another one."""
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile lab]\nendpoint_url = {service.url}\nregion = eu-north-1\n")
    credentials.write_text("[lab]\naws_access_key_id = of-the-lab\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    s3_store._place_of.cache_clear()
    yield
    s3_store._place_of.cache_clear()


def test_a_profile_has_endpoint_region_and_keys_of_its_own(service, profiles):
    store = open_store("s3+lab://bucket/photos")
    store.write("a.jpg", b"1")
    assert service.objects == {"/bucket/photos/a.jpg": b"1"}
    assert re.search("Credential=of-the-lab/.*/eu-north-1/s3/", service.signed)
    again = pickle.loads(pickle.dumps(store)).child("x")
    assert again.uri == "s3+lab://bucket/photos/x"
    assert again._service == store._service != open_store("s3://bucket/photos")._service


def test_an_unknown_profile_is_refused_with_the_next_step(service, profiles):
    with pytest.raises(StoreRefused, match=r"get_object of s3\+nobody://bucket/a failed at attempt 1.*\(nobody\)"):
        open_store("s3+nobody://bucket").read("a")


@pytest.mark.s3
@pytest.mark.parametrize("reply", ["ignored", "other"])
def test_a_range_is_refused_unless_the_reply_has_exactly_that_range(s3_uri, proxy, reply):
    store = open_store(s3_uri)
    data = os.urandom(1000)
    store.write("shard", data)
    store.write("empty", b"")
    spans = [(0, 10), (100, 200), (990, 2000), (999, 1000), (5, None), (0, 1000)]
    assert [store.read("shard", *span) for span in spans] == [data[slice(*span)] for span in spans]
    assert store.read("empty", 0, 10) == store.read("empty", 3) == b""
    proxy.range_faults = itertools.repeat(reply)
    for span in spans:
        with pytest.raises(
            StoreFailed, match=f"get_object of {store.uri_of('shard')} .*range bytes={span[0]}-"
        ) as failed:
            store.read("shard", *span)
        assert str(failed.value).endswith(
            "Let the proxy or cache before the store pass on the header Range, or read the store without it."
        )
    with pytest.raises(StoreFailed, match="status 20"), store.open("shard") as file:
        file.read()
    with pytest.raises(StoreFailed, match="status 20"):
        store.read_into("shard", 1, memoryview(bytearray(4)))
    assert store.read("shard") == data


@pytest.mark.s3
def test_large_objects_are_uploaded_in_parts_and_an_aborted_upload_leaves_nothing(s3_uri, monkeypatch):
    monkeypatch.setattr(remote_store, "PART_BYTES", 5 * 1024 * 1024)
    store = open_store(s3_uri)
    data = os.urandom(1024 * 1024) * 23
    with store.writer("large") as file:
        for start in range(0, len(data), 3_000_000):
            file.write(data[start : start + 3_000_000])
    assert store.read("large") == data

    def write_half():
        with store.writer("half") as file:
            file.write(data)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert store.list() == ["large"]
    assert store.leftovers(older_than_s=-60) == []
    store.delete("large")


@pytest.mark.s3
def test_multipart_upload_succeeds_if_the_reply_to_its_completion_is_lost(s3_uri, monkeypatch):
    monkeypatch.setattr(remote_store, "PART_BYTES", 5 * 1024 * 1024)
    store = open_store(s3_uri)
    call = store._call

    def reply_lost(method, key, **arguments):
        if method == "complete_multipart_upload":
            call(method, key, **arguments)
        return call(method, key, **arguments)

    monkeypatch.setattr(store, "_call", reply_lost)
    with store.writer("large") as file:
        file.write(bytes(6 * 1024 * 1024))
    assert store.size("large") == 6 * 1024 * 1024
    store.delete("large")


KILLED_WRITER = """
import os, signal, sys
from vitline.infra.stores import remote_store
from vitline.infra.storage import open_store
remote_store.PART_BYTES = 5 * 1024 * 1024
with open_store(sys.argv[1]).writer("runs/half ü") as file:
    file.write(bytes(6 * 1024 * 1024))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.s3
def test_upload_of_a_killed_writer_is_found_and_discarded(s3_uri):
    store = open_store(s3_uri)
    subprocess.run([sys.executable, "-c", KILLED_WRITER, s3_uri])
    assert store.list() == []
    assert store.leftovers(older_than_s=60) == []
    (found,) = store.leftovers(older_than_s=-60)  # a minute is more than clocks differ
    assert found.startswith("runs/half ü?uploadId=")
    assert open_store(f"{s3_uri}/run").leftovers(older_than_s=-60) == []
    assert store.discard_leftovers(older_than_s=-60) == [found]
    assert store.leftovers(older_than_s=-60) == []
