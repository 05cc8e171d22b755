"""Stores with memory:// URIs, for tests."""

import contextlib
import hashlib
import io
import threading
from collections.abc import Iterator
from typing import BinaryIO, Self

from vitline.infra.stores.store import Keys, Listed, PreconditionFailed, Store, checked_key

_OBJECTS: dict[str, bytes] = {}
_OBJECTS_LOCK = threading.Lock()


class MemoryStore(Store):
    """Objects in the memory of this process, shared by all its stores. The tag is the sha256 of the bytes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.uri = f"memory://{name}"

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(uri.removeprefix("memory://"))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._get(key)[start:end]

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        data = self._get(key)
        return data, hashlib.sha256(data).hexdigest()

    def size(self, key: str) -> int:
        return len(self._get(key))

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        checked_key(key)
        file = _KeptBytes()
        yield file
        self.write(key, file.getvalue())

    def write(self, key: str, data: bytes) -> None:
        with _OBJECTS_LOCK:
            _OBJECTS[self.uri_of(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> str:
        with _OBJECTS_LOCK:
            if self.uri_of(key) in _OBJECTS:
                raise PreconditionFailed(f"{self.uri_of(key)} exists already.")
            _OBJECTS[self.uri_of(key)] = bytes(data)
        return hashlib.sha256(data).hexdigest()

    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        with _OBJECTS_LOCK:
            found = _OBJECTS.get(self.uri_of(key))
            if found is None or hashlib.sha256(found).hexdigest() != tag:
                raise PreconditionFailed(f"{self.uri_of(key)} was changed or does not exist.")
            _OBJECTS[self.uri_of(key)] = bytes(data)
        return hashlib.sha256(data).hexdigest()

    def list(self, prefix: str = "") -> Keys:
        with _OBJECTS_LOCK:
            start = f"{self.uri}/{prefix}"
            return sorted(uri[len(self.uri) + 1 :] for uri in _OBJECTS if uri.startswith(start))

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        for key in self.list(prefix):
            data, tag = self.read_tagged(key)
            yield Listed(key, len(data), tag)

    def delete(self, key: str) -> None:
        with _OBJECTS_LOCK:
            _OBJECTS.pop(self.uri_of(key), None)

    def _get(self, key: str) -> bytes:
        with _OBJECTS_LOCK:
            try:
                return _OBJECTS[self.uri_of(key)]
            except KeyError:
                raise FileNotFoundError(2, "no such object", self.uri_of(key)) from None


class _KeptBytes(io.BytesIO):
    """Keeps its bytes if a library closes it early."""

    def close(self) -> None:
        pass
