"""Stores that are only read, by fsspec: https:// (files of a web server) and hf:// (datasets of Hugging Face's hub), for sources."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NoReturn, Self, TypeVar

import aiohttp
import fsspec

from vitline.infra.stores.remote_store import Answer, RemoteStore, Span
from vitline.infra.stores.store import Listed, StoreRefused

T = TypeVar("T")

_READS_AT_A_TIME = 40


class ReadOnlyStore(RemoteStore):
    """A folder of a web server or of the hub. fsspec finds logins where their clients do: `.netrc`, HF_TOKEN.

    A web server does not list: `scan` gives the object whose key is the prefix. Whatever writes raises StoreRefused.
    """

    settings_of_access = "the address and its login"

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._scheme = uri.partition("://")[0]
        self._sizes: dict[str, int] = {}

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(uri)

    @property
    def _service(self) -> Hashable:
        return "hf" if self._scheme == "hf" else self.uri.split("/")[2]

    @property
    def _url(self) -> str:
        return "https://huggingface.co" if self._scheme == "hf" else self.uri

    def size(self, key: str) -> int:
        size: int = self._info(key)["size"]
        return size

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        if self._scheme == "hf":
            found = self._retried("list", f"{self.uri}/{prefix}", lambda: self._client().find(self.uri, detail=True))
            start = self.uri.removeprefix("hf://")
            for path, info in found.items():
                key = path.removeprefix(f"{start}/")
                if key.startswith(prefix):
                    yield Listed(key, info["size"], str(info.get("blob_id") or info["size"]))
        elif not prefix:
            raise StoreRefused(f"not supported: a list of {self.uri}. Give the address of one archive or table.")
        else:
            with contextlib.suppress(FileNotFoundError):
                info = self._info(prefix)
                yield Listed(prefix, info["size"], info.get("ETag") or info.get("Last-Modified") or str(info["size"]))

    def write(self, key: str, data: bytes) -> NoReturn:
        raise StoreRefused(f"not supported: writing {self.uri_of(key)}. Name a path or a bucket.")

    def writer(self, key: str) -> NoReturn:
        self.write(key, b"")

    def delete(self, key: str) -> NoReturn:
        self.write(key, b"")

    def _put(self, key: str, data: bytes, signature: str, tag: str | None) -> NoReturn:
        self.write(key, data)

    def _signed(self, key: str) -> NoReturn:
        self.write(key, b"")

    def _info(self, key: str) -> dict[str, Any]:
        path = self.uri_of(key)
        return self._retried("info", path, lambda: self._known(path))

    def _known(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client().info(path)
        if found["type"] != "file":
            raise FileNotFoundError(path)
        if found["size"] is None or found.get("partial") is False:
            raise _NoRanges(f"the server of {path} does not say its size, or reads no parts of it")
        return found

    async def _size_now(self, key: str) -> int:
        size: int = (await _in_a_thread(lambda: self._known(self.uri_of(key))))["size"]
        return size

    async def _fetch(self, key: str, span: Span | None) -> tuple[bytes, str, int | None]:
        path, (start, end) = self.uri_of(key), span or (0, None)

        def read() -> tuple[bytes, str, int | None]:
            size = self._sizes.get(path) or self._known(path)["size"]
            self._sizes[path] = size  # else each read would ask for it
            length = max(0, min(end or size, size) - start)
            if not length:
                return b"", "", 0
            with self._client().open(path, "rb", cache_type="none") as file:
                file.seek(start)
                return file.read(length), str(size), length

        return await _in_a_thread(read)

    def _client(self) -> Any:
        try:
            return _filesystem(os.getpid(), self._scheme)
        except ImportError as error:
            raise _Unusable(str(error)) from error

    def _answer(self, error: Exception) -> Answer:
        cause: BaseException | None = error
        while cause is not None:
            status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
            if isinstance(status, int):
                return Answer(404 if status == 410 else status, why=str(cause))
            if isinstance(cause, _Unusable | _NoRanges):
                return Answer(refused=True)
            if any(
                kind.__name__ == "TransportError" for kind in type(cause).__mro__
            ):  # of httpx, which only the hub's client needs
                return Answer(lost=True, why=str(cause))
            if isinstance(cause, FileNotFoundError) and cause.__cause__ is None:
                return Answer(404)
            cause = cause.__cause__
        return Answer(lost=isinstance(error, OSError | aiohttp.ClientError))


class _Unusable(Exception):
    """No client can be made."""


class _NoRanges(Exception):
    """A server has what can only be read as a whole."""


async def _in_a_thread(work: Callable[[], T]) -> T:
    """The result of `work()`, which waits for the event loop. The loop's own threads must stay free: names of hosts are looked up there."""
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), work)


@lru_cache
def _threads(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READS_AT_A_TIME, "read-only")


@lru_cache
def _filesystem(pid: int, scheme: str) -> Any:
    """One client for all threads of a process. `pid` makes a forked child create its own."""
    options = {} if scheme == "hf" else {"client_kwargs": {"trust_env": True}}  # proxies and logins
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
