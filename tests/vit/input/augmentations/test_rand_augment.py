"""Operations compared with torchvision's, strengths worked out by hand, and the rules of the draws."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from vitline.vit.input.augment import NUM_DRAWS, train_draws, train_operations, train_pixels
from vitline.vit.input.augmentations.rand_augment import FILL, NAMES, draw_operations, rand_augment
from vitline.vit.input.config import AugmentConfig

PLUS, MINUS = 0.75, 0.25


def operation(name, magnitude, sign=PLUS, place=0.5, side=224):
    (found,) = draw_operations([(NAMES.index(name) + 0.5) / len(NAMES), sign, place], magnitude, side)
    assert found.name == name
    return found


def picture(side=64, seed=0):
    """Waves over a ramp, of little contrast, so that each operation changes it."""
    y, x = np.mgrid[:side, :side]
    phases = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = np.stack([90 + 60 * np.sin(x / 9 + p) * np.cos(y / 7) + y for p in phases], axis=-1)
    return waves.astype(np.uint8)


@pytest.fixture(scope="module")
def functional(_torchvision):
    from torchvision.transforms.v2 import functional

    return functional


def references(functional, magnitude, sign):
    """name: torchvision's function at the strength of big_vision."""
    level = magnitude / 10
    factor, degrees = 1.8 * level + 0.1, 30 * level * sign
    shear, shift = math.degrees(math.atan(0.3 * level * sign)), round(100 * level * 64 / 224) * sign

    def affine(translate=(0, 0), shear=(0.0, 0.0)):
        given = {"angle": 0.0, "scale": 1.0, "fill": list(FILL), "center": [0, 0]}
        return lambda image: functional.affine(image, translate=list(translate), shear=list(shear), **given)

    return {
        "AutoContrast": functional.autocontrast,
        "Equalize": functional.equalize,
        "Invert": functional.invert,
        "Rotate": lambda image: functional.rotate(image, degrees, fill=list(FILL)),
        "Posterize": lambda image: functional.posterize(image, max(1, int(4 * level))),
        "Solarize": lambda image: functional.solarize(image, int(256 * level)),
        "Color": lambda image: functional.adjust_saturation(image, factor),
        "Contrast": lambda image: functional.adjust_contrast(image, factor),
        "Brightness": lambda image: functional.adjust_brightness(image, factor),
        "Sharpness": lambda image: functional.adjust_sharpness(image, factor),
        "ShearX": affine(shear=(shear, 0.0)),
        "ShearY": affine(shear=(0.0, shear)),
        "TranslateX": affine(translate=(-shift, 0)),
        "TranslateY": affine(translate=(0, -shift)),
    }


@pytest.mark.parametrize(("magnitude", "sign"), [(0, PLUS), (5, MINUS), (10, PLUS), (15, MINUS), (20, PLUS)])
def test_operations_equal_torchvision(functional, magnitude, sign):
    """On Pillow images bit for bit. torchvision's kernels for tensors round greys differently, by one level times the factor of up
    to 3.7; nearest neighbours differ where rays meet the edges of pixels."""
    pixels = picture()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    geometric = ("Rotate", "ShearX", "ShearY")
    for name, reference in references(functional, magnitude, 1 if sign == PLUS else -1).items():
        ours = rand_augment(pixels, [operation(name, magnitude, sign, side=64)])
        assert ours.dtype == np.uint8
        assert (ours == np.asarray(reference(Image.fromarray(pixels)))).all(), name
        if name == "Solarize" and magnitude >= 10:
            assert (ours == pixels).all()  # no pixel reaches 256, which torchvision's kernel refuses
            continue
        difference = np.abs(ours.astype(int) - reference(tensor).permute(1, 2, 0).numpy())
        if name in geometric:
            assert (difference > 0).mean() < 0.1, name
        else:
            assert difference.max() <= 4, name


@pytest.mark.parametrize(
    ("magnitude", "words"),
    [
        (0, "+0° 1 bit from 0 factor 0.1 by +0 +0 px 0 px at (168, 112) +0"),
        (10, "+30° 4 bits from 256 factor 1.9 by +0.3 +100 px 80 px at (168, 112) +110"),
        (15, "+45° 6 bits from 384 factor 2.8 by +0.45 +150 px 120 px at (168, 112) +165"),
        (20, "+60° 8 bits from 512 factor 3.7 by +0.6 +200 px 160 px at (168, 112) +220"),
    ],
)
def test_strengths_are_those_of_big_vision(magnitude, words):
    names = ("Rotate", "Posterize", "Solarize", "Color", "ShearX", "TranslateY", "Cutout", "SolarizeAdd")
    assert " ".join(operation(name, magnitude).parameters for name in names) == words
    assert operation("TranslateX", 10, MINUS, side=112).parameters == "-50 px"


def test_cutout_solarize_add_and_fill_by_hand():
    pixels = np.full((224, 224, 3), 20, np.uint8)
    pixels[:, :, 1] = 128
    cut = rand_augment(pixels, [operation("Cutout", 10, sign=0.0, place=0.5)])  # centre (0, 112): half is outside
    assert (cut[72:152, :40] == 128).all()
    cut[72:152, :40] = pixels[72:152, :40]
    assert (cut == pixels).all()
    brighter = rand_augment(pixels, [operation("SolarizeAdd", 20)])
    assert (brighter == [240, 128, 240]).all()
    assert (rand_augment(np.full((4, 4, 3), 90, np.uint8), [operation("SolarizeAdd", 20)]) == 255).all()
    moved = rand_augment(pixels, [operation("TranslateX", 10)])
    assert (moved[:, -100:] == 128).all()
    assert (moved[:, :-100] == pixels[:, 100:]).all()


def test_layers_apply_in_turn_to_the_cropped_and_mirrored_view():
    image, config = picture(90), AugmentConfig(image_size_px=48, randaugment_layers=2, randaugment_magnitude=10)
    plain = AugmentConfig(image_size_px=48)
    for row in range(20):
        draws = train_draws(3, 1, row, 2).tolist()
        found, view = torch.empty(2, 48, 48, 3, dtype=torch.uint8)
        train_pixels(image, draws, config, found)
        train_pixels(image, draws, plain, view)
        first, second = train_operations(draws, config)
        assert (found.numpy() == rand_augment(rand_augment(view.numpy(), [first]), [second])).all()


def test_operations_are_drawn_alike_and_leave_other_draws_as_they_were():
    draws = train_draws(5, [0, 1], [7, 7], 3)
    assert (draws[:, :NUM_DRAWS] == train_draws(5, [0, 1], [7, 7])).all()
    config = AugmentConfig(image_size_px=32, randaugment_layers=2, randaugment_magnitude=15)
    drawn = [train_operations(each, config) for each in train_draws(0, 0, np.arange(2000), 2).tolist()]
    counts = Counter(each.name for pair in drawn for each in pair)
    assert counts.keys() == set(NAMES)
    assert len(NAMES) == 16
    assert max(abs(count - 250) for count in counts.values()) < 4 * math.sqrt(250)
    signs = Counter(each.parameters for pair in drawn for each in pair if each.name == "Rotate")
    assert abs(signs["+45°"] - signs["-45°"]) < 4 * math.sqrt(250)


def test_too_few_draws_and_half_a_setting_are_refused():
    config = AugmentConfig(randaugment_layers=2, randaugment_magnitude=10)
    with pytest.raises(ValueError, match="41 draws for 2 layers of RandAugment"):
        train_operations(train_draws(0, 0, 0).tolist(), config)
    with pytest.raises(
        ValueError, match=r"randaugment_layers=2 with randaugment_magnitude=None: set both, such as 2 and 10"
    ):
        AugmentConfig(randaugment_layers=2)
    with pytest.raises(ValueError, match="randaugment_layers=0 with randaugment_magnitude=10"):
        AugmentConfig(randaugment_magnitude=10)
    for magnitude in (-1, 31):
        with pytest.raises(ValueError, match="than or equal to"):
            AugmentConfig(randaugment_layers=1, randaugment_magnitude=magnitude)
