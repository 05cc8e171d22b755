"""Crops: an example worked out by hand, and properties. Resizing, compared with Pillow, JAX and the bilinear formula."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitline.vit.input.augment import (
    NUM_DRAWS,
    Box,
    evaluation_pixels,
    inception_crop,
    resize,
    train_draws,
    train_pixels,
)
from vitline.vit.input.config import AugmentConfig

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
sys.path.insert(0, str(GOLDEN))
from make_resize_vectors import picture as made_picture  # noqa: E402


def picture(height, width, seed=0):
    """Smooth waves with an edge. As in photographs and unlike in noise, small errors of weights change pixels little."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x * a + y * b + c) for a, b, c in rng.uniform(0.02, 0.4, (3, 3))]
    image = 127 + 80 * np.stack(waves, axis=-1) + 40 * (x > width / 3)[..., None]
    return np.clip(image, 0, 255).astype(np.uint8)


def bilinear(image, height, width):
    """Direct bilinear interpolation with half-pixel centres, without antialias; float64."""
    out = np.zeros((height, width, 3))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * image.shape[0] / height - 0.5, 0), image.shape[0] - 1)
            x = min(max((j + 0.5) * image.shape[1] / width - 0.5, 0), image.shape[1] - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, image.shape[0] - 1), min(x0 + 1, image.shape[1] - 1)
            top = image[y0, x0] * (1 - (x - x0)) + image[y0, x1] * (x - x0)
            bottom = image[y1, x0] * (1 - (x - x0)) + image[y1, x1] * (x - x0)
            out[i, j] = top * (1 - (y - y0)) + bottom * (y - y0)
    return out


def as_array(pixels):
    return pixels[0].permute(1, 2, 0).numpy()


def test_inception_crop_matches_hand_calculation():
    """100 x 200: area 0.05 + 0.95 * 0.2 = 0.24 of 20,000 = 4,800; aspect 3/4 + 7/12 * 3/7 = 1: 69.28 on a side."""
    draws = [0.2, 3 / 7, 0.5, 0.999] + [0.0] * (NUM_DRAWS - 4)
    assert inception_crop(100, 200, draws, 0.05) == Box(16, 131, 69, 69)  # (100-69+1)/2 = 16; 132 * 0.999 = 131.9
    too_tall = [1.0, 0.0, 0, 0]  # all of the area at aspect 3/4 is 163 pixels high
    assert inception_crop(100, 200, too_tall + draws, 0.05) == Box(16, 131, 69, 69)
    assert inception_crop(100, 200, too_tall * 10, 0.05) == Box(0, 0, 100, 200)


@given(height=st.integers(1, 600), width=st.integers(1, 600), row=st.integers(0, 10**9), least=st.floats(0.01, 1))
def test_crops_lie_inside_the_image(height, width, row, least):
    box = inception_crop(height, width, train_draws(1, 2, row).tolist(), least)
    assert box.top >= 0
    assert box.left >= 0
    assert 1 <= box.height <= height - box.top
    assert 1 <= box.width <= width - box.left


def test_crops_have_the_requested_distribution_of_area_and_aspect():
    boxes = np.array([inception_crop(1000, 1000, d, 0.05) for d in train_draws(3, 0, np.arange(4000)).tolist()])
    area, aspect = boxes[:, 2] * boxes[:, 3] / 1e6, boxes[:, 3] / boxes[:, 2]
    small = area < 0.5  # boxes of this area always fit, so none is drawn again
    assert area.min() == pytest.approx(0.05, abs=0.002)
    assert np.abs(np.quantile(area[small], [0.25, 0.5, 0.75]) - [0.1625, 0.275, 0.3875]).max() < 0.02
    assert np.abs(np.quantile(aspect[small], [0, 0.5, 1]) - [0.75, 1.0417, 1.3333]).max() < 0.02
    free = 1000 - boxes[small][:, 2:]
    assert np.abs((boxes[small][:, :2] / free).mean(axis=0) - 0.5).max() < 0.03


def test_draws_depend_on_seed_epoch_and_row_only():
    draws = train_draws(5, [0, 0, 1], [7, 8, 7])
    assert draws.shape == (3, NUM_DRAWS)
    assert (train_draws(5, 1, 7) == draws[2]).all()
    assert not np.isin(draws[1:], draws[0]).any()
    assert not np.isin(train_draws(6, 0, 7), draws).any()


@pytest.mark.parametrize("box", [Box(20, 30, 150, 110), Box(0, 0, 60, 50), Box(1, 2, 300, 299)])
def test_antialiased_resize_agrees_with_pillow(box):
    image, size = picture(310, 320), 64
    ours = as_array(resize(image, box, size, size, antialias=True)).astype(int)
    crop = Image.fromarray(image[box.top : box.top + box.height, box.left : box.left + box.width])
    theirs = np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(ours - theirs).max() <= 1
    assert np.abs(ours - theirs).mean() < 0.05


@pytest.mark.parametrize("box", [Box(5, 9, 37, 41), Box(0, 0, 20, 11), Box(2, 3, 24, 24)])
def test_resize_without_antialias_agrees_with_bilinear_formula(box):
    image = picture(60, 70)
    ours = as_array(resize(image, box, 24, 24, antialias=False))
    expected = bilinear(image[box.top : box.top + box.height, box.left : box.left + box.width].astype(float), 24, 24)
    assert np.abs(ours - expected).max() <= 1
    assert np.abs(ours - expected).mean() < 0.4  # rounding once gives 0.25, and torch rounds after each axis


@pytest.mark.parametrize(
    "case",
    json.loads((GOLDEN / "resize_vectors.json").read_text())["cases"],
    ids=lambda c: f"{c['from']}{c['antialias']}",
)
def test_resize_agrees_with_golden_vectors_of_jax(case):
    (height, width), (to_height, to_width) = case["from"], case["to"]
    ours = as_array(
        resize(made_picture(height, width), Box(0, 0, height, width), to_height, to_width, antialias=case["antialias"])
    )
    # Neighbouring pixels of these pictures differ much; only rounding to bytes after each axis may differ.
    assert np.abs(ours - np.array(case["values"]).reshape(to_height, to_width, 3)).max() <= 1.01


def test_half_of_the_images_are_flipped():
    image, out = picture(40, 50), torch.empty(2, 32, 32, 3, dtype=torch.uint8)
    config = AugmentConfig(image_size_px=32)
    draws = [0.5] * NUM_DRAWS
    train_pixels(image, [*draws[:-1], 0.499], config, out[0])
    train_pixels(image, [*draws[:-1], 0.5], config, out[1])
    assert not torch.equal(out[0], out[1])
    assert torch.equal(out[0].flip(1), out[1])
    assert abs((train_draws(0, 0, np.arange(2000))[:, -1] < 0.5).mean() - 0.5) < 0.04


def test_evaluation_resizes_to_square_or_by_shorter_side():
    image = picture(90, 120)
    square = evaluation_pixels(image, AugmentConfig(image_size_px=48))
    assert (square == as_array(resize(image, Box(0, 0, 90, 120), 48, 48, antialias=True))).all()
    config = AugmentConfig(image_size_px=48, eval_resize="shorter_side", eval_resize_px=60)
    whole = as_array(resize(image, Box(0, 0, 90, 120), 60, 80, antialias=True))
    assert (evaluation_pixels(image, config) == whole[6:54, 16:64]).all()


def test_training_without_crop_equals_evaluation_plus_flip():
    image, out = picture(90, 120), torch.empty(48, 48, 3, dtype=torch.uint8)
    config = AugmentConfig(image_size_px=48, train_crop="none")
    train_pixels(image, [0.1] * NUM_DRAWS, config, out)
    assert (out.numpy()[:, ::-1] == evaluation_pixels(image, config)).all()


def test_random_crop_is_cut_from_the_resized_image():
    image, out = picture(90, 120), torch.empty(48, 48, 3, dtype=torch.uint8)
    config = AugmentConfig(image_size_px=48, train_crop="random", train_resize_px=56, flip=False, antialias=False)
    whole = as_array(resize(image, Box(0, 0, 90, 120), 56, 56, antialias=False))
    for draws, (top, left) in (((0.0, 0.999), (0, 8)), ((0.5, 0.0), (4, 0))):
        train_pixels(image, [*draws, *[0.9] * (NUM_DRAWS - 2)], config, out)
        assert (out.numpy() == whole[top : top + 48, left : left + 48]).all()


def test_ineffective_and_invalid_options_are_refused():
    with pytest.raises(ValueError, match="train_resize_px=None"):
        AugmentConfig(train_crop="random")
    with pytest.raises(ValueError, match="train_crop='inception' with train_resize_px=256"):
        AugmentConfig(train_resize_px=256)
    with pytest.raises(ValueError, match="must be at least image_size_px=224"):
        AugmentConfig(train_crop="random", train_resize_px=200)
    with pytest.raises(ValueError, match="eval_resize_px=256 has no effect"):
        AugmentConfig(eval_resize_px=256)
    with pytest.raises(ValueError, match="at least image_size_px=224, not 200"):
        AugmentConfig(eval_resize="shorter_side", eval_resize_px=200)
