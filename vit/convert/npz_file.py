"""Opens `.npz` files of strangers: sizes are checked from the headers, and an array is unpacked only when it is asked for."""

import contextlib
import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from vitline.infra.storage import open_store
from vitline.vit.convert.report import ConversionError

MAX_ENTRIES = 20_000
"""A two-tower checkpoint with optimizer state has some thousands."""
MAX_RATIO, ALWAYS_ALLOWED_BYTES = 20, 2**28
"""Weights hardly compress; a new optimizer's moments and a head of zeros do. Small files may unpack to 256 MiB in any case."""
_HEADER_BYTES = 2**14  # numpy refuses headers above 10,000 characters
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@contextlib.contextmanager
def opened_npz(uri: str) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of a file by name. Each is read when it is asked for, and takes no more memory than its header says.

    Raises ConversionError, also while the context is open: for a missing or damaged file, pickled entries, headers that
    disagree with the data, and a file that unpacks to far more than it holds.
    """
    try:
        folder, slash, key = uri.rpartition("/")
        data = open_store(folder or slash or ".").read(key)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_sizes(archive, len(data), uri)
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            yield file
    except ConversionError:
        raise
    except FileNotFoundError as error:
        raise ConversionError(f"There is no file {uri}.") from error
    except MemoryError as error:
        raise ConversionError(
            f"{uri} needs more memory than this machine has: {error}. Use a larger machine."
        ) from error
    except (
        ValueError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ConversionError(
            f"{uri} is not a valid .npz file, or it has pickled entries: {error}. Download it again and check its size."
        ) from error


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int, uri: str) -> None:
    """Raises ConversionError if the entries are too many or too large, without unpacking any."""
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise ConversionError(
            f"{uri} has {len(entries):,} entries, expected at most {MAX_ENTRIES:,}: it is no checkpoint."
        )
    unpacked, most = sum(entry.file_size for entry in entries), max(MAX_RATIO * num_bytes, ALWAYS_ALLOWED_BYTES)
    if unpacked > most:
        raise ConversionError(
            f"{uri} has {num_bytes:,} bytes that unpack to {unpacked:,} bytes, expected at most {most:,}: weights do not "
            "compress so well. Check where the file is from."
        )
    for entry in entries:
        _check_entry(archive, entry, uri)


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, uri: str) -> None:
    name = entry.filename.removesuffix(".npy")
    if entry.compress_type not in _METHODS:
        raise ConversionError(
            f"{uri}: {name} is compressed by a method that numpy does not use. Download the file again."
        )
    with archive.open(entry) as member:
        start = io.BytesIO(member.read(_HEADER_BYTES))
    if start.getvalue()[:6] != b"\x93NUMPY":
        raise ConversionError(
            f"{uri} is not an .npz file: {entry.filename} is not an array. If it is a torch file, convert it to safetensors."
        )
    old = np.lib.format.read_magic(start) == (1, 0)
    header = (np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0)(start)
    shape, _, dtype = header
    if dtype.hasobject:
        raise ConversionError(f"{uri}: {name} is not read, because it has pickled entries, which could run any code.")
    stated, found = math.prod(shape) * dtype.itemsize, entry.file_size - start.tell()
    if stated != found:
        raise ConversionError(
            f"{uri}: {name} should have {stated:,} bytes by its header, but has {found:,}. Download the file again."
        )
    if 0 in shape or not dtype.itemsize:
        raise ConversionError(f"{uri}: {name} has shape {shape} of {dtype}, expected at least one number.")
