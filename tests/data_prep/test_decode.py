"""The decoder: agreement with Pillow, an image for every unusual feature, and cheap refusal of hostile headers."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, ImageRejected, decode, decode_image
from vitline.data_prep.examine.check_answer import check_examined
from vitline.data_prep.examine.images import examine_image
from vitline.infra.config import digest_of

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, file_format, **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def png(samples, bits, colour_type, **chunks):
    """A PNG file of samples (height, width, channels), in forms that Pillow cannot write; extra chunks come before the data."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width, channels = samples.shape
    big_endian = samples.reshape(height, -1).astype(">u2").view(np.uint8).reshape(height, width * channels, 2)
    stored = np.unpackbits(big_endian, axis=2)[:, :, 16 - bits :].reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(stored, axis=1))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))
    between = b"".join(chunk(kind.encode(), body) for kind, body in chunks.items())
    end = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + between + end


def png_header(width, height):
    """A small file that leases to have these dimensions."""
    small = png(np.zeros((1, 33, 3), np.uint16), 8, 2)
    head = b"IHDR" + struct.pack(">II", width, height) + small[24:29]
    return small[:12] + head + struct.pack(">I", zlib.crc32(head)) + small[33:]


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
def test_format_is_detected_from_content(photos, file_format):
    decoded = decode_image(encoded(photos[0], file_format))
    assert decoded.format == file_format
    difference = np.abs(decoded.pixels.astype(int) - np.asarray(photos[0]))
    assert difference.mean() < 12  # GIF, with 256 colours, differs most


def segment(marker, content):
    return bytes([255, marker]) + struct.pack(">H", len(content) + 2) + content


def test_exif_counts_only_in_its_own_segment_before_the_first_scan(photos):
    """A preview or comment that looks like EXIF or a scan changes nothing, neither before nor after the real one."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = (encoded(photos[0], "JPEG", **more) for more in ({}, {"exif": exif}))
    block = segment(0xE1, exif.tobytes())
    others = (
        segment(0xED, b"Photoshop 3.0\0" + plain[:3000]),
        segment(0xFE, block),
        segment(0xE1, b"http://ns.adobe.com/xap"),
    )
    upright, rotated = decode(plain), decode(turned)
    for other in others:
        np.testing.assert_array_equal(decode(plain[:2] + other + plain[2:]), upright)
        np.testing.assert_array_equal(decode(turned[:2] + other + turned[2:]), rotated)
        np.testing.assert_array_equal(decode(plain[:2] + other + block + plain[2:]), rotated)
    np.testing.assert_array_equal(decode(plain + block), upright)


def test_broken_exif_is_ignored(jpeg):
    broken = b"Exif\0\0II*\0\xff\xff\xff\xff garbage"
    data = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(broken) + 2) + broken + jpeg[2:]
    np.testing.assert_array_equal(decode(data), decode(jpeg))


def test_grey_jpeg_has_three_equal_channels(photos):
    decoded = decode_image(encoded(photos[0].convert("L"), "JPEG"))
    assert decoded.mode == "L"
    assert (decoded.pixels == decoded.pixels[..., :1]).all()


def test_transparent_pixels_show_the_background():
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((1, 0), (255, 0, 0, 128))
    # 128/255 of red over white: 255 - 255 * 128/255 = 127 in green and blue.
    assert decode(encoded(half, "PNG")).tolist() == [[[255, 255, 255], [255, 127, 127]]]
    assert decode(encoded(half, "PNG"), DecodePolicy(background=(0, 0, 0))).tolist() == [[[0, 0, 0], [128, 0, 0]]]
    grey = Image.new("LA", (1, 1), (7, 0))
    assert decode(encoded(grey, "PNG")).tolist() == [[[255, 255, 255]]]


def test_a_colour_may_be_named_as_transparent():
    named = Image.new("RGB", (2, 1), RED)
    named.putpixel((1, 0), BLUE)
    assert decode(encoded(named, "PNG", transparency=RED)).tolist() == [[list(WHITE), list(BLUE)]]


# How each EXIF orientation turns the stored image, by the table of the standard.
TURNED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


def on_white(rgb, alpha):
    return 255 - (255 - rgb.astype(float)) * alpha[..., None] / 255


def from_cmyk(cmyk):
    """Ink on white paper: each colour channel is the light that its ink and the black ink let through."""
    light = 255 - cmyk.astype(float)
    return light[..., :3] * light[..., 3:] / 255


def as_ycck(cmyk):
    """YCbCr (JFIF) of the three inks taken for red, green and blue; then black."""
    red, green, blue = np.moveaxis(cmyk[..., :3].astype(float), 2, 0)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    return np.stack([y, 128 + (blue - y) / 1.772, 128 + (red - y) / 1.402, cmyk[..., 3]], 2).round().clip(0, 255)


def unusual_files(photos):
    """Name -> (file, correct pixels, largest error allowed), for every unusual feature of files, from real photographs."""
    first, second = (np.asarray(photo)[100:196, 200:328] for photo in photos)
    photo, other = Image.fromarray(first), Image.fromarray(second)
    for orientation, turned in TURNED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = np.asarray(Image.open(io.BytesIO(encoded(photo, "JPEG"))))
        yield f"JPEG turned {orientation}", encoded(photo, "JPEG", exif=exif), turned(stored), 0
        for file_format, options in {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True, "exact": True}}.items():
            name = f"{file_format} turned {orientation}"
            yield name, encoded(photo, file_format, exif=exif, **options), turned(first), 0
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    upright = Image.Exif()
    upright[0x0112] = 1
    described = Image.Exif()
    described[0x010E] = "no orientation"
    yield "PNG turned in XMP", png(first, 8, 2, iTXt=b"XML:com.adobe.xmp\0\0\0\0\0" + xmp), TURNED[6](first), 0
    yield "TIFF turned in XMP", encoded(photo, "TIFF", tiffinfo={700: xmp}), TURNED[6](first), 0
    yield "TIFF upright in EXIF", encoded(photo, "TIFF", tiffinfo={700: xmp, 274: 1}), first, 0
    exact = {"lossless": True, "exact": True, "xmp": xmp}
    yield "WEBP turned in XMP", encoded(photo, "WEBP", **exact), TURNED[6](first), 0
    yield "WEBP upright in EXIF", encoded(photo, "WEBP", exif=upright, **exact), first, 0
    yield (
        "JPEG turned in XMP",
        encoded(photo, "JPEG", xmp=b"<tiff:Orientation>6</tiff:Orientation>"),
        TURNED[6](stored),
        0,
    )
    yield (
        "JPEG turned in XMP behind EXIF",
        encoded(photo, "JPEG", xmp=xmp, exif=described),
        TURNED[6](stored),
        0,
    )
    yield "JPEG upright in EXIF", encoded(photo, "JPEG", xmp=xmp, exif=upright), stored, 0

    black = np.minimum(255 - first.max(axis=2), 200)
    inks = 255 - first.astype(float) * 255 / np.maximum(255 - black[..., None], 1)
    cmyk = np.concatenate([inks.clip(0, 255).round(), black[..., None]], axis=2).astype(np.uint8)
    best = {"quality": 100, "subsampling": 0}
    yield "CMYK TIFF", encoded(Image.fromarray(cmyk, "CMYK"), "TIFF"), from_cmyk(cmyk), 1
    yield "CMYK JPEG", encoded(Image.fromarray(cmyk, "CMYK"), "JPEG", **best), from_cmyk(cmyk), 6
    # Pillow writes the four channels inverted, as Adobe does, and its Adobe marker declares them as CMYK (0).
    channels = as_ycck(cmyk)
    channels[..., :3] = 255 - channels[..., :3]
    ycck = encoded(Image.fromarray(channels.astype(np.uint8), "CMYK"), "JPEG", **best)
    marker = ycck.index(b"Adobe") + 11
    assert ycck[marker] == 0
    yield "YCCK JPEG", ycck[:marker] + b"\2" + ycck[marker + 1 :], from_cmyk(cmyk), 9

    indices = photo.quantize(200)
    colours = np.array(indices.getpalette(), np.uint8).reshape(-1, 3)[np.asarray(indices)]
    see_through = np.arange(200, dtype=np.uint8)
    yield "palette PNG", encoded(indices, "PNG"), colours, 0
    composed = on_white(colours, see_through[np.asarray(indices)])
    yield "palette with alpha", encoded(indices, "PNG", transparency=see_through.tobytes()), composed, 1
    one_gone = on_white(colours, np.where(np.asarray(indices) == 7, 0, 255))
    yield "GIF with a transparent colour", encoded(indices, "GIF", transparency=7), one_gone, 0

    grey = first[..., 1]
    three = np.repeat(grey[..., None], 3, axis=2)
    alpha = second[..., 0]
    yield "grey", encoded(Image.fromarray(grey), "PNG"), three, 0
    yield "grey and alpha", encoded(Image.fromarray(np.dstack([grey, alpha])), "PNG"), on_white(three, alpha), 1
    yield "RGBA", encoded(Image.fromarray(np.dstack([first, alpha])), "PNG"), on_white(first, alpha), 1
    for bits in (1, 2, 4, 8):
        few = grey >> (8 - bits)
        key = int(few[0, 0])
        levels = np.repeat((few * (255 // (2**bits - 1)))[..., None], 3, axis=2)
        gone = {"tRNS": struct.pack(">H", key)}
        yield (
            f"{bits}-bit grey, a level gone",
            png(few[..., None], bits, 0, **gone),
            np.where(few[..., None] == key, 255, levels),
            0,
        )

    noise = np.random.default_rng(0).integers(0, 256, first.shape)
    deep = (first.astype(np.uint16) << 8) + noise.astype(np.uint16)
    deep_grey = np.ascontiguousarray(deep[..., 1])
    yield "16-bit grey PNG", encoded(Image.fromarray(deep_grey), "PNG"), three, 0
    yield "16-bit grey TIFF", encoded(Image.fromarray(deep_grey), "TIFF"), three, 0
    from_white = encoded(Image.fromarray(65535 - deep_grey), "TIFF", tiffinfo={262: 0})
    yield "16-bit grey TIFF from white", from_white, three, 0
    yield "16-bit PGM", b"P5\n128 96\n65535\n" + deep_grey.astype(">u2").tobytes(), three, 0
    yield "16-bit PPM", b"P6\n128 96\n65535\n" + deep.astype(">u2").tobytes(), first, 1
    yield "16-bit colour PNG", png(deep, 16, 2), first, 0
    yield "16-bit RGBA PNG", png(np.dstack([deep, alpha.astype(np.uint16) << 8]), 16, 6), on_white(first, alpha), 1
    level = int(deep_grey[5, 5])
    hidden = np.where(deep_grey[..., None] == level, 255, three)
    yield "16-bit grey, a level gone", png(deep_grey[..., None], 16, 0, tRNS=struct.pack(">H", level)), hidden, 0

    pages = {"save_all": True, "append_images": [other]}
    yield "APNG", encoded(photo, "PNG", **pages), first, 0
    yield "animated WEBP", encoded(photo, "WEBP", lossless=True, exact=True, **pages), first, 0
    yield "animated GIF", encoded(indices, "GIF", save_all=True, append_images=[other.quantize(200)]), colours, 0
    yield "TIFF of two pages", encoded(photo, "TIFF", **pages), first, 0
    plain = np.asarray(Image.open(io.BytesIO(encoded(photo, "JPEG"))))
    yield "MPO", encoded(photo, "MPO", **pages), plain, 0
    yield "MPO with EXIF", encoded(photo, "MPO", exif=exif, **pages), TURNED[8](plain), 0
    progressive = encoded(photo, "JPEG", progressive=True)
    yield "progressive JPEG", progressive, np.asarray(Image.open(io.BytesIO(progressive))), 0


def test_unusual_features_decode_to_the_correct_pixels(photos):
    for name, data, right, tolerance in unusual_files(photos):
        pixels = decode(data)
        assert (pixels.shape, pixels.dtype) == (right.shape, np.uint8), name
        assert np.abs(pixels - right.astype(float)).max() <= tolerance, name


def test_policy_refuses_unusual_features(photos):
    """The content decides, not the reader that decodes it; an MPO file is no animation, and a rotated TIFF stays as stored."""
    files = {name: data for name, data, _, _ in unusual_files(photos)}
    for name, data in files.items():
        if "16-bit" in name:
            assert reason_of(data, sixteen_bit="reject") == "refused_by_policy", name
        elif "CMYK" in name or "YCCK" in name:
            assert reason_of(data, cmyk="reject") == "refused_by_policy", name
        elif "animated" in name or name in ("APNG", "TIFF of two pages"):
            assert reason_of(data, animation="reject") == "refused_by_policy", name
        else:
            strict = DecodePolicy(sixteen_bit="reject", cmyk="reject", animation="reject", exif_orientation="ignore")
            assert decode(data, strict).shape == (96, 128, 3), name
    for file_format in ("JPEG", "PNG", "TIFF", "WEBP"):
        stored = decode(files[f"{file_format} turned 1"])
        for orientation in TURNED:
            kept = decode(files[f"{file_format} turned {orientation}"], DecodePolicy(exif_orientation="ignore"))
            np.testing.assert_array_equal(kept, stored)
    decoded = decode_image(files["MPO with EXIF"], DecodePolicy(animation="reject"))
    assert decoded.format == "JPEG"


@pytest.mark.parametrize("error", [MemoryError("48 GB"), OSError("out of memory error when reading image file")])
def test_lack_of_memory_is_an_error_and_no_refusal(jpeg, photos, monkeypatch, error):
    def raise_error(*_, **__):
        raise error

    bitmap = encoded(photos[0], "BMP")
    monkeypatch.setattr(Image.Image, "load", raise_error)
    with pytest.raises(MemoryError, match=str(error)):
        decode(bitmap)
    monkeypatch.setattr("vitline.data_prep.decode.simplejpeg.decode_jpeg", raise_error)
    error = ValueError("Insufficient memory (case 4)")
    with pytest.raises(MemoryError, match="Insufficient"):
        decode(jpeg)


def test_decompression_bomb_is_refused_without_allocating_its_pixels(jpeg):
    frame = jpeg.index(b"\xff\xc0")
    huge_jpeg = jpeg[: frame + 5] + struct.pack(">HH", 65_000, 65_000) + jpeg[frame + 9 :]
    tracemalloc.start()
    for bomb in (png_header(20_000, 31_000), png_header(2**31 - 1, 2**31 - 1), png_header(10_000, 10_000), huge_jpeg):
        assert reason_of(bomb) == "too_many_pixels"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def jpeg_of_scans(num_scans):
    """A valid grey JPEG of 64 x 64 px: one scan per bit of each coefficient, all without content but the first."""
    data = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    table, scan = data.rindex(b"\xff\xc4"), data.rindex(b"\xff\xda")
    first = data[: data.index(b"\xff\xc4", data.index(b"\xff\xda"))]
    bits = [(k, bit) for k in range(1, 64) for bit in reversed(range(13))][: num_scans - 1]
    bands = (bytes([k, k, (0 if bit == 12 else bit + 1) << 4 | bit]) for k, bit in bits)
    further = (data[table : scan + 7] + band + data[scan + 10 : -2] for band in bands)
    return first + b"".join(further) + b"\xff\xd9"


@pytest.mark.parametrize("exif", [b"", b"\xff\xe1\0\x08Exif\0\0"])
def test_jpeg_of_too_many_scans_is_refused_undecoded(exif, monkeypatch):
    def inserted(data):
        return data[:2] + exif + data[2:]

    assert (decode(inserted(jpeg_of_scans(100))) == 128).all()
    monkeypatch.setattr("simplejpeg.decode_jpeg", None)
    monkeypatch.setattr(Image, "open", None)
    for num_scans in (101, 819):
        with pytest.raises(
            ImageRejected, match="refused_by_policy: a JPEG of more than 100 scans, which takes too long"
        ):
            decode(inserted(jpeg_of_scans(num_scans)))


def test_scans_of_previews_and_of_what_follows_do_not_count(jpeg):
    others = b"\xff\xda\0\x02" * 500
    comment = b"\xff\xfe" + (len(others) + 2).to_bytes(2) + others
    np.testing.assert_array_equal(decode(jpeg[:2] + comment + jpeg[2:] + others), decode(jpeg))


def test_jpeg_2000_may_have_a_limit_of_its_own_that_no_other_format_knows():
    picture = Image.new("RGB", (30, 20))
    slow, png = encoded(picture, "JPEG2000"), encoded(picture, "PNG")
    with pytest.raises(ImageRejected, match=r"30 x 20 pixels of JPEG 2000, limit 599") as caught:
        decode(slow, DecodePolicy(max_jpeg2000_pixels=599))
    assert caught.value.reason == "too_many_pixels"
    assert decode(slow, DecodePolicy(max_jpeg2000_pixels=600)).shape == (20, 30, 3)
    assert decode(png, DecodePolicy(max_jpeg2000_pixels=599)).shape == (20, 30, 3)
    assert decode(slow).shape == (20, 30, 3)


def test_policies_without_the_limit_for_jpeg_2000_keep_their_digest():
    assert "max_jpeg2000_pixels" not in DecodePolicy().model_dump(mode="json")
    assert digest_of(DecodePolicy()) != digest_of(DecodePolicy(max_jpeg2000_pixels=1_000_000))


def test_refusals_by_limits_name_the_value_and_the_limit(jpeg):
    wide = encoded(Image.new("RGB", (300, 2)), "PNG")
    assert reason_of(wide) == "aspect_ratio"
    assert decode(wide, DecodePolicy(max_aspect_ratio=150)).shape == (2, 300, 3)
    assert reason_of(wide, min_side_px=3) == "side_too_small"
    assert reason_of(wide, max_side_px=299) == "side_too_large"
    assert reason_of(jpeg, max_bytes=len(jpeg) - 1) == "too_many_bytes"
    assert reason_of(jpeg, max_pixels=427 * 640 - 1) == "too_many_pixels"
    with pytest.raises(ImageRejected, match=r"300 x 2 pixels.*100 to 1"):
        decode(wide)


def test_files_that_are_not_images_are_refused():
    assert reason_of(b"") == "empty"
    assert reason_of(b"<html>404 not found</html>") == "not_an_image"
    assert reason_of(b"\0" * 1000) == "not_an_image"
    assert reason_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "not_an_image"
    assert reason_of(b"<html>404 not found</html>", formats=("PNG",)) == "not_an_image"
    assert reason_of(encoded(Image.new("F", (4, 4)), "TIFF")) == "unsupported_mode"


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "BMP"])
def test_format_not_in_the_policy_is_refused_with_the_accepted_formats(file_format):
    data = encoded(Image.new("RGB", (2, 2)), file_format)
    with pytest.raises(ImageRejected, match=f"{file_format} is not an accepted format; accepted formats: GIF, WEBP"):
        decode(data, DecodePolicy(formats=("GIF", "WEBP")))


def test_unsupported_formats_are_refused_by_name_with_the_accepted_formats():
    files = {name: encoded(Image.new("RGB", (32, 32), RED), name) for name in ("ICO", "TGA", "ICNS", "DDS")}
    files["SVG"] = b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg"/>'
    files["HEIF"] = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    files["TGA"] = files["TGA"][:-26]  # without the footer that version 2 of the format added
    for name, data in files.items():
        with pytest.raises(
            ImageRejected,
            match=f"refused_by_policy: {name} is not an accepted format; accepted formats: JPEG, PNG, GIF",
        ):
            decode(data)


def test_formats_without_default_are_accepted_where_the_policy_names_them(photos):
    for name in ("TGA", "SGI", "PCX", "QOI"):
        data = encoded(photos[0].resize((40, 30)), name)
        with pytest.raises(
            ImageRejected, match=f"refused_by_policy: {name} is not an accepted format.*recipe.decode.formats"
        ):
            decode(data)
        policy = DecodePolicy(formats=("PNG", name))
        check_examined(data, examine_image(data, policy), policy)
        np.testing.assert_array_equal(decode(data, policy), np.asarray(photos[0].resize((40, 30))))


def test_texts_and_profiles_of_any_size_leave_a_png_intact():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    packed = zlib.compress(bytes(40 << 20))
    texts = {"zTXt": b"note\0\0" + packed, "iTXt": b"note\0\1\0\0\0" + packed, "iCCP": b"profile\0\0" + packed}
    for kind, text in texts.items():
        np.testing.assert_array_equal(decode(png(pixels, 8, 2, **{kind: text})), pixels)
    end = png(pixels, 8, 2)[:-12] + png(pixels, 8, 2, zTXt=texts["zTXt"])[33 : 33 + 12 + len(texts["zTXt"])]
    np.testing.assert_array_equal(decode(end + png(pixels, 8, 2)[-12:]), pixels)
    turned = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(2 << 20) + b'tiff:Orientation="6"')
    np.testing.assert_array_equal(decode(png(pixels, 8, 2, iTXt=turned)), np.rot90(pixels, k=-1))


def test_a_png_with_a_wrong_checksum_is_not_stored():
    """Pillow compares the checksums of chunks before the pixels only: IDAT, and what stands behind it, may be anything."""
    data = bytearray(png(np.zeros((4, 4, 3), np.uint8), 8, 2, tEXt=b"note\0hello"))
    examine_image(bytes(data), DecodePolicy())
    for kind in (b"IDAT", b"tEXt", b"IEND"):
        at = data.index(kind)
        length = int.from_bytes(data[at - 4 : at])
        data[at + 4 + length] ^= 1
        with pytest.raises(ImageRejected, match=f"^corrupt: the PNG chunk {kind.decode()} at byte {at - 4:,} "):
            examine_image(bytes(data), DecodePolicy())
        data[at + 4 + length] ^= 1


def test_refusal_does_not_quote_the_content_of_the_file():
    """A link or a row of a table may lead to a private file, and the reason of a refusal is stored with the corpus."""
    secret = b"root:x:0:0:root:/root:/bin/bash"
    for start in (
        b"",
        b"P5 ",
        b"P3 2 2 255 ",
        b"P1\n",
        b"P6\n9 9 ",
        b"BM",
        b"GIF89a",
        b"II*\0",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF",
    ):
        with pytest.raises(ImageRejected) as caught:
            decode(start + secret * 3)
        assert not any(word in caught.value.detail for word in ("root", "bash", "x:0")), caught.value.detail


def test_bomb_that_pillow_refuses_is_reported_with_the_limit_of_the_policy():
    with pytest.raises(ImageRejected, match="too_many_pixels: 620,000,000 pixels, limit 89,000,000"):
        decode(png_header(20_000, 31_000))


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


@pytest.mark.parametrize("exif_orientation", ["apply", "ignore"])
def test_missing_data_in_a_png_is_refused(photos, exif_orientation):
    """Also if EXIF is read first: Pillow loads a PNG to find its EXIF, and returns black pixels if that failed."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({}, {"exif": exif}):
        data = encoded(photos[0], "PNG", **options)
        hole = data.index(b"IDAT") + 1_000
        holed = data[:hole] + bytes(20) + data[hole + 20 :]
        assert reason_of(holed, exif_orientation=exif_orientation) == "corrupt"


def test_damage_after_the_first_frame_is_refused_if_frames_are_counted():
    frames = [Image.effect_noise((40, 40), sigma) for sigma in (20, 90, 60)]
    data = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    second = struct.unpack("<I", data[4:8])[0]  # offset of the first directory; it ends with that of the next
    num_tags = struct.unpack("<H", data[second : second + 2])[0]
    link = second + 2 + 12 * num_tags
    broken = data[:link] + struct.pack("<I", len(data) - 1) + data[link + 4 :]
    assert decode(broken).shape == (40, 40, 3)
    assert reason_of(broken, animation="reject") in ("refused_by_policy", "corrupt", "truncated")


def test_jpeg_with_missing_data_is_refused_but_padding_is_accepted(jpeg):
    middle = len(jpeg) // 2
    assert reason_of(jpeg[:middle] + bytes(500) + jpeg[middle + 500 :]) == "corrupt"
    np.testing.assert_array_equal(decode(jpeg[:-2] + b"\1\2\3" + jpeg[-2:]), decode(jpeg))
