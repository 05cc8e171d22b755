"""Bytes of archives and of framed records, as other programs write them."""

import io
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping

Name = str | tarfile.TarInfo


def tar_of(
    files: Mapping[str, bytes] | Iterable[tuple[Name, bytes | None]],
    mode: str = "w",
    tar_format: int = tarfile.PAX_FORMAT,
) -> bytes:
    """A tar of files by their names, as Python writes it; a TarInfo without bytes takes the place of a file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tar_format) as archive:  # type: ignore[call-overload]
        for name, data in files.items() if isinstance(files, Mapping) else files:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(data or b"")
            archive.addfile(member, None if data is None else io.BytesIO(data))
    return out.getvalue()


def link_of(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, None]:
    """A link as a file of `tar_of`."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, None


def framed(payloads: Iterable[bytes], checksum: Callable[[bytes], int]) -> bytes:
    """Records as a TFRecord file has them; `checksum` is CRC-32C."""

    def masked(data: bytes) -> bytes:
        crc = checksum(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) & 0xFFFFFFFF)

    heads = ((struct.pack("<Q", len(payload)), payload) for payload in payloads)
    return b"".join(head + masked(head) + body + masked(body) for head, body in heads)
