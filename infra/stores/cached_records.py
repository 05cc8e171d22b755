"""Many small records of a store that is far away: read once, then again only where their tags have changed."""

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn, Self

from vitline.infra.stores.store import Listed, Store, StoreFailed, checked_key

INDEX_KEY = "ops/records.json.gz"
_FORMAT = 1
_WORTH_WRITING = 100
_LARGEST = 64 * 1024


@contextlib.contextmanager
def cached_records(store: Store, *prefixes: str) -> Iterator[Store]:
    """A view of a store as it is now below some prefixes, to read many small objects from. It cannot be written.

    Where a read is a request (S3), what was read is kept in one object, INDEX_KEY, with the tag of each record. Later views, of
    any process, list the prefixes, read that object, and then only records which the listing shows with another tag. A view that
    had to read many writes the object anew. It can be deleted at any time.
    """
    if not store.high_latency:
        yield store
        return
    records = _Records(store, prefixes)
    yield _View(records, "")
    records.keep()


class _Records:
    """A listing, the index, and what was read since."""

    def __init__(self, store: Store, prefixes: tuple[str, ...]) -> None:
        self.store, self.prefixes = store, prefixes
        self.listed = {each.key: each for prefix in prefixes for each in store.scan(prefix)}
        self._indexed, self._read = _read_index(store), dict[str, tuple[str, str]]()
        self._lock = threading.Lock()

    def require_listed(self, key: str) -> None:
        if not key.startswith(self.prefixes):
            raise ValueError(f"{key!r} does not lie below {', '.join(self.prefixes)}, which this view has listed.")

    def read(self, key: str) -> tuple[bytes, str]:
        self.require_listed(key)
        if key not in self.listed:
            raise FileNotFoundError(2, "no such object", self.store.uri_of(key))
        tag, text = self._indexed.get(key, ("", ""))
        if tag == self.listed[key].tag:
            return text.encode(), tag
        data, tag = self.store.read_tagged(key)
        with contextlib.suppress(UnicodeDecodeError):
            if len(data) <= _LARGEST:
                with self._lock:
                    self._read[key] = tag, data.decode()
        return data, tag

    def keep(self) -> None:
        """Writes the index, if that saves later views many reads. It may fail, as for somebody who may only read."""
        if len(self._read) < _WORTH_WRITING:
            return
        others = {key: found for key, found in self._indexed.items() if not key.startswith(self.prefixes)}
        known = others | {key: found for key, found in self._indexed.items() if key in self.listed}
        index = {"format": _FORMAT, "records": known | self._read}
        with contextlib.suppress(StoreFailed):
            self.store.write(INDEX_KEY, gzip.compress(json.dumps(index).encode(), 1, mtime=0))


def _read_index(store: Store) -> dict[str, tuple[str, str]]:
    """Tag and text of each record in the index; nothing where it is missing, damaged or of another version."""
    try:
        index = json.loads(gzip.decompress(store.read(INDEX_KEY)))
        if index["format"] != _FORMAT:
            return {}
        return {key: (str(tag), str(text)) for key, (tag, text) in index["records"].items()}
    except (FileNotFoundError, gzip.BadGzipFile, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return {}


class _View(Store):
    def __init__(self, records: _Records, prefix: str) -> None:
        self._records, self._prefix = records, prefix
        self.uri = records.store.uri_of(prefix.rstrip("/")) if prefix else records.store.uri

    @classmethod
    def at(cls, uri: str) -> Self:
        raise TypeError(f"A view of listed records of {uri} is made by cached_records.")

    def child(self, prefix: str) -> Store:
        return _View(self._records, f"{self._prefix}{prefix.rstrip('/')}/")

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.read_tagged(key)[0][start:end]

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._records.read(self._prefix + checked_key(key))

    def size(self, key: str) -> int:
        return len(self.read(key))

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        wanted = self._prefix + prefix
        self._records.require_listed(wanted)
        for key, found in self._records.listed.items():
            if key.startswith(wanted):
                yield replace(found, key=key[len(self._prefix) :])

    def _refuse(self, key: str, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{self.uri_of(key)} cannot be written through a view of listed records; open the store itself."
        )

    writer = write = create = compare_and_swap = delete = _refuse
