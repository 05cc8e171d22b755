"""The network, compared with the paper: initial distribution, explicit formula of the forward pass."""

import math

import pytest
import torch
from torch.nn import functional as F

from vitline.infra.config import replace
from vitline.vit.models.build import at_resolution
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.network import normalised
from vitline.vit.models.vit import VisionTransformer, product_of_patches

TINY = ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=64, depth=2, num_heads=4, mlp_dim=256, pre_logits=True)


def test_initial_distribution_equals_the_original_code():
    torch.manual_seed(0)
    model = VisionTransformer(TINY.model_copy(update={"embed_dim": 256}), 10)
    dim = 256
    q, k, v = model.blocks[0].attention.qkv.weight.chunk(3)
    limit = math.sqrt(3 / dim)  # Xavier over each D x D projection; the fused matrix would give sqrt(1.5 / D)
    for projection in (q, k, v, model.blocks[1].attention.out.weight):
        assert projection.abs().max() <= limit
        assert projection.abs().max() > 0.99 * limit
    assert model.blocks[0].fc1.weight.abs().max() <= math.sqrt(6 / (dim + 256))
    assert model.blocks[0].fc1.bias.std().item() == pytest.approx(1e-6, rel=0.3)
    assert model.patch_embed.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 8 * 8), rel=0.02)
    assert model.pre_logits.weight.std().item() == pytest.approx(1 / math.sqrt(dim), rel=0.02)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.cls_token.any()
    assert not model.head.weight.any()


def test_forward_equals_the_formula_of_the_paper():
    """z' = z + MSA(LN(z)); z = z' + MLP(LN(z')), written out with loops over heads and patches, in float64."""
    torch.manual_seed(1)
    model = VisionTransformer(TINY, 7).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def norm(t, layer):
        mean, var = t.mean(-1, keepdim=True), t.var(-1, unbiased=False, keepdim=True)
        return (t - mean) / torch.sqrt(var + 1e-6) * layer.weight + layer.bias

    def gelu(t):
        return 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))

    patches = [x[:, :, r : r + 8, c : c + 8].reshape(2, -1) for r in (0, 8) for c in (0, 8)]
    kernel = model.patch_embed.weight.reshape(64, -1)
    tokens = [p @ kernel.T + model.patch_embed.bias for p in patches]
    z = torch.stack([model.cls_token[0, 0].expand(2, -1), *tokens], dim=1) + model.pos_embed
    for block in model.blocks:
        h = norm(z, block.norm1)
        qkv = block.attention.qkv
        q, k, v = (F.linear(h, w, b) for w, b in zip(qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True))
        heads = []
        for i in range(4):
            part = slice(16 * i, 16 * (i + 1))
            logits = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(16)
            heads.append(logits.softmax(-1) @ v[..., part])
        z = z + block.attention.out(torch.cat(heads, dim=-1))
        z = z + block.fc2(gelu(block.fc1(norm(z, block.norm2))))
    expected = model.head(torch.tanh(model.pre_logits(norm(z, model.norm)[:, 0])))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def perturbed(config, num_classes=7):
    """Weights that are not near zero, float64."""
    torch.manual_seed(1)
    network = VisionTransformer(config, num_classes).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16, dtype=torch.float64).reshape(2, 3, 16, 16).sin()


def with_positions(network, table):
    """The logits with `table[i]` (T, D) added to the input of block i, by an explicit loop."""
    x = network.tokens(IMAGES)
    for i, block in enumerate(network.blocks):
        x = block(x + table[i] if i < len(table) else x)
    return network.head(network.pooled(network.norm(x)))


def test_positions_are_added_at_the_stem_shared_or_per_layer():
    stem = perturbed(replace(TINY, pos_embed_at="stem"))
    torch.testing.assert_close(stem(IMAGES), with_positions(stem, stem.pos_embed))
    shared = perturbed(replace(TINY, pos_embed_at="shared"))
    torch.testing.assert_close(shared(IMAGES), with_positions(shared, [shared.pos_embed[0]] * 2))
    layers = perturbed(replace(TINY, pos_embed_at="every-layer"))
    assert layers.pos_embed.shape == (2, 5, 64)
    torch.testing.assert_close(layers(IMAGES), with_positions(layers, layers.pos_embed))
    assert not torch.allclose(layers(IMAGES), with_positions(layers, layers.pos_embed[:1]))


def test_two_dimensional_positions_are_the_sum_of_a_column_and_a_row():
    network = perturbed(replace(TINY, pos_embed="learned-2d"))
    table = network.positions()[0]
    assert not table[0].any()  # the class token has no position in the grid
    x, y = network.pos_embed_x[0], network.pos_embed_y[0]
    for row in (0, 1):
        for column in (0, 1):
            assert torch.equal(table[1 + 2 * row + column], torch.cat([x[column], y[row]]))
    torch.testing.assert_close(network(IMAGES), with_positions(network, [table]))


def test_relative_positions_add_a_key_per_offset():
    network = perturbed(replace(TINY, pos_embed="relative"))
    attention = network.blocks[0].attention
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    q, k, v = attention.heads(x)
    offsets = attention.pos_embed_offsets
    assert offsets.shape == (9, 16)
    out = torch.zeros_like(q)
    for i in range(5):
        logits = torch.stack([(q[:, :, i] * (k[:, :, j] + offsets[i - j + 4])).sum(-1) for j in range(5)], dim=-1)
        out[:, :, i] = ((logits / 4).softmax(-1)[..., None] * v).sum(2)
    expected = attention.out(out.transpose(1, 2).reshape(2, 5, 64))
    torch.testing.assert_close(attention(x), expected)
    torch.testing.assert_close(attention.weights(x) @ v, out)


def test_patches_of_a_gpu_are_embedded_by_a_matrix_product_equal_to_the_convolution():
    """Of bytes and of floats; rows and columns that fill no whole patch are dropped."""
    convolution = torch.nn.Conv2d(3, 5, kernel_size=4, stride=4).double()
    pictures = torch.randint(0, 256, (2, 18, 15, 3), dtype=torch.uint8)
    pixels = normalised(pictures).double()
    assert normalised(pixels) is pixels
    torch.testing.assert_close(product_of_patches(convolution, pixels), convolution(pixels), rtol=1e-12, atol=1e-12)


def test_without_positions_the_order_of_patches_does_not_matter():
    network = perturbed(replace(TINY, pos_embed="none"))
    swapped = torch.cat([IMAGES[..., 8:], IMAGES[..., :8]], dim=-1)
    torch.testing.assert_close(network(swapped), network(IMAGES))
    assert not torch.allclose(perturbed(TINY)(swapped), perturbed(TINY)(IMAGES))


def test_stochastic_depth_drops_whole_branches_more_often_with_depth():
    network = perturbed(replace(TINY, depth=3, stochastic_depth_rate=0.8)).train()
    assert [block.drop_rate for block in network.blocks] == pytest.approx([0.0, 0.4, 0.8])
    block, x = network.blocks[2], torch.randn(1, 5, 64, dtype=torch.float64).expand(400, -1, -1)
    out = block(x)
    kept = ~torch.isclose(out, x).all(dim=(1, 2))  # false where neither branch was added
    assert kept.double().mean() == pytest.approx(1 - 0.8**2, abs=0.08)
    whole = block.eval()(x[:1])
    both = torch.isclose(out, whole).all(dim=(1, 2)).double().mean()  # kept branches are not scaled up
    assert both == pytest.approx(0.2**2, abs=0.04)


def test_bfloat16_differs_by_rounding_only():
    network = perturbed(replace(TINY, depth=6)).float()
    exact = network(IMAGES.float())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(IMAGES.float())
    assert (rounded - exact).abs().max() / exact.abs().max() < 0.03


def test_logits_stay_float32_beside_bfloat16():
    """At the bias of the sigmoid loss, bfloat16 has 16 values between -10 and -9: classes would tie."""
    network = VisionTransformer(replace(TINY, head_bias_init=-10.0), 1000)
    torch.nn.init.normal_(network.head.weight, std=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(IMAGES.float())
        ties = network.head(network.features(IMAGES.float()))
    assert logits.dtype == torch.float32
    assert len(logits[0].unique()) > 900
    assert len(ties[0].unique()) < 50


def test_another_resolution_is_refused_until_positions_are_resampled():
    network = perturbed(TINY)
    with pytest.raises(ValueError, match=r"The image gives 10 tokens, but the position embeddings are for 5: .* 16 px"):
        network(torch.zeros(1, 3, 24, 24, dtype=torch.float64))
    larger = at_resolution(network, 24)
    assert larger.pos_embed.shape == (1, 10, 64)
    assert larger(torch.zeros(1, 3, 24, 24, dtype=torch.float64)).shape == (1, 7)
    assert torch.equal(at_resolution(network, 17)(IMAGES), network(IMAGES))  # the same grid: a remainder is dropped
    with pytest.raises(ValueError, match="not supported: relative position embeddings at another resolution"):
        at_resolution(perturbed(replace(TINY, pos_embed="relative")), 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 must divide embed_dim=64"),
        ({"pos_embed": "sincos-2d", "embed_dim": 66, "num_heads": 2}, "needs an embed_dim divisible by 4, not 66"),
        ({"pos_embed": "none", "pos_embed_at": "shared"}, "pos_embed_at=shared has no effect with pos_embed=none"),
        ({"image_size_px": 7}, "image_size_px=7 must be at least patch_size_px=8"),
    ],
)
def test_contradictory_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)
