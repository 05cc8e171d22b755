"""Hashes of pictures."""

import io

import numpy as np
import pytest
from PIL import Image

from data_prep.decode import DecodePolicy
from data_prep.images import examine_image, perceptual_hashes, pixel_sha256


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
        assert distance(mirror, flipped) <= 2  # averaging 640 columns to 64 rounds alike from both sides
        assert distance(plain, flipped_mirror) <= 2
        assert distance(plain, mirror) > 60


def test_near_copies_are_near_and_others_far(photos):
    first, second = (perceptual_hashes(pixels)[0] for pixels in photos)
    assert 128 - 40 < distance(first, second) < 128 + 40  # unrelated: about half of 256 bits
    half = np.asarray(Image.fromarray(photos[0]).resize((320, 213)))
    brighter = np.clip(photos[0].astype(float) * 1.1, 0, 255).astype(np.uint8)
    rough = np.asarray(Image.open(io.BytesIO(reencoded(photos[0], quality=50))))
    for copy in (half, brighter, rough):
        assert distance(first, perceptual_hashes(copy)[0]) <= 31


def test_a_flat_picture_hashes_alike_everywhere():
    assert perceptual_hashes(np.full((9, 5, 3), 77, np.uint8)) == (bytes(32), bytes(32))


def test_pixels_hash_alike_in_every_lossless_file(photos):
    png, bmp = (examine_image(reencoded(photos[0], f), DecodePolicy()) for f in ("PNG", "BMP"))
    assert png.pixel_sha256 == bmp.pixel_sha256 == pixel_sha256(photos[0])
    assert png.sha256 != bmp.sha256
    assert (png.width_px, png.height_px, png.format, png.mode) == (640, 427, "PNG", "RGB")
    assert len(png.phash) == len(png.phash_mirror) == len(png.sha256) == 32
    # The same values in another shape are another picture.
    assert pixel_sha256(photos[0]) != pixel_sha256(photos[0].reshape(640, 427, 3))
