"""The network against the paper: parameter counts, initial distribution, and an explicit formula of the forward pass."""

import math

import pytest
import torch
from torch.nn import functional as F

from vit.config import ViTConfig
from vit.models.vit import VisionTransformer

SIZES = {
    "Ti": {"embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_dim": 768},
    "S": {"embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_dim": 1536},
    "B": {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072},
    "L": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    "H": {"embed_dim": 1280, "depth": 32, "num_heads": 16, "mlp_dim": 5120},
}


@pytest.mark.parametrize(
    ("size", "patch", "image", "pool", "pre_logits", "num_classes", "expected"),
    [
        # Counts of the official models (tests of the original code) and of its published checkpoints.
        ("Ti", 16, 224, "token", False, 1000, 5_717_416),
        ("S", 32, 224, "token", False, 1000, 22_878_952),
        ("B", 16, 224, "token", False, 1000, 86_567_656),
        ("B", 16, 384, "token", False, 1000, 86_859_496),
        ("B", 16, 224, "gap", False, 1000, 86_566_120),
        ("B", 16, 224, "token", True, 21843, 103_186_515),
        ("L", 16, 512, "token", False, 1000, 305_174_504),
        ("H", 14, 384, "token", False, 1000, 632_651_240),  # 27 x 27 patches: the last six rows are dropped
    ],
)
def test_parameter_counts_are_the_papers(size, patch, image, pool, pre_logits, num_classes, expected):
    config = ViTConfig(image_size_px=image, patch_size_px=patch, pool=pool, pre_logits=pre_logits, **SIZES[size])
    with torch.device("meta"):
        model = VisionTransformer(config, num_classes)
    assert sum(p.numel() for p in model.parameters()) == expected


TINY = ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=64, depth=2, num_heads=4, mlp_dim=256, pre_logits=True)


def test_initial_distribution_is_the_originals():
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


def test_forward_is_the_formula_of_the_paper():
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
