"""MixUp and CutMix: shares and boxes compared with SciPy and torchvision, images worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitline.vit.input.augmentations.box import Box
from vitline.vit.input.augmentations.mixing import Mix, beta_level, cutmix_box, draw_mix, mix_lane, partners
from vitline.vit.input.config import AugmentConfig, InputConfig


@pytest.fixture(scope="module")
def v2(_torchvision):
    from torchvision.transforms import v2

    return v2


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1, 1.5, 8, 100])
def test_shares_have_the_beta_distribution(alpha):
    """`beta_level` inverts the distribution function: just below and above F(x) it gives the 256ths beside x."""
    stats = pytest.importorskip("scipy.stats")
    for level in (0, 1, 5, 64, 127, 200, 255):
        edge = float(stats.beta.cdf((level + 0.5) / 256, alpha, alpha))
        if 1e-9 < edge < 1 - 1e-9:
            assert beta_level(alpha, edge - 1e-10) == level
            assert beta_level(alpha, edge + 1e-10) == level + 1
    assert beta_level(alpha, 0.5) == 128


def test_a_step_has_one_mix_which_depends_on_seed_and_step_only():
    both = AugmentConfig(image_size_px=32, mixup_alpha=0.2, cutmix_alpha=1.0)
    drawn = [draw_mix(7, step, both) for step in range(2000)]
    assert drawn[500:600] == [draw_mix(7, step, both) for step in range(500, 600)]
    assert drawn != [draw_mix(8, step, both) for step in range(2000)]
    assert abs(sum(mix.box is None for mix in drawn) - 1000) < 100
    shares = np.array([mix.share for mix in drawn if mix.box is None])
    assert shares.min() >= 0.5
    assert abs(shares.mean() - 0.8988) < 0.02  # the mean of max(a, 1 - a) for Beta(0.2, 0.2), by SciPy
    for mix in drawn:
        if mix.box is not None:
            assert mix.share == 1 - mix.box.height * mix.box.width / 32**2
    areas = np.array([1 - mix.share for mix in drawn if mix.box is not None])
    assert areas.min() == 0
    assert areas.max() > 0.8
    assert draw_mix(7, 3, AugmentConfig(image_size_px=32, mixup_alpha=0.2)).box is None


def test_boxes_equal_those_of_torchvision(v2, monkeypatch):
    cutmix, image = v2.CutMix(num_classes=2), torch.zeros(2, 3, 20, 20)
    for share, x, y in ((0.0, 3, 19), (0.3, 0, 0), (0.7, 10, 4), (0.999, 19, 19), (1.0, 5, 5)):
        places = iter((x, y))
        with monkeypatch.context() as patch:
            patch.setattr(cutmix, "_dist", type("Given", (), {"sample": lambda self, _, share=share: share})())
            patch.setattr(torch, "randint", lambda high, size, places=places: torch.tensor([next(places)]))
            params = cutmix.make_params([image])
        box = cutmix_box(share, 20, (y + 0.5) / 20, (x + 0.5) / 20)
        assert (box.left, box.top, box.left + box.width, box.top + box.height) == tuple(params["box"])
        assert 1 - box.height * box.width / 400 == pytest.approx(params["lam_adjusted"])


@given(st.lists(st.integers(0, 4), max_size=30))
def test_each_example_is_the_partner_of_one_of_its_lane(lanes):
    lane = np.array(lanes, dtype=np.int64)
    found = partners(lane)
    assert sorted(found.tolist()) == list(range(len(lane)))
    assert (lane[found] == lane).all()
    for one in set(lanes):
        here = np.flatnonzero(lane == one)
        assert found[here].tolist() == np.roll(here, 1).tolist()


def test_images_are_mixed_with_the_one_before(v2):
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8))
    mixup = v2.MixUp(num_classes=2)
    exact = mixup.transform(images.permute(0, 3, 1, 2).double(), {"lam": 200 / 256, "labels": None, "batch_size": 5})
    found = list(images.clone())
    assert mix_lane(found, [True] * 5, Mix(200 / 256, None)) == [True] * 5
    assert (torch.stack(found).permute(0, 3, 1, 2) - exact).abs().max() <= 0.5

    found = list(images.clone())
    mix_lane(found, [True] * 5, Mix(1 - 12 / 64, Box(1, 2, 3, 4)))
    expected = images.clone()
    expected[:, 1:4, 2:6] = images.roll(1, 0)[:, 1:4, 2:6]
    assert torch.equal(torch.stack(found), expected)


def test_what_is_alone_or_beside_a_bad_example_stays_as_it_is():
    images = torch.arange(4, dtype=torch.uint8).mul(10)[:, None, None, None].repeat(1, 2, 2, 3)
    found = list(images.clone())
    assert mix_lane(found, [True, False, True, True], Mix(0.5, None)) == [True, False, False, True]
    assert [int(image.max()) for image in found] == [15, 10, 20, 25]
    alone = [images[3].clone()]
    assert mix_lane(alone, [True], Mix(0.5, None)) == [False]
    assert torch.equal(alone[0], images[3])


def test_bad_settings_are_refused():
    for alpha in (0, -1, 101, math.inf):
        for name in ("mixup_alpha", "cutmix_alpha"):
            with pytest.raises(ValueError, match=name):
                AugmentConfig(**{name: alpha})
    augment = AugmentConfig(mixup_alpha=0.2)
    with pytest.raises(ValueError, match=r"num_lanes=8 equals global_batch_size=8, .* set num_lanes to at most 4"):
        InputConfig(global_batch_size=8, num_lanes=8, augment=augment)
    assert InputConfig(global_batch_size=8, num_lanes=4, augment=augment).augment.mixes
    assert augment.for_transfer(64) == AugmentConfig(image_size_px=64)
