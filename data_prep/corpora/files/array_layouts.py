"""What every layout of pixel arrays is to the corpus that is made of it, and how damage of their files is told."""

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

from data_prep.corpora.raw import Part
from infra.storage import Listed, Store, StoreFailed, open_store

READ_BYTES = 4 * 1024 * 1024
"""How much of a file is read at once."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels (h, w) or (h, w, 3), and where they stand."""

    split: str | None
    number: int
    pixels: np.ndarray
    label: int


class Arrays(ABC):
    """One layout: which arrays there are, and their pictures."""

    num_classes: int | None = None

    def __init__(self, uri: str, layout: str) -> None:
        self.uri, self.layout = uri, layout

    @abstractmethod
    def files(self) -> list[Listed]:
        """Every file that counts. Raises ValueError where there is none."""

    @abstractmethod
    def parts(self, max_pixels: int) -> Iterator[Part]:
        """Every array or archive. Raises ValueError where it is not what the layout says."""

    @abstractmethod
    def pictures(self, part: Part) -> Iterator[Picture]:
        """All pictures of a part. Raises ValueError where the array is damaged."""

    def class_names(self) -> list[str]:
        """Names of the classes in the order of their numbers; none where the files hold none."""
        return []


class OneFile(Arrays):
    """A layout whose path is a file."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        folder, _, self.key = uri.rpartition("/")
        self.store = open_store(f"{folder}/" if folder.endswith("//") else folder)

    def files(self) -> list[Listed]:
        found = [file for file in self.store.scan(self.key) if file.key == self.key]
        if not found:
            raise ValueError(f"There is no file {self.uri}. Name the file of the layout {self.layout}.")
        return found


class ArrayDamaged(ValueError):
    """An array ends early, or cannot be decompressed."""


def buffered(store: Store, key: str) -> BinaryIO:
    """A file that is read in long stretches: each is a request of an object store."""
    return io.BufferedReader(cast(Any, store.open(key)), READ_BYTES)


@contextlib.contextmanager
def damage_of(uri: str) -> Iterator[None]:
    """Whatever a damaged or hostile file makes the libraries raise is an ArrayDamaged; what the store raises is not."""
    try:
        yield
    except (ArrayDamaged, gzip.BadGzipFile, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ArrayDamaged(f"{uri} is damaged: {error}. Copy it again.") from error
    except (OSError, StoreFailed) as error:
        if isinstance(error, OSError) and error.errno == errno.EINVAL:  # a place that no file has
            raise ArrayDamaged(f"{uri} is damaged: it points outside itself. Copy it again.") from error
        raise
    except Exception as error:
        raise ArrayDamaged(f"{uri} is damaged: {type(error).__name__}: {error}. Copy it again.") from error
