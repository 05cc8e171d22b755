"""Program of the decoding process: reads image files from standard input and writes verdicts to standard output.

It handles untrusted bytes. Its output has a fixed format and is never pickled: an exploit of a decoder is confined to this process,
whose memory and time are limited, and cannot run code in the parent process.

In:  8 bytes of length per image (little endian), then the file.
Out: 1 byte of kind and 4 bytes of length per answer, then the body described in `Kind`; first READY, then one per image, in order.
"""

import contextlib
import ctypes
import enum
import importlib
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import cast, get_args

from data_prep.decode import DecodePolicy, DecodeReason, ImageRejected
from data_prep.images import Examined
from infra.config import FrozenConfig

REQUEST = struct.Struct("<Q")
ANSWER = struct.Struct("<BI")
MAX_ANSWER_BYTES = 64 * 1024
"""A longer answer is treated as damaged."""

_EXAMINED = struct.Struct("<32s32s32s32sII")
_MAX_TEXT = 4_000
_LEAST_FREE_BYTES = 64 * 1024 * 1024
_PR_SET_PDEATHSIG = 1

Examine = Callable[[bytes, DecodePolicy], Examined]


class Kind(enum.IntEnum):
    """Kinds of answers."""

    READY = 0
    """Imports are done and limits are set; no body."""
    EXAMINED = 1
    """An Examined: four hashes, width and height, then format and mode as text, separated by a zero byte."""
    REJECTED = 2
    """An ImageRejected: reason and detail, separated by a zero byte."""
    FAILED = 3
    """Text: what stopped the decoder, such as lack of memory. The process ends after it."""


class ServerSettings(FrozenConfig):
    """Settings of the process."""

    policy: DecodePolicy
    memory_bytes: int
    """Limit of its address space."""
    function: str
    """Dotted name of the examining function: takes bytes and policy, returns Examined or raises ImageRejected."""


def serve(settings_json: str, parent: int) -> None:
    """Answer requests until the input ends. `parent` is the id of the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    _end_with(parent)
    settings = ServerSettings.model_validate_json(settings_json)
    module, _, name = settings.function.rpartition(".")
    examine: Examine = getattr(importlib.import_module(module), name)
    _limit(settings.memory_bytes)
    answers = os.dup(sys.stdout.fileno())
    # Decoders written in C may print; their output would be mistaken for an answer.
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())
    with contextlib.suppress(BrokenPipeError):
        _send(answers, Kind.READY, b"")
        _answer_all(answers, examine, settings)


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
        return Kind.EXAMINED, encode_examined(examine(data, settings.policy))
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
    message = memoryview(ANSWER.pack(kind, len(body)) + body)
    while message:
        message = message[os.write(answers, message) :]


def encode_examined(examined: Examined) -> bytes:
    """Body of an EXAMINED answer."""
    hashes = (examined["sha256"], examined["pixel_sha256"], examined["phash"], examined["phash_mirror"])
    fixed = _EXAMINED.pack(*hashes, examined["width_px"], examined["height_px"])
    return fixed + f"{examined['format']}\0{examined['mode']}".encode()


def decode_answer(kind: int, body: bytes) -> Examined | ImageRejected | str:
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
        if zero and reason in get_args(DecodeReason):
            return ImageRejected(cast(DecodeReason, reason), detail)
    elif kind == Kind.FAILED:
        return body.decode(errors="replace")
    raise ValueError(f"a damaged answer of kind {kind} with {len(body):,} bytes")


def _end_with(parent: int) -> None:
    # A decoder in an endless loop does not notice that its input has ended, so the Linux kernel ends the process.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended already")


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
