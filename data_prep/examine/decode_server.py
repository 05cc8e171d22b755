"""Program of the decoding process: reads image files from standard input and writes verdicts to standard output.

It handles untrusted bytes, so it loads all decoders and then locks itself in (sandbox.py): from its first image on it has its
memory, the two pipes and a limited time, and neither files nor network nor other processes. Its output has a fixed format and is
never pickled. The parent process believes it no more than it can check (check_answer.py).

In:  8 bytes of length per image (little endian), then the file.
Out: 1 byte of kind and 4 bytes of length per answer, then the body described in `Kind`; first READY, then one per image, in order.
"""

import contextlib
import ctypes
import enum
import importlib
import io
import os
import pkgutil
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, cast, get_args

import numpy as np
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, DecodeReason, ImageRejected
from vitline.data_prep.examine.images import Examined
from vitline.data_prep.examine.sandbox import enter_sandbox
from vitline.infra.children import end_with_parent
from vitline.infra.config import FrozenConfig

REQUEST = struct.Struct("<Q")
ANSWER = struct.Struct("<BI")
MAX_ANSWER_BYTES = 64 * 1024
"""A longer answer, other than pixels, is treated as damaged."""

_EXAMINED = struct.Struct("<32s32s32s32sII")
_HEIGHT_WIDTH = struct.Struct("<II")
_MAX_TEXT = 4_000
_LEAST_FREE_BYTES = 64 * 1024 * 1024
# Modules that Pillow, numpy and Python import inside of functions.
_LOADED_LATE = (
    *(f"PIL.{name}" for name in ("ImageCms", "ImageColor", "ImageFilter", "ImageOps", "ImagePalette", "ImageSequence")),
    *(f"encodings.{name}" for name in ("ascii", "latin_1", "unicode_escape", "utf_16", "utf_16_be", "utf_16_le")),
)

Examine = Callable[[bytes, DecodePolicy], Examined | np.ndarray]
PIXELS = "vitline.data_prep.decode.decode"
"""The function whose answers are pixels."""


class Kind(enum.IntEnum):
    """Kinds of answers."""

    READY = 0
    """Decoders are loaded and the process is locked in. Text: what the system could not lock, one per line."""
    EXAMINED = 1
    """An Examined: four hashes, width and height, then format and mode as text, separated by a zero byte."""
    REJECTED = 2
    """An ImageRejected: reason and detail, separated by a zero byte."""
    FAILED = 3
    """Text: what stopped the decoder, such as lack of memory. The process ends after it."""
    PIXELS = 4
    """Height and width, then the RGB values by rows."""


class ServerSettings(FrozenConfig):
    """Settings of the process."""

    policy: DecodePolicy
    memory_bytes: int
    """Limit of its address space."""
    cpu_s: int
    """Limit of its CPU time, over all images."""
    function: str
    """Dotted name of the examining function: takes bytes and policy, returns Examined or pixels, or raises ImageRejected."""

    def most_bytes(self, kind: int) -> int:
        """The longest answer of a kind that this process may send."""
        pixels = _HEIGHT_WIDTH.size + 3 * self.policy.max_pixels
        return pixels if kind == Kind.PIXELS and self.function == PIXELS else MAX_ANSWER_BYTES


def serve(settings_json: str, parent: int) -> None:
    """Answer requests until the input ends. `parent` is the id of the process that started this one."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach all processes of a terminal; the parent decides
        signal.signal(number, signal.SIG_IGN)
    # A decoder in an endless loop does not notice that its input has ended.
    if not end_with_parent(parent, signal.SIGKILL):
        raise SystemExit("the process that started this one has ended already")
    settings = ServerSettings.model_validate_json(settings_json)
    examine: Examine = pkgutil.resolve_name(settings.function)
    _load_decoders(examine, settings.policy)
    _limit(settings.memory_bytes)
    answers, errors = os.dup(sys.stdout.fileno()), os.dup(sys.stderr.fileno())
    # Decoders written in C may print; their output would be mistaken for an answer.
    streams = [stream.fileno() for stream in (sys.stdout, sys.stderr)]
    with open(os.devnull, "wb") as nowhere:
        for stream in streams:
            os.dup2(nowhere.fileno(), stream)
    try:
        lacking = enter_sandbox((sys.stdin.fileno(), *streams, answers, errors), settings.cpu_s)
    except Exception as error:
        os.write(errors, f"{type(error).__name__}: {error}".encode(errors="replace"))
        raise
    os.close(errors)
    sys.meta_path.insert(0, _NoImports())
    with contextlib.suppress(BrokenPipeError):
        _send(answers, Kind.READY, "\n".join(lacking).encode())
        _answer_all(answers, examine, settings)


def _load_decoders(examine: Examine, policy: DecodePolicy) -> None:
    """Load all that decoding may need, as nothing can be loaded later: plugins of Pillow, codecs of text, and what the first image
    of each kind would load."""
    warnings.simplefilter("ignore")  # nobody reads them, and formatting one loads source files
    Image.init()
    for name in _LOADED_LATE:
        with contextlib.suppress(ImportError):  # Pillow may be built without one
            importlib.import_module(name)
    with contextlib.suppress(OSError):  # loaded by the C library when a thread ends early; not on every system
        ctypes.CDLL("libgcc_s.so.1")
    for kind in ("JPEG", "PNG", "TIFF", "GIF", "BMP"):
        file = io.BytesIO()
        Image.new("L", (16, 16), 128).save(file, kind)
        with contextlib.suppress(Exception):  # the first image will say what is wrong
            examine(file.getvalue(), policy)


class _NoImports:
    """The first finder of modules: says which module a decoder lacks. Without it, Pillow would call the image corrupt."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ModuleMissing(f"a decoder needs the module {name}, which was not loaded before the process was locked in")


class ModuleMissing(Exception):
    """A module was imported too late. Not an ImportError, which libraries catch."""


def _answer_all(answers: int, examine: Examine, settings: ServerSettings) -> None:
    requests = sys.stdin.buffer
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        (length,) = REQUEST.unpack(head)
        data = requests.read(length)
        if len(data) < length:
            return
        kind, body = _verdict(data, examine, settings)
        _send(answers, kind, body)
        if kind is Kind.FAILED:
            return


def _verdict(data: bytes, examine: Examine, settings: ServerSettings) -> tuple[Kind, bytes]:
    try:
        found = examine(data, settings.policy)
        if isinstance(found, np.ndarray):
            return Kind.PIXELS, _HEIGHT_WIDTH.pack(*found.shape[:2]) + found.tobytes()
        return Kind.EXAMINED, encode_examined(found)
    except ImageRejected as rejected:
        return Kind.REJECTED, f"{rejected.reason}\0{rejected.detail[:_MAX_TEXT]}".encode(errors="replace")
    except MemoryError:
        text = (
            f"the decoder asked for more than its {settings.memory_bytes:,} bytes of address space; "
            "raise decode_memory_bytes"
        )
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return Kind.FAILED, text[:_MAX_TEXT].strip().encode(errors="replace")


def _send(answers: int, kind: Kind, body: bytes) -> None:
    for part in (ANSWER.pack(kind, len(body)) + body[:MAX_ANSWER_BYTES], body[MAX_ANSWER_BYTES:]):
        message = memoryview(part)
        while message:
            message = message[os.write(answers, message) :]


def encode_examined(examined: Examined) -> bytes:
    """Body of an EXAMINED answer."""
    hashes = (examined["sha256"], examined["pixel_sha256"], examined["phash"], examined["phash_mirror"])
    fixed = _EXAMINED.pack(*hashes, examined["width_px"], examined["height_px"])
    return fixed + f"{examined['format']}\0{examined['mode']}".encode()


def decode_answer(kind: int, body: bytes | bytearray) -> Examined | ImageRejected | np.ndarray | str:
    """Content of an answer to an image; text is the reason why the decoder failed. Raises ValueError for a damaged answer."""
    if kind == Kind.EXAMINED and len(body) >= _EXAMINED.size:
        sha256, pixel_sha256, phash, phash_mirror, width, height = _EXAMINED.unpack_from(body)
        file_format, zero, mode = body[_EXAMINED.size :].decode(errors="replace").partition("\0")
        if zero:
            return Examined(
                sha256=sha256,
                pixel_sha256=pixel_sha256,
                phash=phash,
                phash_mirror=phash_mirror,
                width_px=width,
                height_px=height,
                format=file_format,
                mode=mode,
            )
    elif kind == Kind.REJECTED:
        reason, zero, detail = body.decode(errors="replace").partition("\0")
        # `decoder_crash` is only said by the parent process.
        if zero and reason in get_args(DecodeReason) and reason != "decoder_crash":
            return ImageRejected(cast(DecodeReason, reason), _printable(detail))
    elif kind == Kind.FAILED:
        return _printable(body.decode(errors="replace"))
    elif kind == Kind.PIXELS and len(body) > _HEIGHT_WIDTH.size:
        height, width = _HEIGHT_WIDTH.unpack_from(body)
        if len(body) == _HEIGHT_WIDTH.size + 3 * height * width:
            return np.frombuffer(body, np.uint8, offset=_HEIGHT_WIDTH.size).reshape(height, width, 3)
    raise ValueError(f"a damaged answer of kind {kind} with {len(body):,} bytes")


def _printable(text: str) -> str:
    """Text for lists, logs and pages: nothing that steers a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])


def _limit(memory_bytes: int) -> None:
    import resource  # POSIX only, while this module is also imported elsewhere

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS may refuse to set the limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        bytearray(_LEAST_FREE_BYTES)
    except MemoryError as error:
        raise SystemExit(
            f"a limit of {memory_bytes:,} bytes of address space leaves less than {_LEAST_FREE_BYTES:,} for decoding; "
            "raise decode_memory_bytes"
        ) from error


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
