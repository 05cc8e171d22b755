"""Masked patch prediction: targets and losses worked out by hand, counts of each corruption, overfitting one batch."""

import math

import pytest
import torch

from vitline.vit.models.config import ViTConfig
from vitline.vit.models.masked_patches import (
    Corruption,
    MaskedPatchModel,
    color_index,
    draw_corruption,
    masked_patch_accuracy,
    masked_patch_losses,
    patch_targets,
)
from vitline.vit.models.vit import VisionTransformer

TINY = ViTConfig(image_size_px=16, patch_size_px=4, embed_dim=32, depth=2, num_heads=2, mlp_dim=64)
TARGETS = ("mean-color-3bit", "downsized-4x4-3bit", "pixels-l2")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draws(num_images, num_patches, seed):
    return torch.rand(num_images, 2 * num_patches, generator=seeded(seed))


def from_bytes(pixels):
    """(B, H, W, 3) from 0 to 255 -> images as the network receives them."""
    return torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def made_model(target, pool="token", seed=0):
    torch.manual_seed(seed)
    return MaskedPatchModel(VisionTransformer(TINY.model_copy(update={"pool": pool}), 3), target)


def test_colors_have_three_bits_per_channel():
    colors = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.124, 0.126, 0.5], [1.2, -0.1, 0]])
    assert color_index(colors).tolist() == [0, 511, 448, 56, 7, 0 * 64 + 1 * 8 + 4, 448]


def test_mean_colors_match_hand_calculation():
    """Patches of 2 px on an image of 5 x 5: 2 x 2 patches in raster order, the fifth row and column dropped."""
    image = torch.full((1, 5, 5, 3), 255)
    image[0, :2, :2] = torch.tensor([[[255, 0, 0], [255, 0, 0]], [[255, 0, 0], [0, 0, 0]]])  # mean red 3/4
    image[0, :2, 2:4] = torch.tensor([0, 100, 200])  # 100/255 * 8 = 3.1, 200/255 * 8 = 6.3
    image[0, 2:4, :2] = 0
    found = patch_targets(from_bytes(image), 2, "mean-color-3bit")
    assert found.tolist() == [[[6 * 64], [3 * 8 + 6], [0], [511]]]


def test_downsized_patches_and_pixels_match_hand_calculation():
    """One patch of 8 px whose 4 x 4 parts of 2 px have green (row * 60 + column), blue 255; red differs within a part."""
    image = torch.zeros(1, 8, 8, 3)
    for row in range(8):
        for column in range(8):
            image[0, row, column] = torch.tensor([100.0 * (column % 2), 60.0 * (row // 2) + 5 * (column // 2), 255.0])
    small = patch_targets(from_bytes(image), 8, "downsized-4x4-3bit")
    green = [int((60 * row + 5 * column) / 255 * 8) for row in range(4) for column in range(4)]
    assert small.tolist() == [[[1 * 64 + g * 8 + 7 for g in green]]]  # mean red 50: 50 / 255 * 8 = 1.57
    pixels = patch_targets(from_bytes(image), 8, "pixels-l2")
    torch.testing.assert_close(pixels, image.reshape(1, 1, 8 * 8 * 3) / 255)


def test_every_image_is_corrupted_in_the_shares_of_the_paper():
    corruption = draw_corruption(draws(64, 196, 0))
    own = torch.arange(196)
    for i in range(64):
        chosen = torch.zeros(196, dtype=torch.bool).index_fill_(0, corruption.places[i], True)
        other = corruption.source[i] != own
        assert chosen.sum() == 98
        assert corruption.masked[i].sum() == 78
        assert other.sum() == 10
        assert not (other & corruption.masked[i]).any()
        assert not ((other | corruption.masked[i]) & ~chosen).any()
    # All patches are equally likely: 64 * 98 draws over 196 patches, 32 each; the standard deviation is 4.
    counts = corruption.places.flatten().bincount(minlength=196)
    assert counts.min() > 32 - 5 * 4
    assert counts.max() < 32 + 5 * 4
    assert draw_corruption(draws(1, 196, 0), rate=0.15).places.shape == (1, 29)


def test_corruption_depends_on_the_draws_only():
    first, same, other = (draw_corruption(draws(4, 16, seed)) for seed in (7, 7, 8))
    assert all(torch.equal(getattr(first, name), getattr(same, name)) for name in ("places", "source", "masked"))
    assert not torch.equal(first.places, other.places)


@pytest.mark.parametrize(("rate", "num_patches"), [(0.0, 16), (0.02, 16), (1.1, 16), (0.5, 1)])
def test_rates_above_one_or_without_a_corrupted_patch_are_refused(rate, num_patches):
    with pytest.raises(ValueError, match="Choose another rate"):
        draw_corruption(draws(1, num_patches, 0), rate)


def test_embeddings_are_masked_replaced_or_kept():
    model = made_model("mean-color-3bit")
    corruption = Corruption(
        places=torch.tensor([[0, 2, 3]]),
        source=torch.tensor([[0, 1, 1, 3]]),
        masked=torch.tensor([[True, False, False, False]]),
    )
    x = torch.randn(1, 4, 32)
    expected = torch.stack([model.mask_token[0, 0], x[0, 1], x[0, 1], x[0, 3]])
    assert torch.equal(model.corrupted(x, corruption)[0], expected)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_prediction_comes_from_the_encoded_token_of_its_patch(pool):
    """With a corruption that changes no embedding, a patch's prediction is the head applied to its encoded token."""
    model = made_model("pixels-l2", pool)
    torch.nn.init.normal_(model.prediction_head.weight)
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    places = torch.tensor([[5, 0], [15, 3]])
    corruption = Corruption(places, torch.arange(16).repeat(2, 1), torch.zeros(2, 16, dtype=torch.bool))
    encoded = model.network.encode(model.network.tokens(images))
    first = 1 if pool == "token" else 0
    expected = torch.stack([encoded[i, first + places[i]] for i in range(2)]) @ model.prediction_head.weight.T
    torch.testing.assert_close(model(images, corruption), expected)


def test_losses_match_hand_calculation():
    """Two images of two patches, of which one is corrupted; four colours stand for the 512."""
    corruption = Corruption(torch.tensor([[1], [0]]), torch.tensor([[0, 1]] * 2), torch.zeros(2, 2, dtype=torch.bool))
    logits = torch.tensor([[0.0, 0, 0, 0], [math.log(7), 0, 0, 0]])[:, None, None]
    targets = torch.tensor([[[9], [3]], [[0], [9]]])  # 9 is no class: it must not be read
    losses = masked_patch_losses(logits, targets, corruption)
    torch.testing.assert_close(losses, torch.tensor([math.log(4), math.log(10 / 7)]))
    assert masked_patch_accuracy(logits, targets, corruption).tolist() == [0, 1]
    pixels = torch.tensor([[[0.5, 0.5, 0.5]], [[1.0, 0.0, 0.0]]])
    wanted = torch.tensor([[[9.0, 9, 9], [0.5, 0.6, 0.3]], [[1.0, 0.0, 0.1], [9, 9, 9]]])
    losses = masked_patch_losses(pixels, wanted, corruption)
    torch.testing.assert_close(losses, torch.tensor([(0.01 + 0.04) / 3, 0.01 / 3]))
    assert masked_patch_accuracy(pixels, wanted, corruption).tolist() == [0, 1]


@pytest.mark.parametrize("target", TARGETS)
def test_uncorrupted_patches_do_not_change_the_loss(target):
    model = made_model(target)
    torch.nn.init.normal_(model.prediction_head.weight, std=0.1)
    images = torch.rand(3, 3, 16, 16, generator=seeded(0)) * 2 - 1
    corruption = draw_corruption(draws(3, 16, 1))
    predictions, targets = model(images, corruption), patch_targets(images, 4, target)
    chosen = torch.zeros(3, 16, dtype=torch.bool).scatter_(1, corruption.places, True)
    losses = masked_patch_losses(predictions, targets, corruption)
    elsewhere = torch.where(chosen[:, :, None], targets, torch.zeros_like(targets))
    assert torch.equal(losses, masked_patch_losses(predictions, elsewhere, corruption))
    changed = torch.where(chosen[:, :, None], (targets + 1) % 512, targets)
    assert not torch.isclose(losses, masked_patch_losses(predictions, changed, corruption)).any()


@pytest.mark.parametrize("target", TARGETS)
def test_model_overfits_one_batch(target):
    model = made_model(target)
    levels = torch.randint(0, 8, (8, 3, 1, 1), generator=seeded(0))  # one colour per image, in the middle of its level
    images = (levels.expand(-1, -1, 16, 16) + 0.5) / 4 - 1
    corruption = draw_corruption(draws(8, 16, 1))
    targets = patch_targets(images, 4, target)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = masked_patch_losses(model(images, corruption), targets, corruption).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if target != "pixels-l2":
        assert losses[0] == pytest.approx(math.log(512), abs=1e-5)  # predictions start uniform
    assert losses[-1] < losses[0] / 50
    assert masked_patch_accuracy(model(images, corruption), targets, corruption).mean() > 0.75
    assert model.mask_token.grad.abs().sum() > 0
    assert model.network.head.weight.grad is None


def test_small_patches_and_a_corruption_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="patches of 4 px or more"):
        MaskedPatchModel(VisionTransformer(TINY.model_copy(update={"patch_size_px": 2}), 3), "downsized-4x4-3bit")
    with pytest.raises(ValueError, match="Draw a corruption for this batch"):
        made_model("mean-color-3bit")(torch.zeros(2, 3, 16, 16), draw_corruption(draws(3, 16, 0)))
