"""Pixels of images that a stranger made, decoded in the decoding process: this process never touches the file but its header."""

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

import numpy as np

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_server import PIXELS
from vitline.data_prep.examine.local_range import LocalRange
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder

T = TypeVar("T")
_TIMEOUT_S, _MEMORY_BYTES = 60.0, 4 << 30


def decode_all_apart(
    images: Iterable[tuple[T, bytes | LocalRange]], policy: DecodePolicy
) -> Iterator[tuple[T, np.ndarray | ImageRejected]]:
    """`decode_sandboxed` for many images, each with a tag, in order: the process decodes one while the next are read. An image that is
    refused gives the ImageRejected itself."""
    with SandboxedDecoder(policy, timeout_s=_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, function=PIXELS) as decoder:
        for tag, outcome in decoder.run(images):
            yield tag, outcome if isinstance(outcome, ImageRejected) else cast(np.ndarray, outcome)


def decode_sandboxed(data: bytes, policy: DecodePolicy) -> np.ndarray:
    """Pixels (height, width, 3), uint8 RGB, as `vitline.data_prep.decode.decode` returns them. Thread-safe.

    Raises ImageRejected, with reason `decoder_crash` if the decoder crashes, hangs for a minute, needs more than 4 GiB or answers
    what the header of the file contradicts; and RuntimeError if the decoding process cannot be started. The first call starts that
    process, in about a second; later ones use it.
    """
    ((_, outcome),) = decode_all_apart([(None, data)], policy)
    if isinstance(outcome, ImageRejected):
        raise outcome
    return outcome
