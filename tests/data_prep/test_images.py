"""Perceptual hashes of images."""

import io

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.images import NO_HASH, examine_image, perceptual_hashes, pixel_sha256
from vitline.data_prep.plan.similarity.near_duplicates import MAX_DISTANCE


@pytest.fixture(scope="module")
def photos():
    return list(pytest.importorskip("sklearn.datasets").load_sample_images().images)


def distance(a, b):
    return int.from_bytes(bytes(x ^ y for x, y in zip(a, b, strict=True)), "big").bit_count()


def reencoded(pixels, file_format="JPEG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **options)
    return file.getvalue()


def test_the_mirror_hash_is_the_hash_of_the_mirror_image(photos):
    for pixels in photos:
        plain, mirror = perceptual_hashes(pixels)
        flipped, flipped_mirror = perceptual_hashes(pixels[:, ::-1])
        assert distance(mirror, flipped) <= 2  # averaging 640 columns to 32 rounds alike from both sides
        assert distance(plain, flipped_mirror) <= 2
        assert distance(plain, mirror) > MAX_DISTANCE


def test_a_symmetrical_drawing_keeps_its_hash():
    """Half of its coefficients are zero except for rounding, and their signs would be noise."""
    y, x = np.mgrid[-60:61, -60:61]
    ring = np.where(abs(np.hypot(x, y) - 40) < 8, 20, 250).astype(np.uint8)[..., None].repeat(3, axis=2)
    plain, mirror = perceptual_hashes(ring)
    assert plain == mirror
    rough = np.asarray(Image.open(io.BytesIO(reencoded(ring, quality=50))))
    assert distance(plain, perceptual_hashes(rough)[0]) <= 2


def test_an_image_without_contrast_has_no_hash():
    assert perceptual_hashes(np.full((9, 5, 3), 77, np.uint8)) == (NO_HASH, NO_HASH)
    faint = 200 + np.random.default_rng(0).integers(0, 2, (64, 64, 3), dtype=np.uint8)
    assert perceptual_hashes(faint) == (NO_HASH, NO_HASH)


def test_an_image_has_the_same_hash_on_every_machine():
    """Golden: whole numbers throughout, so every machine has these bits. Computed by this code on x86-64."""
    y, x = np.mgrid[:90, :120]
    pixels = np.stack([x * x // 60 + y, x * y // 45, (x - y) ** 2 // 50], axis=-1).astype(np.uint8)
    plain, mirror = perceptual_hashes(pixels)
    assert plain.hex() == "5f806f0cf720ff00f500f610ff42ef00ff407e017fa0fe90f924f2c07700f900"
    assert mirror.hex() == "df007f48f380ff40fd00b710f708ee00ffc07a11df20fe80f12cf6817d00fd00"


def test_hash_bits_of_a_cosine_wave_and_its_mirror_image_match_the_definition():
    """One cosine wave has one large coefficient, whose sign changes when the image is mirrored."""
    wave = np.cos(np.pi * 3 * (np.arange(32) + 0.5) / 32)  # horizontal frequency 3, odd
    grey = np.round(127 + 100 * wave).astype(np.uint8)
    pixels = np.broadcast_to(grey[None, :, None], (32, 32, 3)).copy()
    plain, mirror = perceptual_hashes(pixels)
    # One coefficient of 64 is large: above all four thresholds, or below all if mirrored; the others are between.
    assert distance(plain, mirror) == 4
    assert int.from_bytes(plain, "big").bit_count() == 2 * 63 + 4
    assert int.from_bytes(mirror, "big").bit_count() == 2 * 63


def test_pixels_have_the_same_hash_in_every_lossless_format(photos):
    png, bmp = (examine_image(reencoded(photos[0], f), DecodePolicy()) for f in ("PNG", "BMP"))
    assert png["pixel_sha256"] == bmp["pixel_sha256"] == pixel_sha256(photos[0])
    assert png["sha256"] != bmp["sha256"]
    assert (png["width_px"], png["height_px"], png["format"], png["mode"]) == (640, 427, "PNG", "RGB")
    assert len(png["phash"]) == len(png["phash_mirror"]) == len(png["sha256"]) == 32
    # The same values in another shape are another image.
    assert pixel_sha256(photos[0]) != pixel_sha256(photos[0].reshape(640, 427, 3))
