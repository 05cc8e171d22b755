"""Preprocessing of timm and transformers folders: the same logits from the same pixels."""

import pytest
import torch

from vitline.vit.convert.preprocessing import evaluation_of
from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.models.build import build_network
from vitline.vit.models.config import HybridConfig, ViTConfig

SMALL = {"image_size_px": 16, "embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def network():
    torch.manual_seed(0)
    built = build_network(ViTConfig(patch_size_px=8, **SMALL), 5).double().eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


@pytest.mark.parametrize(("mean", "std"), [(IMAGENET["mean"], IMAGENET["std"]), ([0.0] * 3, [1.0] * 3)])
@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_other_mean_and_deviation_are_folded_into_patch_embedding(mean, std, kind):
    ours, report = network(), ConversionReport("folder", "timm")
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    theirs = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = ours(theirs)
    config = {"pretrained_cfg": {"mean": mean, "std": std}} if kind == "timm" else {}
    processor = {"image_mean": mean, "image_std": std} if kind == "transformers" else None
    evaluation_of(ours, config, processor, report)
    torch.testing.assert_close(ours(2 * pixels - 1), expected, rtol=1e-5, atol=1e-6)
    assert "folded in" in report.adapted[0]


def test_crop_and_resize_are_converted_or_reported():
    report = ConversionReport("folder", "timm")
    view = evaluation_of(network(), {"crop_pct": 0.9, "interpolation": "bicubic"}, None, report)
    assert (view.eval_resize, view.eval_resize_px, view.antialias) == ("shorter_side", 17, True)
    assert report.adapted == ["images: resized bilinearly with antialias, although the folder specifies bicubic"]
    view = evaluation_of(network(), {}, {"size": {"height": 16, "width": 16}, "resample": 2}, report)
    assert (view.eval_resize, view.image_size_px) == ("square", 16)
    assert len(report.adapted) == 1


def test_mean_of_a_resnet_cannot_be_folded():
    hybrid = build_network(HybridConfig(stages=(1,), patch_size=2, **SMALL), 5)
    with pytest.raises(ConversionError, match="not supported: folder was trained on images with mean"):
        evaluation_of(hybrid, IMAGENET, None, ConversionReport("folder", "timm"))
