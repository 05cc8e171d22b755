"""Minimal services of buckets in this process: Amazon's protocol, and Google's, each with faults."""

import contextlib
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from vitline.infra.stores import object_store

VARIABLES = {
    "s3": {"AWS_ENDPOINT_URL": "{url}", "AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"},
    "gs": {"GOOGLE_BASE_URL": "{url}", "GOOGLE_BEARER_TOKEN": "local"},
}


@contextlib.contextmanager
def service_of(scheme, monkeypatch):
    """A running service whose bucket this process opens as `<scheme>://bucket`."""
    object_store.client_of.cache_clear()  # a client keeps the address of its service
    with Service({"s3": Handler, "gs": GoogleHandler}[scheme]) as server:
        for name, value in VARIABLES[scheme].items():
            monkeypatch.setenv(name, value.format(url=server.url))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Service(ThreadingHTTPServer):
    """Each request uses up one of `faults`; with none left, requests succeed."""

    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.objects, self.writers, self.faults, self.requests = {}, {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        server, path = self.server, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.requests.append(self.command)
        server.signed = self.headers.get("Authorization", "")
        fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, int):
            return self.answer(fault, b"<Error><Code>Fault%d</Code><Message>injected</Message></Error>" % fault)
        if isinstance(
            fault, bytes
        ):  # status and headers, and behind the last newline the body, of a request that has no effect
            headers, _, content = fault.rpartition(b"\n")
            return self.wfile.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (headers, len(content), content))
        if callable(fault):
            fault()
        status, reply = self.perform(server.objects, path, body)
        if fault == "reply lost":
            self.close_connection = True
            return self.connection.close()
        span = self.headers.get("Range")
        if span and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            last = min(int(last or len(reply) - 1), len(reply) - 1)
            if int(first) > last:
                return self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            self.range = f"bytes {first}-{last}/{len(reply)}"
            return self.answer(206, reply[int(first) : last + 1])
        self.answer(status, reply)

    def perform(self, objects, path, body):
        found = objects.get(path)
        tag = None if found is None else f'"{hashlib.md5(found).hexdigest()}"'
        if self.command == "PUT":
            if (self.headers.get("If-None-Match") and found is not None) or self.headers.get("If-Match", tag) != tag:
                return 412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>"
            objects[path], self.server.writers[path] = body, self.headers.get("x-amz-meta-writer", "")
            self.tag = hashlib.md5(body).hexdigest()
            return 200, b""
        if found is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>"
        self.tag, self.writer = hashlib.md5(found).hexdigest(), self.server.writers.get(path, "")
        return 200, found

    tag = writer = range = ""

    def described(self):
        return {"ETag": f'"{self.tag}"', "x-amz-meta-writer": self.writer}

    def answer(self, status, body):
        self.send_response(status)
        for name, value in self.described().items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", self.range)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def log_message(self, *_):
        pass


class GoogleHandler(Handler):
    """The XML API of Google Cloud Storage: generations, conditions on them, listings, uploads in parts."""

    generation = ""

    def perform(self, objects, path, body):
        where, query = urlsplit(path), dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
        bucket, _, key = where.path.removeprefix("/").partition("/")
        path = f"/{bucket}/{unquote(key)}"
        if "list-type" in query:
            return self.listed(objects, bucket, query)
        if self.command == "POST" and "uploads" in query:
            upload = f"upload-{len(self.server.requests)}"
            self.server.writers[upload] = self.headers.get("x-goog-meta-writer", "")
            return 200, (
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode()
            )
        if upload := query.get("uploadId"):
            if self.command == "PUT":
                objects[f"{upload} {query['partNumber']:>5}"] = body
                self.tag = hashlib.md5(body).hexdigest()
                return 200, b""
            parts = sorted(part for part in objects if part.startswith(f"{upload} "))
            if not parts:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>"
            whole = b"".join(objects.pop(part) for part in parts)
            if self.command == "DELETE":
                return 204, b""
            self.put(objects, path, whole, self.server.writers[upload])
            return 200, (
                f"<CompleteMultipartUploadResult><ETag>{self.tag}</ETag></CompleteMultipartUploadResult>".encode()
            )
        found = objects.get(path)
        if self.command == "PUT":
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None and wanted != (found.generation if found is not None else "0"):
                return 412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>"
            self.put(objects, path, body, self.headers.get("x-goog-meta-writer", ""))
            return 200, b""
        if found is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>"
        if self.command == "DELETE":
            del objects[path]
            return 204, b""
        self.tag, self.generation = hashlib.md5(found).hexdigest(), found.generation
        self.writer = self.server.writers.get(path, "")
        return 200, found

    def put(self, objects, path, body, writer):
        objects[path], self.server.writers[path] = Generation(body), writer
        objects[path].generation = self.generation = str(1_000_000 + len(self.server.requests))
        self.tag = hashlib.md5(body).hexdigest()

    def listed(self, objects, bucket, query):
        start = f"/{bucket}/{query.get('prefix', '')}"
        after = query.get("continuation-token") or query.get("start-after") or query.get("startOffset") or ""
        keys = sorted(path for path in objects if path.startswith(start) and path > f"/{bucket}/{after}")
        page = keys[:3]
        entries = "".join(
            f"<Contents><Key>{escape(path.removeprefix(f'/{bucket}/'))}</Key><Size>{len(objects[path])}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{hashlib.md5(objects[path]).hexdigest()}</ETag></Contents>"
            for path in page
        )
        more = page[-1].removeprefix(f"/{bucket}/") if len(keys) > len(page) else ""
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        return (
            200,
            f"<ListBucketResult>{entries}{token}<IsTruncated>{str(bool(more)).lower()}</IsTruncated></ListBucketResult>".encode(),
        )

    def described(self):
        return {
            "ETag": f'"{self.tag}"',
            "x-goog-meta-writer": self.writer,
            "x-goog-generation": self.generation,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }


class Generation(bytes):
    """The bytes of an object, with the generation that the service gave them."""

    generation = "0"
