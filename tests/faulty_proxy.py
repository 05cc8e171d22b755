"""A proxy in front of a real S3 service, with the faults that networks, gateways and caches have."""

import contextlib
import http.client
import itertools
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from infra.stores import s3_store


@contextlib.contextmanager
def proxy_before(endpoint: str, patch: pytest.MonkeyPatch) -> Iterator["Proxy"]:
    """A proxy in front of `endpoint`, which stores in this process and its children use; back-off is a hundredth of what
    it is."""
    patch.setattr(s3_store, "_FIRST_WAIT_S", 0.002)
    patch.setattr(s3_store, "_LONGEST_WAIT_S", 0.1)
    with Proxy(endpoint) as server:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to an S3 service. Every `every`-th suffers the next of `faults`; `down` refuses all.

    `range_faults` befall the next reads of a range, as in caches that fetch whole objects with credentials of their own:
    "ignored" answers the whole object, "other" another range than the one asked for, "garbled" that range with other bytes.
    """

    daemon_threads = True

    def __init__(self, behind: str):
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind = behind.removeprefix("http://")
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.every, self.down, self.lock = 0, False, threading.Lock()
        self.range_faults: Iterator[str] = iter(())
        self.count, self.faults, self.suffered = itertools.count(1), itertools.cycle(FAULTS), Counter()

    def fault(self) -> str:
        with self.lock:
            found = "503" if self.down else ""
            if self.every and next(self.count) % self.every == 0:
                found = next(self.faults)
            self.suffered[found] += 1
            return found


def whole_object(endpoint, path):
    """The object at a path, read with credentials of the proxy's own."""
    request = AWSRequest("GET", f"http://{endpoint}{path}")
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    S3SigV4Auth(Credentials(key, secret), "s3", os.environ.get("AWS_REGION", "us-east-1")).add_auth(request)
    with contextlib.closing(http.client.HTTPConnection(endpoint)) as inner:
        inner.request("GET", path, headers=dict(request.headers))
        reply = inner.getresponse()
        assert reply.status == 200, reply.read()
        return reply.read()


FAULTS = ("503", "reset", "reply lost", "reply cut", "slow")


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        if fault == "reset":
            return self.reset()
        if fault == "503":
            return self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
        if fault == "slow":
            time.sleep(0.2)
        if self.headers.get("Range") and (how := next(self.server.range_faults, "")):
            return self.answer_range(how)
        inner = http.client.HTTPConnection(self.server.behind)
        with contextlib.closing(inner):
            inner.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the signature covers Host: it goes on as it is
                inner.putheader(name, value)
            inner.endheaders(body)
            reply = inner.getresponse()
            data = reply.read()
        if fault == "reply lost":
            return self.reset()
        kept = {n: v for n, v in reply.getheaders() if n.lower() not in ("content-length", "connection", "date")}
        if self.command == "HEAD":
            kept["Content-Length"] = reply.getheader("Content-Length", "0")
        self.answer(reply.status, kept, data, cut=fault == "reply cut")

    def answer(self, status, headers, data, cut=False):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.reset()

    def answer_range(self, how):
        """The answer of a cache to a read of a range of an object that is longer than 1 byte."""
        whole = whole_object(self.server.behind, self.path)
        if how == "ignored":
            return self.answer(200, {"ETag": '"cached"'}, whole)
        first, last = (number and int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last or len(whole), len(whole) - 1)
        if how == "other":
            first, last = (0, last) if first else (0, last - 1)
        data = whole[first : last + 1]
        if how == "garbled":
            data = bytes(byte ^ 1 for byte in data)
        self.answer(206, {"ETag": '"cached"', "Content-Range": f"bytes {first}-{last}/{len(whole)}"}, data)

    def reset(self):
        self.connection.setsockopt(*LINGER)  # RST instead of an orderly end
        self.connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, *_):
        pass

    def handle_error(self, *_):  # a client that went away
        pass


LINGER = (1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
