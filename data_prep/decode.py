"""Decodes the bytes of an image file to uint8 RGB pixels: the only decoder of preparation and training. No torch, no Ray.

A policy declares how each unusual feature of image files is treated. The corpus manifest records the policy, so training
decodes as preparation did. Images outside of the policy are refused with a reason from a closed list, never altered silently.
"""

import contextlib
import functools
import io
import re
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile
from pydantic import Field, PositiveInt

from vitline.data_prep.archives.png_chunks import without_texts
from vitline.infra.config import FrozenConfig, omitted_at_default

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
    "decoder_crash",
]
"""Closed list of reasons for refusing an image. `decoder_crash` is set by the parent process, `examine/decode_child.py`."""

# Pillow raises an error above twice its own limit. Our limit is checked first and must not exceed that.
_PILLOW_PIXEL_CEILING = 2 * 89_478_485
warnings.filterwarnings(
    "ignore", category=Image.DecompressionBombWarning
)  # our own limit refuses these images with a reason
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # too many files have odd EXIF

PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20  # XMP with the history of an editor; other texts are left out before decoding

Level = Annotated[int, Field(ge=0, le=255)]
Format = Literal["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "SGI", "PCX", "QOI"]


class DecodePolicy(FrozenConfig):
    """How unusual features of image files are treated. Recorded in the manifest; part of the identity of a corpus."""

    formats: tuple[Format, ...] = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    """Accepted formats, recognised by content whatever the file name says. MPO (a camera's JPEG with further images appended)
    counts as JPEG, and not as an animation. TGA, SGI, PCX and QOI can be added; QOI takes about a second per megapixel."""
    background: tuple[Level, Level, Level] = (255, 255, 255)
    """RGB colour behind transparent pixels. Dropping alpha instead would turn many drawings into one flat colour."""
    exif_orientation: Literal["apply", "ignore"] = "apply"
    """Whether to rotate or flip the image as its EXIF tag says, or XMP where EXIF has no orientation."""
    cmyk: Literal["convert", "reject"] = "convert"
    """CMYK images: convert without their colour profile, or refuse. Profiles of other images are ignored as well."""
    sixteen_bit: Literal["high_byte", "reject"] = "high_byte"
    """Images with 16 bits per channel: keep the high byte, or refuse. JPEG 2000 and AVIF colours are always read as 8 bits."""
    animation: Literal["first_frame", "reject"] = "first_frame"
    """Images with several frames or pages: use the first frame, or refuse."""
    max_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest file size in bytes."""
    max_pixels: Annotated[int, Field(gt=0, le=_PILLOW_PIXEL_CEILING)] = 89_000_000
    """Largest width x height, checked in the header before anything is decoded, so a decompression bomb costs nothing."""
    max_jpeg2000_pixels: PositiveInt | None = omitted_at_default(None)
    """The same for JPEG 2000, of which even an image of one colour, in a file of 2 kB, takes many times as long per pixel as a
    JPEG, in each epoch. None: `max_pixels`. A limit of time would depend on the machine, and so would the corpus."""
    min_side_px: PositiveInt = 1
    """Smallest allowed width and height."""
    max_side_px: PositiveInt = 65_535
    """Largest allowed width and height."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] = 100.0
    """Largest allowed ratio of the longer to the shorter side."""


class ImageRejected(ValueError):
    """The image is refused: `reason` is from the closed list, `detail` says what was found."""

    def __init__(self, reason: DecodeReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: DecodeReason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)


@dataclass(frozen=True)
class DecodedImage:
    """Pixels (height, width, 3), uint8 RGB, and format and colour mode of the file as Pillow names them."""

    pixels: np.ndarray
    format: str
    mode: str


def decode(data: bytes, policy: DecodePolicy | None = None) -> np.ndarray:
    """Pixels (height, width, 3), uint8 RGB, of one image file.

    Raises ImageRejected, and MemoryError if a decoder needs more memory than there is. Thread-safe; the decoders release the
    GIL. RGB and grey JPEG are decoded by libjpeg-turbo through simplejpeg, everything else by Pillow.
    """
    return decode_image(data, policy).pixels


def decode_image(data: bytes, policy: DecodePolicy | None = None) -> DecodedImage:
    """As `decode`, with the format and colour mode of the file. Raises ImageRejected and MemoryError."""
    policy = policy or DEFAULT_POLICY
    if not data:
        raise ImageRejected("empty", "the file has no bytes")
    if len(data) > policy.max_bytes:
        raise ImageRejected("too_many_bytes", f"{len(data):,} bytes, limit {policy.max_bytes:,}")
    if data[:3] == b"\xff\xd8\xff":
        header = _read_jpeg_header(data)
        if not header.single_scan:
            _check_scans(data)
        if "JPEG" in policy.formats and not header.maybe_turned:  # Pillow reads the orientation
            decoded = _decode_plain_jpeg(data, policy)
            if decoded is not None:
                return decoded
    return _decode_with_pillow(data, policy)


def is_common_jpeg(data: bytes, policy: DecodePolicy) -> bool:
    """Whether a file is a JPEG of one scan without EXIF or an orientation in XMP, of no more bytes than the policy allows: what a
    faster decoder may try first."""
    if not 0 < len(data) <= policy.max_bytes or data[:3] != b"\xff\xd8\xff" or "JPEG" not in policy.formats:
        return False
    header = _read_jpeg_header(data)
    return header.single_scan and not header.maybe_turned


DEFAULT_POLICY = DecodePolicy()

# Each scan of a progressive JPEG, even an empty one of 24 bytes, costs a pass over all pixels: 88 megapixels with 315 scans
# took 4.5 s, and a colour file can have thousands. Encoders write about 10. libtiff has the same limit.
_MAX_SCANS = 100
_XMP_IN_JPEG, _ORIENTATION_IN_XMP = (
    b"http://ns.adobe.com/xap/1.0/\0",
    re.compile(rb"tiff:Orientation\s*(?:=\s*[\"']|>)\s*([1-8])"),
)
_APP1, _START_OF_SCAN, _END_OF_IMAGE = b"\xe1", b"\xda", b"\xd9"
_SEQUENTIAL = (b"\xc0", b"\xc1")  # start of frame: baseline and extended sequential, Huffman coded
_JPEG_MARKER = re.compile(rb"\xff+([\x02-\xcf\xd9-\xfe])")  # those without a length are left out, except the end


class _JpegHeader(NamedTuple):
    """What the segments before the first scan of a JPEG say. Reading them costs a tenth of searching the whole file."""

    maybe_turned: bool
    """Whether an EXIF block, or XMP with an orientation, stands before the first scan."""
    single_scan: bool
    """Whether the first scan holds all components of a sequential image: decoders read no further scan."""


def _read_jpeg_header(data: bytes) -> _JpegHeader:
    at, maybe_turned, num_components = 2, False, None
    while (marker := _JPEG_MARKER.search(data, at)) and marker[1] != _END_OF_IMAGE:
        at = marker.end()
        if marker[1] == _START_OF_SCAN:
            return _JpegHeader(maybe_turned, data[at + 2 : at + 3] == num_components)
        if marker[1] == _APP1:
            maybe_turned |= data.startswith(b"Exif\0\0", at + 2) or (
                data.startswith(_XMP_IN_JPEG, at + 2)
                and bool(_ORIENTATION_IN_XMP.search(data, at, at + int.from_bytes(data[at : at + 2])))
            )
        elif marker[1] in _SEQUENTIAL:
            num_components = data[at + 7 : at + 8]
        at += int.from_bytes(data[at : at + 2])
    return _JpegHeader(maybe_turned, single_scan=False)


def _check_scans(data: bytes) -> None:
    """Raises ImageRejected if a JPEG has more than _MAX_SCANS scans. Previews in its segments and what follows it do not count."""
    if data.count(b"\xff" + _START_OF_SCAN) <= _MAX_SCANS:
        return
    at, num_scans = 2, 0
    while (marker := _JPEG_MARKER.search(data, at)) and marker[1] != _END_OF_IMAGE:
        num_scans += marker[1] == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            raise ImageRejected(
                "refused_by_policy", f"a JPEG of more than {_MAX_SCANS} scans, which takes too long to decode"
            )
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])


_EXTRANEOUS_BYTES = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
# Some encoders pad the end of the data. More leftover bytes mean that part of the image was skipped.
_MAX_PADDING_BYTES = 16


def _decode_plain_jpeg(data: bytes, policy: DecodePolicy) -> DecodedImage | None:
    """Decode RGB or grey JPEG with libjpeg-turbo; None if Pillow has to decode the file."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_size(width, height, policy, "JPEG")
    if colorspace not in ("RGB", "YCbCr", "Gray"):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError as error:
        padding = _EXTRANEOUS_BYTES.search(str(error))
        if padding and int(padding[1]) <= _MAX_PADDING_BYTES:
            return None  # Pillow accepts padding but refuses a truncated file
        if _NO_MEMORY.search(str(error)):
            raise MemoryError(str(error)) from error
        raise ImageRejected("truncated" if "Premature end" in str(error) else "corrupt", str(error)) from error
    return DecodedImage(pixels, "JPEG", "L" if colorspace == "Gray" else "RGB")


PILLOW_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
    EOFError,
    BufferError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises on hostile files. Any other exception of the decoding process is a decoder_crash."""


def _decode_with_pillow(data: bytes, policy: DecodePolicy) -> DecodedImage:
    try:
        with Image.open(io.BytesIO(without_texts(data)), formats=_available(policy.formats)) as image:
            file_format, mode = "JPEG" if image.format == "MPO" else image.format or "", image.mode
            check_size(image.width, image.height, policy, file_format)
            if policy.animation == "reject" and image.format != "MPO" and getattr(image, "is_animated", False):
                raise ImageRejected("refused_by_policy", f"{getattr(image, 'n_frames', 'several')} frames")
            return DecodedImage(np.array(_upright(image, policy)), file_format, mode)
    except ImageRejected:
        raise
    except UnidentifiedImageError as error:
        if found := _other_format(data, policy):
            detail = f"{found} is not an accepted format; accepted formats: {', '.join(policy.formats) or 'none'}"
            if found in get_args(Format):
                detail += f". To accept it, add {found} to recipe.decode.formats"
            raise ImageRejected("refused_by_policy", detail) from error
        raise ImageRejected("not_an_image", f"{len(data):,} bytes in no known image format") from error
    except Image.DecompressionBombError as error:
        raise _too_large_for_pillow(error, policy) from error
    except PILLOW_FAULTS as error:
        raise _broken(error) from error


def _other_format(data: bytes, policy: DecodePolicy) -> str:
    """The format of an image whose format the policy does not accept; empty if it is not an image."""
    others = tuple(name for name in get_args(Format) if name not in policy.formats and name != "TGA")
    try:
        with Image.open(io.BytesIO(data), formats=_available(others)) as image:
            return "JPEG" if image.format == "MPO" else image.format or ""
    except UnidentifiedImageError:
        return next((name for name, start in _FOREIGN if start.match(data)), "TGA" if _is_tga(data) else "")
    except Image.DecompressionBombError as error:
        raise _too_large_for_pillow(error, policy) from error
    except PILLOW_FAULTS as error:
        raise _broken(error) from error


# Image formats that no policy accepts, by the first bytes of their files.
_FOREIGN = tuple(
    (name, re.compile(start, re.DOTALL))
    for name, start in (
        ("ICO", rb"\0\0\x01\0[^\0]\0"),
        ("CUR", rb"\0\0\x02\0[^\0]\0"),
        ("ICNS", rb"icns"),
        ("PSD", rb"8BPS"),
        ("HEIF", rb"....ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)"),
        ("JPEG XL", rb"\xff\x0a|\0\0\0\x0cJXL "),
        ("JPEG XR", rb"II\xbc"),
        ("DDS", rb"DDS "),
        ("OpenEXR", rb"v/1\x01"),
        ("FITS", rb"SIMPLE  ="),
        ("Sun raster", rb"\x59\xa6\x6a\x95"),
        ("DCX", rb"\xb1\x68\xde\x3a"),
        ("FLI", rb"....[\x11\x12]\xaf"),
        ("BLP", rb"BLP[12]"),
        ("SVG", rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{,2000}?-->\s*|<!DOCTYPE[^>]*>\s*)*<svg[\s>]"),
    )
)
_TGA_HEADER = struct.Struct("<BBBHHBHHHHBB")


def _is_tga(data: bytes) -> bool:
    """Recognise TGA by its footer or, for older files, by a header whose sizes add up: the format has no magic number."""
    if data[-18:] == b"TRUEVISION-XFILE.\0":
        return True
    if len(data) <= _TGA_HEADER.size:
        return False
    name, has_map, kind, _, colours, colour_bits, _, _, width, height, bits, _ = _TGA_HEADER.unpack_from(data)
    if has_map > 1 or kind not in (1, 2, 3) or bits not in (8, 16, 24, 32) or not width * height:
        return False
    num_bytes: int = _TGA_HEADER.size + name + has_map * colours * colour_bits // 8 + width * height * bits // 8
    return len(data) == num_bytes


_PILLOW_PIXELS = re.compile(r"\((\d+) pixels\)")


def _too_large_for_pillow(error: Image.DecompressionBombError, policy: DecodePolicy) -> ImageRejected:
    """Convert the error of Pillow's own limit, which is above ours and in its message."""
    found = _PILLOW_PIXELS.search(str(error))
    pixels = f"{int(found[1]):,} pixels" if found else f"more than {_PILLOW_PIXEL_CEILING:,} pixels"
    return ImageRejected("too_many_pixels", f"{pixels}, limit {policy.max_pixels:,}")


# Messages of libjpeg and Pillow; other libraries do not distinguish lack of memory from a broken file.
_NO_MEMORY = re.compile(r"insufficient memory|out of memory", re.IGNORECASE)


def _broken(error: Exception) -> ImageRejected | MemoryError:
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return MemoryError(str(error))
    truncated = "truncated" in str(error).lower() or isinstance(error, EOFError)
    return ImageRejected(
        "truncated" if truncated else "corrupt", _QUOTED.sub("...", f"{type(error).__name__}: {error}")
    )


# Pillow quotes part of what it cannot read. A link or a table may lead to a private file, and the reason of a refusal is
# stored with the corpus, so quotes are removed.
_QUOTED = re.compile(r"""(?<!\w)b?(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")


@functools.cache
def _available(formats: tuple[Format, ...]) -> tuple[str, ...]:
    Image.init()  # Pillow may be built without rare formats; it raises KeyError for a missing one
    with contextlib.suppress(ImportError):
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the default is one thread per core for each image
    return tuple(name for name in formats if name in Image.OPEN)


def check_size(width: int, height: int, policy: DecodePolicy, file_format: str) -> None:
    """Raises ImageRejected for a size in pixels that the policy does not accept."""
    size, short, long = f"{width} x {height} pixels", min(width, height), max(width, height)
    if width * height > policy.max_pixels:
        raise ImageRejected("too_many_pixels", f"{size}, limit {policy.max_pixels:,}")
    if file_format == "JPEG2000" and width * height > (policy.max_jpeg2000_pixels or policy.max_pixels):
        raise ImageRejected("too_many_pixels", f"{size} of JPEG 2000, limit {policy.max_jpeg2000_pixels:,}")
    if short < policy.min_side_px:
        raise ImageRejected("side_too_small", f"{size}, smallest side allowed {policy.min_side_px}")
    if long > policy.max_side_px:
        raise ImageRejected("side_too_large", f"{size}, largest side allowed {policy.max_side_px}")
    if long > policy.max_aspect_ratio * short:
        raise ImageRejected("aspect_ratio", f"{size}, largest ratio allowed {policy.max_aspect_ratio:g} to 1")


def _upright(image: Image.Image, policy: DecodePolicy) -> Image.Image:
    bits = _bits_per_channel(image)
    if bits > 8 and policy.sixteen_bit == "reject":
        raise ImageRejected("refused_by_policy", "16 bits per channel, which decode.sixteen_bit rejects")
    _scale_transparent_colour(image, bits)
    in_xmp = _taken_from_xmp(image)
    stored: Any = image.tag_v2.get(_ORIENTATION) if isinstance(image, TiffImageFile) else None
    # Load before reading EXIF: for a PNG, reading EXIF loads the pixels too, and pixels that failed to load are black later.
    image.load()
    rgb = _as_rgb(image, policy, bits)
    left = _orientation(image)
    # Pillow rotates a TIFF while loading it, and removes the tag.
    if policy.exif_orientation == "apply":
        return _turned(rgb, in_xmp if left is None and stored is None else left)
    return rgb if stored in (None, left or 1) else _turned(rgb, _BACK.get(stored, stored))


_BITS = re.compile(r"^(?:L|I|LA|RGB|RGBA|RGBX|CMYK);(\d+)")


def _bits_per_channel(image: Image.Image) -> int:
    """Bits per channel as stored in the file, as far as Pillow reports them; for an image that is not loaded yet."""
    found = [1 if image.mode == "1" else 16 if image.mode.startswith("I;16") else 8]
    for tile in getattr(image, "tile", ()):
        args = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if image.format == "PPM" and isinstance(args[-1], int):  # the largest value
            found.append(16 if args[-1] > 255 else 8)
        found += [int(match[1]) for arg in args if isinstance(arg, str) and (match := _BITS.match(arg))]
    return found[-1]


def _scale_transparent_colour(image: Image.Image, bits: int) -> None:
    # Pillow scales the levels of a PNG to 8 bits, but not the level that marks transparency.
    key = image.info.get("transparency")
    if isinstance(key, tuple) and bits == 16:
        image.info["transparency"] = tuple(level >> 8 for level in key)
    elif isinstance(key, int) and image.mode in ("1", "L") and key < 1 << bits < 256:
        image.info["transparency"] = key * 255 // ((1 << bits) - 1)


def _as_rgb(image: Image.Image, policy: DecodePolicy, bits: int) -> Image.Image:
    mode = image.mode
    # 16-bit grey; for PPM, Pillow calls the mode "I".
    if mode.startswith("I;16") or (mode == "I" and image.format == "PPM"):
        return _high_byte(image, policy, bits)
    if mode == "CMYK" and policy.cmyk == "reject":
        raise ImageRejected("refused_by_policy", "CMYK")
    if mode in ("I", "F", "LAB", "HSV"):
        raise ImageRejected("unsupported_mode", f"colour mode {mode} has no defined range of levels")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, (*policy.background, 255))
        return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


_TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO = 262, 0


def _high_byte(image: Image.Image, policy: DecodePolicy, bits: int) -> Image.Image:
    """Convert grey of 12 or 16 bits to 8. Pillow keeps the high byte of 16-bit colour but clips grey; treat grey like colour.
    Pillow also ignores a transparent level of such images, and that a TIFF may count from white."""
    levels = np.asarray(image)
    grey = (levels >> (bits - 8)).astype(np.uint8)
    if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO:
        grey = 255 - grey
    rgb = np.repeat(grey[..., None], 3, axis=2)
    if isinstance(transparent := image.info.get("transparency"), int):
        rgb[levels == transparent] = policy.background
    return Image.fromarray(rgb)


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BACK = {6: 8, 8: 6}  # the other transposes are their own inverse


def _turned(image: Image.Image, orientation: int | None) -> Image.Image:
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


_ORIENTATION = 0x0112


def _orientation(image: Image.Image) -> int | None:
    """The EXIF orientation of a loaded image; None if it has none."""
    _taken_from_xmp(image)
    try:
        found = image.getexif().get(_ORIENTATION)
        return None if found is None else int(found)
    except MemoryError:
        raise
    except PILLOW_FAULTS:  # a broken EXIF block is common in intact photographs: ignore it
        return None


def _taken_from_xmp(image: Image.Image) -> int | None:
    """The orientation in XMP, which is removed: Pillow would read it as if it were in EXIF, and for some formats only."""
    for name in ("xmp", "XML:com.adobe.xmp"):
        xmp = image.info.pop(name, b"")
        if found := _ORIENTATION_IN_XMP.search(xmp.encode(errors="replace") if isinstance(xmp, str) else xmp):
            return int(found[1])
    return None
