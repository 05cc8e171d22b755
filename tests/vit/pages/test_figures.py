"""The paper's figures: values by hand on synthetic attention, agreement with numpy and explicit matrices, and the page."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitline.infra.storage import open_store
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.pages.figures import (
    grid_distances,
    inspect_network,
    mean_distances,
    position_similarity,
    principal_components,
    rollout_step,
)
from vitline.vit.pages.page import rollout_mask, write_inspection

SIZES = {"embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_dim": 32}
TINY = ViTConfig(image_size_px=18, patch_size_px=4, **SIZES)  # 4 x 4 patches, 2 px are dropped
HYBRID = HybridConfig(image_size_px=32, stages=(1,), **SIZES)
NAMES = ["patch-filters.png", "position-similarity.png", "attention-distance.png", "attention-rollout.png"]


def network_of(config, seed=0):
    torch.manual_seed(seed)
    return build_network(config, 5)


def images_of(config, count=5):
    pixels = np.random.default_rng(1).integers(0, 256, (count, config.image_size_px, config.image_size_px, 3), np.uint8)
    return pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def attention_of(network, images):
    """Attention weights of every layer, from an explicit forward pass."""
    x = network.tokens(images) + network.positions()[0]
    weights = []
    for block in network.encoder():
        weights.append(block.attention.weights(block.norm1(x)))
        x = block(x)
    return weights


def test_mean_distance_matches_hand_calculation():
    distances = torch.from_numpy(grid_distances(2, 16))
    torch.testing.assert_close(distances[0], torch.tensor([0.0, 16, 16, 16 * math.sqrt(2)], dtype=torch.float64))
    even = torch.full((1, 1, 4, 4), 0.25)
    itself = torch.eye(4).expand(1, 1, 4, 4)
    opposite = torch.eye(4).flip(0).expand(1, 1, 4, 4)
    found = mean_distances(torch.cat([even, itself, opposite], dim=1), distances)
    expected = [(0 + 16 + 16 + 16 * math.sqrt(2)) / 4, 0, 16 * math.sqrt(2)]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_class_token_is_dropped_and_rows_are_renormalised():
    """Two patches 8 px apart. Attention to the class token, to themselves, to each other: .6 .1 .3 and .5 .5 0."""
    distances = torch.from_numpy(grid_distances(2, 8))[:2, :2]
    weights = torch.tensor([[[[0.0, 0.0, 1.0], [0.6, 0.1, 0.3], [0.5, 0.0, 0.5]]]])
    expected = (8 * 0.3 / 0.4 + 0) / 2
    torch.testing.assert_close(mean_distances(weights, distances).item(), expected)


def test_rollout_of_two_layers_is_the_product_of_their_matrices():
    first = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]])  # heads mean [[.5, .5], [.5, .5]]
    second = torch.tensor([[[[0.2, 0.8], [1.0, 0.0]]]]).expand(1, 2, 2, 2)
    # ([[.5, .5], [.5, .5]] + I) / 2 = [[.75, .25], [.25, .75]]; ([[.2, .8], [1, 0]] + I) / 2 = [[.6, .4], [.5, .5]]
    expected = [[0.6 * 0.75 + 0.4 * 0.25, 0.6 * 0.25 + 0.4 * 0.75], [0.5, 0.5]]
    found = rollout_step(rollout_step(None, first), second)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_principal_components_are_orthonormal_and_agree_with_numpy():
    kernels = np.random.default_rng(0).normal(size=(50, 3, 4, 4)) * np.linspace(1, 3, 48).reshape(3, 4, 4) + 2
    components, fractions = principal_components(kernels)
    assert components.shape == (28, 4, 4, 3)
    flat = components.transpose(0, 3, 1, 2).reshape(28, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(28), atol=1e-12)
    covariance = np.cov(kernels.reshape(50, -1), rowvar=False)
    values, vectors = np.linalg.eigh(covariance)
    np.testing.assert_allclose(np.abs(np.sum(flat * vectors.T[::-1][:28], axis=1)), 1, atol=1e-9)
    np.testing.assert_allclose(fractions, values[::-1][:28] / values.sum(), atol=1e-12)
    np.testing.assert_allclose(principal_components(-kernels)[0], components, atol=1e-9)


@pytest.mark.parametrize("table", ["learned-1d", "learned-2d", "sincos-2d"])
def test_position_similarity_is_symmetric_and_one_on_the_diagonal(table):
    network = network_of(TINY.model_copy(update={"pos_embed": table, "pos_embed_at": "every-layer"}))
    similarity = position_similarity(network)
    assert similarity.shape == (16, 16)
    np.testing.assert_allclose(similarity, similarity.T, atol=1e-12)
    np.testing.assert_allclose(np.diag(similarity), 1, atol=1e-12)
    a, b = (network.positions()[0, 1 + patch].detach().double() for patch in (3, 6))
    assert similarity[3, 6] == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-12)


@pytest.mark.parametrize("pool", ["token", "gap", "map"])
def test_inspection_by_hooks_equals_explicit_attention(pool):
    network = network_of(TINY.model_copy(update={"pool": pool, "dropout_rate": 0.5})).train()
    _, images = images_of(TINY)
    inspection = inspect_network(network, images, batch_size=2)
    assert network.training
    assert not any(block.attention._forward_pre_hooks for block in network.encoder())
    with torch.no_grad():
        layers = attention_of(network.eval(), images)
    distances = torch.from_numpy(grid_distances(4, 4))
    expected = torch.stack([mean_distances(weights, distances).mean(dim=0) for weights in layers])
    np.testing.assert_allclose(inspection.attention_distance_px, expected, rtol=1e-5)
    assert (inspection.attention_distance_px > 0).all()
    assert (inspection.attention_distance_px < 3 * 4 * math.sqrt(2)).all()
    product = eye = torch.eye(layers[0].shape[2])
    for weights in layers:
        product = (weights.mean(dim=1) + eye) / 2 @ product
    rows = product[:, 0, 1:] if pool == "token" else product.mean(dim=1)
    np.testing.assert_allclose(inspection.rollout, rows.reshape(5, 4, 4), rtol=1e-4)
    assert any("no class token" in note for note in inspection.notes) == (pool != "token")


@pytest.mark.parametrize("table", ["none", "relative"])
def test_similarity_of_positions_not_added_to_tokens_is_omitted_with_a_note(table, tmp_path):
    config = TINY.model_copy(update={"pos_embed": table})
    pixels, images = images_of(config)
    inspection = inspect_network(network_of(config), images)
    assert inspection.position_similarity is None
    assert any("so there is no position similarity" in note for note in inspection.notes)
    keys = write_inspection(open_store(tmp_path), inspection, pixels, "no positions")
    assert keys == [NAMES[0], *NAMES[2:], "inspection.json", "index.html"]


def test_rollout_mask_peaks_with_the_rollout_and_is_zero_outside_the_patches():
    rollout = np.full((4, 4), 0.01)
    rollout[1, 2] = 0.5
    mask = rollout_mask(rollout, image_px=18, patch_px=4)
    assert mask.shape == (18, 18)
    assert mask.min() == 0
    assert mask.max() == 1
    row, column = np.unravel_index(mask.argmax(), mask.shape)
    assert 4 <= row < 8
    assert 8 <= column < 12
    assert not mask[16:].any()
    assert not mask[:, 16:].any()
    assert (rollout_mask(np.full((4, 4), 0.1), image_px=16, patch_px=4) == 1).all()


@pytest.mark.parametrize(
    ("config", "names", "says"),
    [
        (TINY, NAMES, "32 kernels of the patch embedding"),
        (HYBRID, NAMES, "64 kernels of the 7 x 7 root convolution"),
        (BiTConfig(stages=(1,)), NAMES[:1], "64 kernels of the 7 x 7 root convolution"),
    ],
)
def test_page_contains_every_figure_of_the_network(config, names, says, tmp_path):
    pixels, images = images_of(config)
    inspection = inspect_network(network_of(config), images)
    store = open_store(tmp_path)
    keys = write_inspection(store, inspection, pixels, "A <tiny> network")
    assert keys == [*names, "inspection.json", "index.html"]
    assert keys == sorted(store.list(), key=keys.index)
    page = store.read("index.html").decode()
    assert page.count("data:image/png;base64,") == len(names)
    assert "://" not in page
    assert "A &lt;tiny&gt; network" in page
    assert says in page
    for name in names:
        assert len(np.unique(np.asarray(Image.open(tmp_path / name).convert("L")))) > 16
    numbers = json.loads(store.read("inspection.json"))
    if "attention-distance.png" in names:
        assert np.array(numbers["attention_distance_px"]).shape == (3, 2)
        assert numbers["patch_px"] == 4
        assert numbers["num_images"] == 5


def test_images_in_another_order_are_other_images(tmp_path):
    network = network_of(TINY)
    pixels, images = images_of(TINY)

    def recorded(order):
        store = open_store(tmp_path / "-".join(map(str, order)))
        write_inspection(store, inspect_network(network, images[order]), pixels[order], "a network")
        return json.loads(store.read("inspection.json"))["images_sha256"]

    assert recorded([0, 1, 2]) == recorded([0, 1, 2]) != recorded([0, 2, 1])
    assert recorded([0, 1]) != recorded([0, 1, 2])


def test_mismatched_images_and_non_finite_networks_are_refused():
    network = network_of(TINY)
    with pytest.raises(ValueError, match=r"expected \(n, 3, 18, 18\)"):
        inspect_network(network, torch.zeros(1, 3, 16, 16))
    with pytest.raises(ValueError, match=r"pixels / 127\.5 - 1"):
        inspect_network(network, torch.zeros(1, 3, 18, 18, dtype=torch.uint8))
    torch.nn.init.constant_(network.blocks[1].attention.qkv.bias, float("nan"))
    with pytest.raises(ValueError, match=r"blocks\.1 is not finite"):
        inspect_network(network, torch.zeros(1, 3, 18, 18))


def test_matplotlib_is_imported_only_for_drawing():
    code = "import sys, vitline.vit.pages.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
