"""Stores that are only read: a web server's files, and datasets of a hub."""

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("aiohttp", reason="the extra `prep` is not installed")

from vitline.infra.storage import Listed, StoreFailed, StoreRefused, open_store
from vitline.infra.stores import read_only_store

from ...servers.small_buckets import service_of

DATA = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch, no_waits):
    with service_of("s3", monkeypatch) as server:  # it answers GET and HEAD as any web server does
        server.objects["/data/a%20b.tar"] = DATA
        yield server


@pytest.fixture
def store(server):
    return open_store(f"{server.url}/data")


def test_reads_of_parts_and_the_whole(store):
    spans = [(0, None), (3, 9), (10_000, 20_000), (10_239, None), (10_240, 10_300), (5, 5)]
    assert [store.read("a b.tar", *span) for span in spans] == [DATA[slice(*span)] for span in spans]
    assert store.size("a b.tar") == len(DATA)
    with store.open("a b.tar") as file:
        file.seek(-4, 2)
        assert file.read() == DATA[-4:]
    (found,) = store.scan("a b.tar")
    assert (found.key, found.size) == ("a b.tar", len(DATA))
    assert list(store.scan("other.tar")) == []
    for read in (store.read, store.size):
        with pytest.raises(FileNotFoundError):
            read("other.tar")


def test_more_reads_at_a_time_than_the_loop_has_threads(store, server):
    store = open_store(store.uri.replace("127.0.0.1", "localhost"))  # a name is looked up in one of these
    with ThreadPoolExecutor(60) as threads:
        parts = list(threads.map(lambda start: store.read("a b.tar", start, start + 100), range(0, 6000, 100)))
    assert b"".join(parts) == DATA[:6000]


@pytest.mark.parametrize("faults", [[500, 503], ["reply lost"], [429, "reply lost", 503]])
def test_transient_faults_are_retried(store, server, faults):
    server.faults = list(faults)
    assert store.read("a b.tar", 3, 9) == DATA[3:9]


def test_what_no_try_can_read_is_refused_at_once_with_the_next_step(store, server):
    server.faults = [403] * 2
    with pytest.raises(StoreRefused, match=r"failed at attempt 1.*403.*Check the address and its login\."):
        store.read("a b.tar")
    with pytest.raises(StoreRefused, match="not supported: a list of"):
        store.list()
    for write in (store.write, store.create):
        with pytest.raises(StoreRefused, match="not supported: writing"):
            write("x", b"1")


def test_the_login_of_a_web_server_comes_from_netrc(store, server, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login lab password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    read_only_store._filesystem.cache_clear()
    assert store.read("a b.tar", 3, 9) == DATA[3:9]
    assert server.signed == f"Basic {base64.b64encode(b'lab:secret').decode()}"
    read_only_store._filesystem.cache_clear()


def test_a_server_that_is_away_is_not_a_missing_file(monkeypatch, server):
    with pytest.raises(StoreFailed, match="attempt 9"):
        open_store("http://127.0.0.1:1/data").size("x")


@pytest.fixture
def hub(monkeypatch):
    """The address of a hub with the data set lab/birds, which has one file."""
    pytest.importorskip("huggingface_hub", reason="hf:// needs it")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # other tests switch it on
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf_of-the-lab")
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        read_only_store._filesystem.cache_clear()
        yield
        server.shutdown()
    read_only_store._filesystem.cache_clear()


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers["Authorization"] != "Bearer hf_of-the-lab":
            return self.answer(401, b"{}")
        path = self.path.partition("?")[0]
        answers = {
            "/api/datasets/lab/birds": {"id": "lab/birds", "sha": "0" * 40, "siblings": []},
            "/api/datasets/lab/birds/tree/main": [
                {"type": "directory", "path": "train", "size": 0, "oid": "folder"},
                {"type": "file", "path": "train/a b.tar", "size": len(DATA), "oid": "of-the-blob"},
            ],
        }
        if path == "/datasets/lab/birds/resolve/main/train/a%20b.tar":
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            return self.answer(206, DATA[first : last + 1])
        self.answer(200 if path in answers else 404, json.dumps(answers.get(path, {})).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_data_set_of_the_hub_is_listed_and_read(hub):
    store = open_store("hf://datasets/lab/birds")
    assert list(store.scan("train/")) == [Listed("train/a b.tar", len(DATA), "of-the-blob")]
    assert store.list("val") == []
    assert (store.read("train/a b.tar"), store.read("train/a b.tar", 3, 9)) == (DATA, DATA[3:9])
    with pytest.raises(FileNotFoundError):
        store.read("train/c.tar")
