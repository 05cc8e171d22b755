"""Whether two thumbnails show the same picture."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits, load_sample_images

from vitline.data_prep.examine.images import perceptual_hashes
from vitline.data_prep.examine.thumbnails import looks_same, same_images, thumbnail


def pieces():
    """Different parts of two photographs, 96 pixels wide; those that show nothing but sky are left out."""
    parts = [
        np.ascontiguousarray(photo[y : y + 96, x : x + 96])
        for photo in load_sample_images().images
        for y in range(0, 320, 107)
        for x in range(0, 540, 107)
    ]
    return [part for part in parts if part.std() > 20]


def shrunk(pixels):
    return np.asarray(Image.fromarray(pixels).resize((48, 48), Image.Resampling.BICUBIC))


def compressed(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=50)
    return np.asarray(Image.open(file))


CHANGES = {
    "half": shrunk,
    "jpeg": compressed,
    "lighter": lambda pixels: np.clip(pixels * 1.1, 0, 255).astype(np.uint8),
    "darker": lambda pixels: (pixels * 0.9).astype(np.uint8),
    "mirror": lambda pixels: pixels[:, ::-1],
    "crop": lambda pixels: pixels[3:94, 1:92],
}


@pytest.fixture(scope="module")
def photos():
    return pieces()


def distance(a, b):
    return int.from_bytes(bytes(x ^ y for x, y in zip(a, b, strict=True)), "big").bit_count()


@pytest.mark.parametrize("change", CHANGES)
def test_changed_photographs_are_near_and_confirmed(photos, change):
    changed = [np.ascontiguousarray(CHANGES[change](photo)) for photo in photos]
    hashes = [
        (perceptual_hashes(photo), perceptual_hashes(other)[0]) for photo, other in zip(photos, changed, strict=True)
    ]
    near = [min(distance(plain, other), distance(mirror, other)) <= 31 for (plain, mirror), other in hashes]
    a, b = (np.stack([thumbnail(picture) for picture in pictures]) for pictures in (photos, changed))
    same = same_images(a, b)
    assert same.tolist() == [looks_same(*pair) for pair in zip(a, b, strict=True)]  # whatever else is compared
    assert np.mean(np.logical_and(near, same)) >= (0.8 if change == "crop" else 1)


def test_different_photographs_are_not_confirmed(photos):
    thumbnails = [thumbnail(photo) for photo in photos[::2]]
    wrong = [(i, j) for i in range(len(thumbnails)) for j in range(i) if looks_same(thumbnails[i], thumbnails[j])]
    assert wrong == []


def test_different_digits_are_not_confirmed():
    digits = load_digits()
    images = [np.repeat((image * 15).astype(np.uint8)[..., None], 3, axis=2) for image in digits.images[:8]]
    thumbnails = [thumbnail(image) for image in images]
    wrong = [
        (i, j)
        for i in range(8)
        for j in range(i)
        if digits.target[i] != digits.target[j] and looks_same(thumbnails[i], thumbnails[j])
    ]
    assert wrong == []
    assert all(looks_same(one, one) for one in thumbnails)


def face(mouth, shift=0):
    image = Image.new("RGB", (128, 128), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((10 + shift, 10, 118 + shift, 118), fill="orange", outline="black")
    draw.ellipse((40 + shift, 40, 50 + shift, 55), fill="black")
    draw.ellipse((78 + shift, 40, 88 + shift, 55), fill="black")
    draw.arc((40 + shift, 60, 88 + shift, 100), *mouth, fill="black", width=4)
    return thumbnail(np.asarray(image))


def test_faces_that_differ_in_the_mouth_are_different_images():
    smile, frown = (0, 180), (180, 360)
    assert looks_same(face(smile), face(smile))
    assert not looks_same(face(smile), face(frown))
    assert not looks_same(face(smile), face(frown, shift=3))


def test_colour_distinguishes_equal_shapes():
    red, green = (np.full((64, 64, 3), 255, np.uint8) for _ in range(2))
    red[16:48, 16:48] = (200, 30, 30)
    green[16:48, 16:48] = (30, 120, 30)
    assert not looks_same(thumbnail(red), thumbnail(green))


def test_grey_images_are_judged_as_if_they_had_colour(photos):
    """One value that differs by one level makes an image coloured: all three channels are compared."""
    grey = [np.repeat(photo[:, :, 1:2], 3, axis=2) for photo in photos]
    plain = np.array([thumbnail(image) for image in grey])
    changed = np.array([thumbnail(np.ascontiguousarray(image[5:, :90])) for image in grey])
    coloured = plain.copy()
    coloured[:, 0, 0, 2] ^= 1
    for others in (changed, np.roll(plain, 1, axis=0)):
        assert same_images(plain, others).tolist() == same_images(coloured, others).tolist()
    assert same_images(plain, changed).sum() > len(photos) // 2


def test_same_picture_is_symmetric_and_flat_images_match_nothing(photos):
    rng = np.random.default_rng(0)
    for i, j in rng.integers(0, len(photos), (15, 2)):
        a, b = thumbnail(photos[i]), thumbnail(np.ascontiguousarray(photos[j][2:94, 4:]))
        assert looks_same(a, b) == looks_same(b, a) == looks_same(a[:, ::-1], b)
    flat = np.full((32, 32, 3), 200, np.uint8)
    assert not looks_same(flat, flat)
    assert not looks_same(flat, thumbnail(photos[0]))


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (31, 33), (900, 40)])
def test_thumbnails_of_any_size(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    small = thumbnail(pixels)
    assert small.shape == (32, 32, 3)
    assert small.dtype == np.uint8
    flat = np.broadcast_to(pixels[:1, :1], pixels.shape)
    assert (thumbnail(flat) == pixels[0, 0]).all()
