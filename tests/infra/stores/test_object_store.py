"""How gs:// stores handle lost replies and failing services; test_storage.py tests what all stores promise, az:// among them."""

import os
import pickle
import subprocess
import sys
import uuid

import pytest

pytest.importorskip("obstore", reason="the extra `prep` is not installed")

from vitline.infra.storage import PreconditionFailed, StoreFailed, StoreRefused, open_store
from vitline.infra.stores import object_store, remote_store

from ...servers.small_buckets import service_of


@pytest.fixture
def service(monkeypatch, no_waits):
    with service_of("gs", monkeypatch) as server:
        yield server


@pytest.fixture
def store(service):
    return open_store("gs://bucket/runs")


@pytest.mark.parametrize("faults", [[500, 503], ["reply lost"], [429, "reply lost", 503]])
def test_transient_faults_are_retried(store, service, faults):
    service.faults = list(faults)
    store.write("a", b"1")
    service.faults = list(faults)
    assert store.read("a") == b"1"
    service.faults = list(faults)
    assert store.list() == ["a"]
    assert service.requests == ["PUT"] * (len(faults) + 1) + ["GET"] * 2 * (len(faults) + 1)


_HEAD = b'200 OK\r\nETag: "x"\r\nx-goog-generation: 1\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT'
_PART = _HEAD.replace(b"200", b"206")


@pytest.mark.parametrize(
    "odd",
    [
        b"200 OK\n",
        _HEAD + b"\n",
        _HEAD + b"\n0123456789",
        _PART + b"\r\nContent-Range: bytes 0-1/10\n01",
        _PART + b"\r\nContent-Range: bytes 2-5/10\n23",
        416,
    ],
)
def test_an_odd_reply_to_a_range_is_repeated(store, service, odd):
    store.write("a", b"0123456789")
    service.faults = [odd]
    assert store.read("a", 2, 6) == b"2345"
    assert store.read("a", 10) == store.read("a", 12, 14) == b""


def test_a_range_that_is_never_answered_is_an_error_with_its_next_step(store, service):
    store.write("a", b"0123456789")
    service.faults = [_HEAD + b"\n0123456789"] * 3
    with pytest.raises(StoreFailed, match=r"get_object of gs://bucket/runs/a failed at attempt 3.*header Range"):
        store.read("a", 2, 6)


def test_success_without_its_result_is_repeated(store, service):
    service.faults = [b"200 OK\n"]
    store.write("a", b"0123456789")  # else it would be lost
    service.faults = [_HEAD + b"\n"]
    assert store.read("a") == b"0123456789"
    service.faults = [b"200 OK\n", 503]
    tag = store.create("b", b"")
    assert store.read_tagged("b") == (b"", tag)


def test_conditional_write_succeeds_if_its_reply_is_lost(store, service):
    service.faults = ["reply lost"]
    tag = store.create("lease", b"nonce 1")
    assert store.read_tagged("lease") == (b"nonce 1", tag)
    service.faults = ["reply lost"]
    tag = store.compare_and_swap("lease", b"nonce 2", tag)
    assert store.read_tagged("lease") == (b"nonce 2", tag)
    with pytest.raises(PreconditionFailed):
        store.create("lease", b"nonce 2")


@pytest.mark.parametrize("status", [400, 401, 403])
def test_object_that_can_never_be_read_is_refused_at_once(store, service, status):
    service.faults = [status]
    with pytest.raises(
        StoreRefused, match=r"get_object of gs://bucket/runs/a failed at attempt 1.*injected"
    ) as refused:
        store.read("a")
    assert (refused.value.status, refused.value.code) == (status, f"Fault{status}")
    assert "Debug source" not in str(refused.value)
    assert str(refused.value).endswith("or the identity of this machine).")


def test_large_object_is_uploaded_in_parts_that_are_repeated(store, service, monkeypatch):
    monkeypatch.setattr(remote_store, "PART_BYTES", 5 * 1024 * 1024)
    data = os.urandom(1024 * 1024) * 13
    with store.writer("large") as file:
        for start in range(0, len(data), 3_000_000):
            file.write(data[start : start + 3_000_000])
        service.faults = [503]
    assert store.read("large") == data
    assert service.requests.count("POST") == 2


def test_without_an_account_every_request_is_refused_with_the_next_step(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreRefused, match=r"Account must be specified\. Check the bucket.*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/runs").list()


def test_a_named_store_has_variables_of_its_own(service, monkeypatch):
    monkeypatch.setenv("GOOGLE_BASE_URL_LAB_1", service.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN_LAB_1", "of-the-lab")
    for name in ("GOOGLE_BASE_URL", "GOOGLE_BEARER_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    store = open_store("gs+lab-1://bucket/photos")
    store.write("a.jpg", b"1")
    assert service.signed == "Bearer of-the-lab"
    assert os.environ["GOOGLE_BEARER_TOKEN"] == "http://127.0.0.1:1"
    again = pickle.loads(pickle.dumps(store)).child("x")
    assert again.uri == "gs+lab-1://bucket/photos/x"
    assert again._service == store._service != open_store("gs://bucket/photos")._service


def test_a_named_container_of_azurite_is_reached_with_its_own_key(azurite, monkeypatch):
    for name, value in azurite.items():
        monkeypatch.setenv(f"{name}_LAB", value)
        monkeypatch.setenv(name, "b3Vycw==")
    store = open_store(f"az+lab://box/{uuid.uuid4().hex}")
    store.write("a.jpg", b"1")
    assert store.list() == ["a.jpg"]


def test_a_named_store_without_variables_is_refused_with_their_names(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "ours")
    with pytest.raises(
        StoreRefused, match=r"Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME_LAB, AZURE_STORAGE_ACC"
    ):
        open_store("az+lab://container/runs").list()


FORKED = """
import multiprocessing, sys
from vitline.infra.storage import open_store
store = open_store("gs://bucket/runs")
store.write("a", b"1")
def read():
    try:
        store.read("a")
    except RuntimeError as error:
        print(error)
process = multiprocessing.get_context("fork").Process(target=read)
process.start()
process.join()
"""


def test_in_a_forked_process_it_says_so_and_does_not_hang(store, service):
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=240)
    assert "not supported" in ran.stdout, ran.stderr


def test_error_of_an_unreachable_service_names_the_cause_and_the_next_step(store, service, monkeypatch):
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")
    object_store.client_of.cache_clear()
    with pytest.raises(StoreFailed, match=r"Connection refused\)\. Check that the store runs\.$"):
        store.read("a")


def test_prefix_within_a_name_lists_only_what_begins_with_it(store, service, monkeypatch):
    monkeypatch.setattr(object_store, "_PAGE", 3)  # as many as this service answers at once
    keys = ["run/a", "run-1/a", "run-2/a", "run-2/b", "run-2.json", "run-3/a", "runs"]
    for key in keys:
        store.write(key, b"")
    del service.requests[:]
    assert store.list("run-2") == ["run-2.json", "run-2/a", "run-2/b"]
    assert len(service.requests) == 2
    assert store.list("run") == sorted(keys)
    assert store.list("run-1/a") == ["run-1/a"]
