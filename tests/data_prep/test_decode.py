"""The one decoder: agreement with Pillow, a picture for every oddity, and hostile headers that cost nothing."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.decode import DecodePolicy, ImageRejected, decode, decode_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, file_format, **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def photos():
    return [Image.fromarray(array) for array in pytest.importorskip("sklearn.datasets").load_sample_images().images]


@pytest.fixture(scope="module")
def jpeg(photos):
    return encoded(photos[0], "JPEG", quality=90)


def reason_of(data, **policy):
    with pytest.raises(ImageRejected) as caught:
        decode(data, DecodePolicy(**policy))
    return caught.value.reason


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_photographs_decode_as_pillow_decodes_them(photos, options):
    for photo in photos:
        data = encoded(photo, "JPEG", **options)
        pixels = decode(data)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (427, 640, 3)
        np.testing.assert_array_equal(pixels, np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000", "AVIF"])
def test_every_format_is_known_by_its_content(photos, file_format):
    decoded = decode_image(encoded(photos[0], file_format))
    assert decoded.format == file_format
    difference = np.abs(decoded.pixels.astype(int) - np.asarray(photos[0]))
    assert difference.mean() < 12  # 256 colours of a GIF are the farthest


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_picture(orientation):
    # Top left red, top right blue, in an image of 8 x 16; where they end up is the definition of the tag.
    image = Image.new("RGB", (16, 8), WHITE)
    image.paste(RED, (0, 0, 8, 4))
    image.paste(BLUE, (8, 0, 16, 4))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "PNG", exif=exif)
    pixels = decode(data)
    corners = {"tl": (0, 0), "tr": (0, -1), "bl": (-1, 0), "br": (-1, -1)}
    red_and_blue = {1: "tl tr", 2: "tr tl", 3: "br bl", 4: "bl br", 5: "tl bl", 6: "tr br", 7: "br tr", 8: "bl tl"}
    red, blue = (corners[name] for name in red_and_blue[orientation].split())
    assert tuple(pixels[red]) == RED
    assert tuple(pixels[blue]) == BLUE
    assert pixels.shape[:2] == ((8, 16) if orientation < 5 else (16, 8))
    assert decode(data, DecodePolicy(exif_orientation="ignore")).shape[:2] == (8, 16)


def test_orientation_of_a_jpeg_photograph(photos):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(encoded(photos[0], "JPEG", exif=exif))
    np.testing.assert_array_equal(turned, np.rot90(decode(encoded(photos[0], "JPEG")), k=-1))


def test_broken_exif_says_nothing(jpeg):
    broken = b"Exif\0\0II*\0\xff\xff\xff\xff garbage"
    data = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(broken) + 2) + broken + jpeg[2:]
    np.testing.assert_array_equal(decode(data), decode(jpeg))


def test_grey_jpeg_has_three_equal_channels(photos):
    decoded = decode_image(encoded(photos[0].convert("L"), "JPEG"))
    assert decoded.mode == "L"
    assert (decoded.pixels == decoded.pixels[..., :1]).all()


def test_cmyk_is_converted_or_refused(photos):
    data = encoded(photos[0].convert("CMYK"), "JPEG", quality=95)
    assert np.abs(decode(data).astype(int) - np.asarray(photos[0])).mean() < 3
    assert reason_of(data, cmyk="reject") == "refused_by_policy"


def test_transparent_pixels_show_the_background():
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((1, 0), (255, 0, 0, 128))
    # 128/255 of red over white: 255 - 255 * 128/255 = 127 in green and blue.
    assert decode(encoded(half, "PNG")).tolist() == [[[255, 255, 255], [255, 127, 127]]]
    assert decode(encoded(half, "PNG"), DecodePolicy(background=(0, 0, 0))).tolist() == [[[0, 0, 0], [128, 0, 0]]]
    grey = Image.new("LA", (1, 1), (7, 0))
    assert decode(encoded(grey, "PNG")).tolist() == [[[255, 255, 255]]]


def test_palettes_with_and_without_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putpixel((1, 0), 1)
    assert decode(encoded(image, "PNG")).tolist() == [[list(RED), list(BLUE)]]
    assert decode(encoded(image, "PNG", transparency=0)).tolist() == [[list(WHITE), list(BLUE)]]
    assert decode(encoded(image, "GIF", transparency=1)).tolist() == [[list(RED), list(WHITE)]]
    named = Image.new("RGB", (2, 1), RED)
    named.putpixel((1, 0), BLUE)
    assert decode(encoded(named, "PNG", transparency=RED)).tolist() == [[list(WHITE), list(BLUE)]]


def test_one_bit_and_sixteen_bits():
    assert decode(encoded(Image.new("1", (1, 1), 1), "PNG")).tolist() == [[[255, 255, 255]]]
    deep = Image.fromarray(np.array([[0, 255, 256, 65535]], dtype=np.uint16))
    for file_format in ("PNG", "TIFF"):
        assert decode(encoded(deep, file_format))[0, :, 0].tolist() == [0, 0, 1, 255]
        assert reason_of(encoded(deep, file_format), sixteen_bit="reject") == "refused_by_policy"
    assert reason_of(encoded(Image.new("F", (4, 4)), "TIFF")) == "unsupported_mode"


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(file_format):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert tuple(decode(data)[0, 0]) == RED
    assert reason_of(data, animation="reject") == "refused_by_policy"


def png_header(width, height):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def test_a_decompression_bomb_costs_nothing(jpeg):
    frame = jpeg.index(b"\xff\xc0")
    huge_jpeg = jpeg[: frame + 5] + struct.pack(">HH", 65_000, 65_000) + jpeg[frame + 9 :]
    tracemalloc.start()
    for bomb in (png_header(20_000, 31_000), png_header(2**31 - 1, 2**31 - 1), png_header(10_000, 10_000), huge_jpeg):
        assert reason_of(bomb) == "too_many_pixels"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_limits_name_what_was_found(jpeg):
    wide = encoded(Image.new("RGB", (300, 2)), "PNG")
    assert reason_of(wide) == "aspect_ratio"
    assert decode(wide, DecodePolicy(max_aspect_ratio=150)).shape == (2, 300, 3)
    assert reason_of(wide, min_side_px=3) == "side_too_small"
    assert reason_of(wide, max_side_px=299) == "side_too_large"
    assert reason_of(jpeg, max_bytes=len(jpeg) - 1) == "too_many_bytes"
    assert reason_of(jpeg, max_pixels=427 * 640 - 1) == "too_many_pixels"
    with pytest.raises(ImageRejected, match=r"300 x 2 pixels.*100 to 1"):
        decode(wide)


def test_what_is_no_image_is_refused():
    assert reason_of(b"") == "empty"
    assert reason_of(b"<html>404 not found</html>") == "not_an_image"
    assert reason_of(b"\0" * 1000) == "not_an_image"
    assert reason_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "not_an_image"
    assert reason_of(encoded(Image.new("RGB", (2, 2)), "BMP"), formats=("PNG",)) == "not_an_image"


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_truncated_files_are_refused(photos, file_format):
    data = encoded(photos[0], file_format)
    for kept in (0.3, 0.6, 0.95):
        assert reason_of(data[: int(len(data) * kept)]) in ("truncated", "corrupt")
    if file_format == "JPEG":
        assert reason_of(data[:-2]) == "truncated"
        exif = Image.Exif()
        exif[0x0112] = 3
        assert reason_of(encoded(photos[0], "JPEG", exif=exif)[:-9000]) == "truncated"


def test_a_hole_in_a_jpeg_is_refused_and_padding_is_not(jpeg):
    middle = len(jpeg) // 2
    assert reason_of(jpeg[:middle] + bytes(500) + jpeg[middle + 500 :]) == "corrupt"
    np.testing.assert_array_equal(decode(jpeg[:-2] + b"\1\2\3" + jpeg[-2:]), decode(jpeg))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_give_pixels_or_a_reason(data):
    """No other exception ever leaves the decoder."""
    image = Image.fromarray((np.arange(3 * 24 * 20) * 7 % 256).astype(np.uint8).reshape(24, 20, 3))
    original = encoded(image, data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "AVIF"])))
    damaged = bytearray(original[: data.draw(st.integers(1, len(original)))])
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode(bytes(damaged), DecodePolicy(max_pixels=100_000))
    except ImageRejected:
        return
    assert pixels.ndim == 3
    assert pixels.dtype == np.uint8
