"""A proxy in front of a real S3 service, with the faults that networks, gateways and caches have.

It listens on loopback and signs every request anew, with the credentials of this process: a service behind a load balancer, or
AWS, refuses a signature that covers the address of the proxy.
"""

import contextlib
import http.client
import itertools
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.session import Session

from vitline.infra.settings import Settings, changed_environment
from vitline.infra.stores import remote_store

FAULTS = ("503", "reset", "reply lost", "reply cut", "slow")
LINGER = (1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
_SILENCE_S = 60.0
_SLOW_BYTES_S = 5.0
# Headers of one connection, and those that signing sets.
_NOT_PASSED_ON = {
    "accept-encoding", "authorization", "connection", "content-length", "expect", "host", "x-amz-date", "x-amz-security-token",
}  # fmt: skip


@contextlib.contextmanager
def proxy_before(endpoint: str | None = None) -> Iterator["Proxy"]:
    """A proxy in front of the S3 service at `endpoint` (None: that of the settings, else AWS). This process and its children
    use it in stores that they open; back-off is a hundredth of what it is, and ends after nine attempts."""
    settings, session = Settings(), Session()
    region = settings.s3_region or session.get_config_variable("region") or "us-east-1"
    behind = endpoint or settings.s3_endpoint_url or f"https://s3.{region}.amazonaws.com"
    with (
        Proxy(behind, region, session) as server,
        patch.object(remote_store, "_FIRST_WAIT_S", 0.002),
        patch.object(remote_store, "_LONGEST_WAIT_S", 0.1),
        patch.object(remote_store, "_PATIENCE_S", 0.0),
        changed_environment(AWS_ENDPOINT_URL=server.url, AWS_ENDPOINT_URL_S3=server.url),
    ):
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to an S3 service. Every `every`-th suffers the next of `faults`; `down` refuses all.

    `range_faults` befall the next reads of a range, as in caches that fetch whole objects with credentials of their own:
    "ignored" answers the whole object, "other" another range than the one asked for, "garbled" that range with other bytes.
    Each request waits for `latency_s` before it is passed on, beside the others. A fault that is not among FAULTS is "slow bytes": the
    second half of the body comes `_SLOW_BYTES_S` later.
    """

    daemon_threads = True
    request_queue_size = 128  # of a loader many connect at once; those that find no room are late by a second and more

    def __init__(self, behind: str, region: str, session: Session) -> None:
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind, self.region = behind.rstrip("/"), region
        self.credentials = session.get_credentials()
        self.trusted = ssl.create_default_context(cafile=session.get_config_variable("ca_bundle"))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.every, self.down, self.lock, self.latency_s = 0, False, threading.Lock(), 0.0
        self.range_faults: Iterator[str] = iter(())
        self.count, self.faults = itertools.count(1), itertools.cycle(FAULTS)
        self.suffered: Counter[str] = Counter()

    def fault(self) -> str:
        with self.lock:
            found = "503" if self.down else ""
            if self.every and next(self.count) % self.every == 0:
                found = next(self.faults)
            self.suffered[found] += 1
            return found

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and body of the service's own reply."""
        request = AWSRequest(method, f"{self.behind}{path}", headers=dict(headers), data=body)
        if headers.get("x-amz-content-sha256", "").endswith("-TRAILER"):
            request.context["checksum"] = {"request_algorithm": {"in": "trailer"}}
        S3SigV4Auth(self.credentials.get_frozen_credentials(), "s3", self.region).add_auth(request)
        to = urlsplit(self.behind)
        if to.scheme == "https":
            inner: http.client.HTTPConnection = http.client.HTTPSConnection(
                to.netloc, timeout=_SILENCE_S, context=self.trusted
            )
        else:
            inner = http.client.HTTPConnection(to.netloc, timeout=_SILENCE_S)
        with contextlib.closing(inner):
            inner.request(method, f"{to.path}{path}", body, dict(request.headers))
            reply = inner.getresponse()
            return reply.status, reply.getheaders(), reply.read()

    def handle_error(self, *_: object) -> None:  # a client that went away
        pass


class PassOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.server.latency_s)
        fault = self.server.fault()
        if fault == "reset":
            return self.reset()
        if fault == "503":
            return self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
        if fault == "slow":
            time.sleep(0.2)
        if self.headers.get("Range") and (how := next(self.server.range_faults, "")):
            return self.answer_range(how)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_PASSED_ON}
        status, given, data = self.server.ask(self.command, self.path, headers, body)
        if fault == "reply lost":
            return self.reset()
        kept = {
            n: v for n, v in given if n.lower() not in ("content-length", "connection", "date", "transfer-encoding")
        }
        if self.command == "HEAD":
            kept["Content-Length"] = next((v for n, v in given if n.lower() == "content-length"), "0")
        self.answer(
            status, kept, data, cut=fault == "reply cut", pause_s=_SLOW_BYTES_S if fault == "slow bytes" else 0.0
        )

    def answer(
        self, status: int, headers: Mapping[str, str], data: bytes, cut: bool = False, pause_s: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            half = len(data) // 2
            self.wfile.write(data[:half])
            time.sleep(pause_s)
            self.wfile.write(b"" if cut else data[half:])
        if cut:
            self.wfile.flush()
            self.reset()

    def answer_range(self, how: str) -> None:
        """The answer of a cache to a read of a range of an object that is longer than 1 byte."""
        status, _, whole = self.server.ask("GET", self.path, {}, b"")
        if status != 200:
            return self.answer(status, {}, whole)
        if how == "ignored":
            return self.answer(200, {"ETag": '"cached"'}, whole)
        start, end = self.headers["Range"].removeprefix("bytes=").split("-")
        first, last = int(start), min(int(end or len(whole)), len(whole) - 1)
        if how == "other":
            first, last = (0, last) if first else (0, last - 1)
        data = whole[first : last + 1]
        if how == "garbled":
            data = bytes(byte ^ 1 for byte in data)
        self.answer(206, {"ETag": '"cached"', "Content-Range": f"bytes {first}-{last}/{len(whole)}"}, data)

    def reset(self) -> None:
        self.connection.setsockopt(*LINGER)  # RST instead of an orderly end
        self.connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, *_: Any) -> None:
        pass
