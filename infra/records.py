"""Records in the store, which another version of vitline, or something else, may have written: what is read and what is not."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

from pydantic import ConfigDict, ValidationError

from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, StoreRefused

T = TypeVar("T")
K = TypeVar("K")
READERS = 32
"""Small objects that are read at a time; an S3 store has as many connections."""


class StoredRecord(FrozenConfig):
    """Base class of records. Fields that a newer version wrote are ignored by readers and kept by writers (`replace`)."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def load(cls, store: Store, key: str) -> Self:
        """The record under a key. Raises FileNotFoundError if there is none, UnreadableRecord if it is of another kind."""
        with reading(store.uri_of(key)):
            return cls.model_validate(store.read_json(key))

    @classmethod
    def load_or_none(cls, store: Store, key: str) -> Self | None:
        """The record under a key, or None. Raises UnreadableRecord."""
        with reading(store.uri_of(key)):
            found = store.read_json_or_none(key)
            return None if found is None else cls.model_validate(found)

    def stored_first(self, store: Store, key: str) -> Self:
        """The record under a key: this one, unless another writer was first."""
        created = store.create_if_absent(key, self.model_dump_json(indent=1).encode())
        return self if created else self.load_or_none(store, key) or self


class UnreadableRecord(RuntimeError):
    """A record that this version cannot read. The text names the object, what is wrong with it, and the next step."""


def check_digest(uri: str, found: str, planned: str, next_step: str = "evaluate again") -> None:
    """Raises RuntimeError if the model or corpus at `uri` has another digest than the one that the work was planned with."""
    if found != planned:
        raise RuntimeError(
            f"{uri} has digest {found[:12]}, but the work was planned with {planned[:12]}: it was replaced. Restore it, or {next_step}."
        )


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Whatever is wrong with the record at `uri` becomes an UnreadableRecord. The context reads this one record only."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableRecord(
            f"{uri} is not a record that this version of vitline reads: {flaw(error)}. Use the version that wrote it, or move "
            "the object away."
        ) from error


def readable(items: Iterable[K], read: Callable[[K], T], report: Callable[[UnreadableRecord], None]) -> Iterator[T]:
    """What `read` makes of each item of a listing, in their order; several are read at a time, as a store may be far away. One that
    cannot be read or opened is reported and left out: it stops no other."""
    for found in read_each(items, partial(read_or_why, read)):
        if isinstance(found, UnreadableRecord):
            report(found)
        else:
            yield found


def read_or_why(read: Callable[[K], T], item: K) -> T | UnreadableRecord:
    """What `read` makes of an item of a listing, or why it cannot be read or opened."""
    try:
        return read(item)
    except UnreadableRecord as odd:
        return odd
    except FileNotFoundError as error:
        return UnreadableRecord(
            f"{error.filename} is listed, but no file that can be opened: {error.strerror}. Move it away, unless it was just deleted."
        )
    except (PermissionError, StoreRefused) as error:
        return UnreadableRecord(f"{item} cannot be opened: {error}. Correct its permissions, or move it away.")


def read_each(items: Iterable[K], read: Callable[[K], T]) -> list[T]:
    """What `read` makes of each item, several at a time, in their order."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, items))


def and_unreadable(odd: Iterable[UnreadableRecord]) -> str:
    """The end of an error about something that was not found: what could not be read may be what was looked for."""
    return "".join(f" Not read: {each}" for each in odd)


def flaw(error: Exception) -> str:
    """What is wrong with a record or config that could not be made: its first error, with the field, without a full stop."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        flaw = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"].rstrip(".")
        return f"{'.'.join(map(str, first['loc'])) or 'its content'}: {flaw}"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error).rstrip(".")
