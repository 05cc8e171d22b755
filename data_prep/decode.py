"""Bytes of an image file -> uint8 RGB pixels: the one decoder of preparation and of training. No torch, no Ray.

Every oddity of image files has one declared policy; the policy travels in the corpus manifest, so training decodes
as preparation did. What the policy cannot take is refused with a reason of a closed list, never altered silently.
"""

import functools
import io
import re
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError
from pydantic import Field, PositiveInt

from infra.config import FrozenConfig

DecodeReason = Literal[
    "empty",
    "too_many_bytes",
    "not_an_image",
    "too_many_pixels",
    "side_too_small",
    "side_too_large",
    "aspect_ratio",
    "truncated",
    "corrupt",
    "unsupported_mode",
    "refused_by_policy",
]
"""Why an image is refused; the closed list of this module."""

# Pillow itself raises above twice its limit; our own limit is checked first and may not exceed that.
_PILLOW_PIXEL_CEILING = 2 * 89_478_485
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our limit refuses these, by name
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # odd EXIF in millions of files is no news

Level = Annotated[int, Field(ge=0, le=255)]
Format = Literal["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA"]


class DecodePolicy(FrozenConfig):
    """What is done with each oddity of image files. Recorded in the manifest; part of a corpus's identity."""

    formats: tuple[Format, ...] = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    """Recognised by content, whatever the file name says. MPO (a camera's JPEG with more pictures behind) is JPEG."""
    background: tuple[Level, Level, Level] = (255, 255, 255)
    """RGB colour under transparent pixels. Dropping alpha instead would turn many drawings into one flat colour."""
    exif_orientation: Literal["apply", "ignore"] = "apply"
    """Turn the picture as its EXIF tag asks."""
    cmyk: Literal["convert", "reject"] = "convert"
    """Four-colour images: converted without their colour profile. Profiles of other images are ignored too."""
    sixteen_bit: Literal["high_byte", "reject"] = "high_byte"
    """16 bits per channel: the high byte is kept."""
    animation: Literal["first_frame", "reject"] = "first_frame"
    """Images of several frames or pages."""
    max_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest file."""
    max_pixels: Annotated[int, Field(gt=0, le=_PILLOW_PIXEL_CEILING)] = 89_000_000
    """Largest width x height, read from the header before anything is decoded: a bomb costs nothing."""
    min_side_px: PositiveInt = 1
    """Smallest width and height."""
    max_side_px: PositiveInt = 65_535
    """Largest width and height."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] = 100.0
    """Longer side over shorter side."""


class ImageRejected(ValueError):
    """The image is refused: `reason` is of the closed list, `detail` says what was found."""

    def __init__(self, reason: DecodeReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: DecodeReason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)


@dataclass(frozen=True)
class DecodedImage:
    """Pixels (height, width, 3) uint8 RGB, and what kind of file they came from (`format` as Pillow names it)."""

    pixels: np.ndarray
    format: str
    mode: str


def decode(data: bytes, policy: DecodePolicy | None = None) -> np.ndarray:
    """Pixels (height, width, 3), uint8 RGB, of one image file. Raises ImageRejected.

    Safe in threads; the decoders release the GIL. RGB and grey JPEG go to libjpeg-turbo through simplejpeg, the rest
    to Pillow.
    """
    return decode_image(data, policy).pixels


def decode_image(data: bytes, policy: DecodePolicy | None = None) -> DecodedImage:
    """As `decode`, with the format and colour mode of the file. Raises ImageRejected."""
    policy = policy or DEFAULT_POLICY
    if not data:
        raise ImageRejected("empty", "the file has no bytes")
    if len(data) > policy.max_bytes:
        raise ImageRejected("too_many_bytes", f"{len(data):,} bytes, limit {policy.max_bytes:,}")
    # An EXIF block may hold an orientation: those go to Pillow. Searching for the mark costs 1 % of decoding.
    if data[:3] == b"\xff\xd8\xff" and "JPEG" in policy.formats and b"Exif\0\0" not in data:
        decoded = _decode_plain_jpeg(data, policy)
        if decoded is not None:
            return decoded
    return _decode_with_pillow(data, policy)


DEFAULT_POLICY = DecodePolicy()

_EXTRANEOUS_BYTES = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
# Some encoders pad the end of the data. More left over than this means that part of the picture was skipped.
_MAX_PADDING_BYTES = 16


def _decode_plain_jpeg(data: bytes, policy: DecodePolicy) -> DecodedImage | None:
    """RGB or grey JPEG by libjpeg-turbo; None where Pillow should look at the file instead."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _check_size(width, height, policy)
    if colorspace not in ("RGB", "YCbCr", "Gray"):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError as error:
        padding = _EXTRANEOUS_BYTES.search(str(error))
        if padding and int(padding[1]) <= _MAX_PADDING_BYTES:
            return None  # Pillow overlooks padding, and still refuses a truncated file
        raise ImageRejected("truncated" if "Premature end" in str(error) else "corrupt", str(error)) from error
    return DecodedImage(pixels, "JPEG", "L" if colorspace == "Gray" else "RGB")


def _decode_with_pillow(data: bytes, policy: DecodePolicy) -> DecodedImage:
    # Whatever a hostile file makes a decoder raise is the file's fault: hence `except Exception` twice.
    try:
        image = Image.open(io.BytesIO(data), formats=_available(policy.formats))
    except UnidentifiedImageError as error:
        raise ImageRejected("not_an_image", _starts_with(data)) from error
    except Image.DecompressionBombError as error:
        raise ImageRejected("too_many_pixels", str(error)) from error
    except Exception as error:
        raise _broken(error) from error
    with image:
        file_format, mode = image.format or "", image.mode
        _check_size(image.width, image.height, policy)
        if policy.animation == "reject" and getattr(image, "is_animated", False):
            raise ImageRejected("refused_by_policy", f"{getattr(image, 'n_frames', 'several')} frames")
        try:
            orientation = _orientation(image) if policy.exif_orientation == "apply" else 1
            image.load()
            pixels = np.array(_turned(_as_rgb(image, policy), orientation))
        except ImageRejected:
            raise
        except Image.DecompressionBombError as error:
            raise ImageRejected("too_many_pixels", str(error)) from error
        except Exception as error:
            raise _broken(error) from error
    return DecodedImage(pixels, file_format, mode)


def _broken(error: Exception) -> ImageRejected:
    truncated = "truncated" in str(error).lower() or isinstance(error, EOFError)
    return ImageRejected("truncated" if truncated else "corrupt", f"{type(error).__name__}: {error}")


@functools.cache
def _available(formats: tuple[Format, ...]) -> tuple[str, ...]:
    Image.init()  # Pillow may be built without the rarer formats, and answers KeyError to a name it lacks
    return tuple(name for name in formats if name in Image.OPEN)


def _check_size(width: int, height: int, policy: DecodePolicy) -> None:
    size, short, long = f"{width} x {height} pixels", min(width, height), max(width, height)
    if width * height > policy.max_pixels:
        raise ImageRejected("too_many_pixels", f"{size}, limit {policy.max_pixels:,}")
    if short < policy.min_side_px:
        raise ImageRejected("side_too_small", f"{size}, smallest side allowed {policy.min_side_px}")
    if long > policy.max_side_px:
        raise ImageRejected("side_too_large", f"{size}, largest side allowed {policy.max_side_px}")
    if long > policy.max_aspect_ratio * short:
        raise ImageRejected("aspect_ratio", f"{size}, longest allowed {policy.max_aspect_ratio:g} to 1")


def _as_rgb(image: Image.Image, policy: DecodePolicy) -> Image.Image:
    mode = image.mode
    if mode.startswith("I;16"):
        if policy.sixteen_bit == "reject":
            raise ImageRejected("refused_by_policy", "16 bits per channel")
        # Pillow keeps the high byte of 16-bit colour by itself, but clips 16-bit grey; do to grey as to colour.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if mode == "CMYK" and policy.cmyk == "reject":
        raise ImageRejected("refused_by_policy", "CMYK")
    if mode in ("I", "F", "LAB", "HSV"):
        raise ImageRejected("unsupported_mode", f"mode {mode}, which has no agreed range of grey levels")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, (*policy.background, 255))
        return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _orientation(image: Image.Image) -> int:
    # A broken EXIF block is common in photographs that are otherwise whole: it then says nothing.
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        return 1


def _starts_with(data: bytes) -> str:
    return f"{len(data):,} bytes that start with {data[:12]!r}"
