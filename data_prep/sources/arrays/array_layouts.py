"""Interface of layouts of pixel arrays for the corpus made from them, and errors for damaged files."""

import contextlib
import errno
import gzip
import io
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np

from vitline.data_prep.sources.raw import SourcePart
from vitline.infra.storage import Listed, Store, StoreFailed, open_store

READ_BYTES = 4 * 1024 * 1024
"""Bytes read at once."""


@dataclass(frozen=True, slots=True)
class ArrayImage:
    """Pixels (h, w) or (h, w, 3), with split, number and label."""

    split: str | None
    number: int
    pixels: np.ndarray
    label: int


class Arrays(ABC):
    """One layout: finds the arrays and reads their images."""

    num_classes: int | None = None

    def __init__(self, uri: str, layout: str) -> None:
        self.uri, self.layout = uri, layout

    @abstractmethod
    def files(self) -> list[Listed]:
        """Every file of the source. Raises ValueError if there is none."""

    @abstractmethod
    def parts(self, max_pixels: int) -> Iterator[SourcePart]:
        """Every array or archive. Raises ValueError if it does not match the layout."""

    @abstractmethod
    def images(self, part: SourcePart) -> Iterator[ArrayImage]:
        """All images of a part. Raises ValueError if the array is damaged."""

    def class_names(self) -> list[str]:
        """Class names in the order of their numbers; empty if the files do not contain them."""
        return []


class OneFile(Arrays):
    """A layout that consists of a single file."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        folder, _, self.key = uri.rpartition("/")
        self.store = open_store(f"{folder}/" if folder.endswith("//") else folder)

    def files(self) -> list[Listed]:
        found = [file for file in self.store.scan(self.key) if file.key == self.key]
        if not found:
            raise ValueError(f"There is no file {self.uri}. Give the file of layout {self.layout}.")
        return found


class CorruptArray(ValueError):
    """An array is truncated or cannot be decompressed."""


@contextlib.contextmanager
def unpacked(store: Store, key: str) -> Iterator[BinaryIO]:
    """A file with a large read buffer, because each read is a request to an object store; decompressed if its name says gzip."""
    with buffered(store, key) as file:
        if key.lower().endswith((".gz", ".tgz")):
            with gzip.GzipFile(fileobj=file) as plain:
                yield cast(BinaryIO, plain)
        else:
            yield file


def buffered(store: Store, key: str) -> BinaryIO:
    """A file with a large read buffer."""
    return io.BufferedReader(cast(Any, store.open(key)), READ_BYTES)


@contextlib.contextmanager
def damage_of(uri: str) -> Iterator[None]:
    """Converts whatever libraries raise for a damaged or hostile file to CorruptArray, but not what the store raises."""
    try:
        yield
    except (CorruptArray, gzip.BadGzipFile, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptArray(f"{uri} is damaged: {error}. Copy it again.") from error
    except (OSError, StoreFailed) as error:
        if isinstance(error, OSError) and error.errno == errno.EINVAL:  # seek to an impossible position
            raise CorruptArray(f"{uri} is damaged: it points outside itself. Copy it again.") from error
        raise
    except Exception as error:
        raise CorruptArray(f"{uri} is damaged: {type(error).__name__}: {error}. Copy it again.") from error
