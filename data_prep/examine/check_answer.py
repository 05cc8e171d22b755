"""Compares what the decoding process says about an image with the bytes of the image, which this process has."""

import hashlib
import re

from vitline.data_prep.decode import DecodePolicy, ImageRejected, check_size
from vitline.data_prep.examine.image_header import read_header
from vitline.data_prep.examine.images import Examined
from vitline.data_prep.examine.local_range import LocalRange

_MODE = re.compile(r"[A-Za-z0-9;]{1,8}")
_BLOCK_BYTES = 1 << 20


def check_examined(data: bytes | LocalRange, answer: Examined, policy: DecodePolicy) -> None:
    """Raises ValueError if an accepted image cannot be what the answer says: other bytes, another format or size, or one that the
    policy refuses. The hashes of pixels cannot be compared without decoding."""
    if answer["sha256"] != _sha256(data):
        raise ValueError("an answer about other bytes than those it was sent")
    if not _MODE.fullmatch(answer["mode"]):
        raise ValueError(f"a colour mode that does not exist, {answer['mode'][:20]!r}")
    check_decoded(data, answer["width_px"], answer["height_px"], policy, answer["format"])


def check_decoded(
    data: bytes | LocalRange, width_px: int, height_px: int, policy: DecodePolicy, file_format: str | None = None
) -> None:
    """Raises ValueError if a file cannot have this size and, where given, format."""
    header = read_header(data.read if isinstance(data, LocalRange) else lambda at, length: data[at : at + length])
    claimed = file_format if file_format is not None else header.format or "TGA"
    if claimed not in policy.formats or (header.format or "TGA") != claimed:
        raise ValueError(f"format {claimed[:20]!r} for a file that starts as {header.format or 'none that is known'}")
    size = f"{width_px:,} x {height_px:,} pixels"
    try:
        check_size(width_px, height_px, policy, claimed)
    except ImageRejected as refused:
        raise ValueError(f"{size}, which the policy refuses: {refused.reason}") from refused
    # A photograph may be stored turned by 90 degrees.
    if header.sizes and not {(width_px, height_px), (height_px, width_px)} & header.sizes:
        named = ", ".join(f"{width:,} x {height:,}" for width, height in sorted(header.sizes)[:3])
        raise ValueError(f"{size} for a file whose header says {named}")


def _sha256(data: bytes | LocalRange) -> bytes:
    digest = hashlib.sha256()
    if isinstance(data, LocalRange):
        for start in range(0, len(data), _BLOCK_BYTES):
            digest.update(data.read(start, _BLOCK_BYTES))
    else:
        digest.update(data)
    return digest.digest()
