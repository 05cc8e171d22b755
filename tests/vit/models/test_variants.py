"""Every named network has the published parameters and operations, builds and runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitline.vit.models.build import build_network, meta_network, network_with
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.models.flops import forward_flops, training_flops
from vitline.vit.models.variants import REGISTERED, network_variant
from vitline.vit.training.layers import freeze

# Parameters: variant, resolution, then with a linear head of 1000 and 21843 classes, then with pre-logits and 21843 and 18291.
VITS = [
    ("ti16", 224, 5_717_416, 9_740_115, 9_777_171, 9_091_635),
    ("ti16", 384, 5_790_376, 9_813_075, 9_850_131, 9_164_595),
    ("s32", 224, 22_878_952, 30_903_507, 31_051_347, 29_683_827),
    ("s32", 384, 22_915_432, 30_939_987, 31_087_827, 29_720_307),
    ("s16", 224, 22_050_664, 30_075_219, 30_223_059, 28_855_539),
    ("s16", 384, 22_196_584, 30_221_139, 30_368_979, 29_001_459),
    ("b32", 224, 88_224_232, 104_252_499, 104_843_091, 102_111_603),
    ("b32", 384, 88_297_192, 104_325_459, 104_916_051, 102_184_563),
    ("b16", 224, 86_567_656, 102_595_923, 103_186_515, 100_455_027),
    ("b16", 384, 86_859_496, 102_887_763, 103_478_355, 100_746_867),
    ("b8", 224, 86_576_872, 102_605_139, 103_195_731, 100_464_243),
    ("b8", 384, 87_744_232, 103_772_499, 104_363_091, 101_631_603),
    ("l32", 224, 306_535_400, 327_899_475, 328_949_075, 325_308_275),
    ("l32", 384, 306_632_680, 327_996_755, 329_046_355, 325_405_555),
    ("l16", 224, 304_326_632, 325_690_707, 326_740_307, 323_099_507),
    ("l16", 384, 304_715_752, 326_079_827, 327_129_427, 323_488_627),
    ("l16", 512, 305_174_504, 326_538_579, 327_588_179, 323_947_379),
    ("h14", 224, 632_045_800, 658_745_683, 660_385_363, 655_835_251),
    ("h14", 384, 632_651_240, 659_351_123, 660_990_803, 656_440_691),  # 27 x 27: the last six rows are dropped
    ("h14", 518, 633_470_440, 660_170_323, 661_810_003, 657_259_891),
]
HYBRIDS = [  # with 1000 classes at 224 and 384 px; and of the ResNet alone
    ("r50_b16", 98_659_112, 98_950_952, 11_894_848),
    ("r50_b32", 110_945_832, 111_018_792, 23_508_032),
    ("r50_l32", 328_994_856, 329_092_136, 23_508_032),
    ("r50_l16", 316_483_624, 316_872_744, 11_894_848),
    ("r26_s32", 36_431_912, 36_468_392, 13_946_176),
    ("r26_b32", 101_383_976, 101_456_936, 13_946_176),
    ("r_ti16", 6_337_704, 6_355_944, 9_536),
]
BITS = [  # body, 1000 classes, 21843 classes, GMACs (1000 classes) at 224, 384, 448 and 480
    ("bit_r50x1", 23_500_352, 25_549_352, 68_256_659, 4.09, 12.01, 16.35, 18.77),
    ("bit_r50x2", 93_891_712, 97_988_712, 183_382_483, 16.12, 47.36, 64.45, 73.99),
    ("bit_r50x3", 211_174_080, 217_319_080, 345_399_315, 36.08, 106.03, 144.31, 165.66),
    ("bit_r101x1", 42_492_480, 44_541_480, 87_248_787, 7.80, 22.92, 31.20, 35.82),
    ("bit_r101x3", 381_789_888, 387_934_888, 516_015_123, 69.49, 204.21, 277.95, 319.08),
    ("bit_r152x1", 58_136_128, 60_185_128, 102_892_435, 11.51, 33.83, 46.05, 52.86),
    ("bit_r152x2", 232_238_208, 236_335_208, 321_728_979, 45.81, 134.63, 183.25, 210.36),
    ("bit_r152x4", 928_340_224, 936_533_224, 1_107_299_923, 182.78, 537.13, 731.08, 839.25),
    ("bit_r200x3", 562_488_000, 568_633_000, 696_713_235, 134.35, 394.80, 537.37, 616.88),
]
JFT_GMACS = {  # forward at 224 px with pre-logits and 18,291 classes; the paper's Table 6 is this x 6 x number of images
    "b32": 4.42, "b16": 17.58, "l32": 15.40, "l16": 61.57, "h14": 167.32,
    "r50_b32": 8.47, "r50_b16": 21.55, "r50_l32": 19.43, "r50_l16": 65.56,
    "bit_r50x1": 4.12, "bit_r50x2": 16.19, "bit_r101x1": 7.84, "bit_r152x1": 11.55, "bit_r152x2": 45.89, "bit_r200x3": 134.45,
}  # fmt: skip


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "size", "linear_1k", "linear_21k", "paper_21k", "paper_jft"), VITS)
def test_parameters_of_vision_transformers(variant, size, linear_1k, linear_21k, paper_21k, paper_jft):
    plain = network_variant(variant, image_size_px=size)
    paper = network_variant(variant, image_size_px=size, pre_logits=True)
    heads = [(plain, 1000), (plain, 21843), (paper, 21843), (paper, 18291)]
    counts = [count(meta_network(config, classes)) for config, classes in heads]
    assert counts == [linear_1k, linear_21k, paper_21k, paper_jft]


@pytest.mark.parametrize(
    ("variant", "settings", "expected"),
    [
        ("s16", {"pool": "gap"}, 22_049_896),
        ("s32", {"pool": "gap"}, 22_878_184),
        ("b16", {"pool": "gap"}, 86_566_120),
        ("b32", {"pool": "gap"}, 88_222_696),
        ("s16", {"pool": "gap", "pos_embed": "sincos-2d", "pre_logits": True}, 22_122_472),
        ("s16", {"pool": "gap", "pos_embed": "sincos-2d"}, 21_974_632),
    ],
)
def test_parameters_of_average_pooled_networks(variant, settings, expected):
    assert count(meta_network(network_variant(variant, **settings), 1000)) == expected


@pytest.mark.parametrize(("variant", "at_224", "at_384", "resnet"), HYBRIDS)
def test_parameters_of_hybrids(variant, at_224, at_384, resnet):
    networks = [meta_network(network_variant(variant, image_size_px=size), 1000) for size in (224, 384)]
    assert [count(network) for network in networks] == [at_224, at_384]
    assert count(networks[0].resnet) == resnet


@pytest.mark.parametrize(("variant", "body", "linear_1k", "linear_21k", "at_224", "at_384", "at_448", "at_480"), BITS)
def test_parameters_and_operations_of_bit(variant, body, linear_1k, linear_21k, at_224, at_384, at_448, at_480):
    networks = [meta_network(network_variant(variant), classes) for classes in (1000, 21843)]
    assert [count(network) for network in networks] == [linear_1k, linear_21k]
    assert count(networks[0]) - count(networks[0].head) == body
    for size, expected in ((224, at_224), (384, at_384), (448, at_448), (480, at_480)):
        gmacs = forward_flops(network_variant(variant, image_size_px=size), 1000) / 2e9
        assert round(gmacs, 2) == expected


@pytest.mark.parametrize(("variant", "expected"), JFT_GMACS.items())
def test_operations_of_table_6(variant, expected):
    settings = {} if variant.startswith("bit") else {"pre_logits": True}
    gmacs = forward_flops(network_variant(variant, **settings), 18291) / 2e9
    assert gmacs == pytest.approx(expected, rel=0.003)


TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    "config",
    [
        ViTConfig(image_size_px=32, patch_size_px=8, pre_logits=True, **TINY),
        ViTConfig(image_size_px=30, patch_size_px=7, pool="map", **TINY),
        ViTConfig(image_size_px=32, patch_size_px=8, pool="gap", pos_embed="relative", **TINY),
        ViTConfig(image_size_px=32, patch_size_px=8, pos_embed="learned-2d", pos_embed_at="every-layer", **TINY),
        HybridConfig(image_size_px=70, stages=(1, 2), **TINY),
        HybridConfig(image_size_px=64, stages=(), patch_size=8, **TINY),
        BiTConfig(image_size_px=70, stages=(1, 2, 1, 1)),
        BiTConfig(image_size_px=32, stages=(1, 1, 1, 1), width_factor=2),
    ],
)
def test_operations_equal_those_that_torch_counts(config):
    network = meta_network(config, 10).requires_grad_(False)
    images = torch.zeros(3, 3, config.image_size_px, config.image_size_px, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(images)
    assert counter.get_total_flops() == 3 * forward_flops(config, 10)


@pytest.mark.parametrize(
    ("config", "frozen"),
    [
        (ViTConfig(image_size_px=32, patch_size_px=8, pre_logits=True, **TINY), "backbone"),
        (ViTConfig(image_size_px=30, patch_size_px=7, pool="map", **TINY), "backbone"),
        (ViTConfig(image_size_px=30, patch_size_px=7, pool="map", **TINY), 2),
        (ViTConfig(image_size_px=32, patch_size_px=8, pool="gap", pos_embed="relative", **TINY), 1),
        (
            ViTConfig(image_size_px=32, patch_size_px=8, pos_embed="learned-2d", pos_embed_at="every-layer", **TINY),
            "embeddings",
        ),
        (ViTConfig(image_size_px=32, patch_size_px=8, **TINY), "none"),
        (HybridConfig(image_size_px=70, stages=(1, 2), **TINY), "embeddings"),
        (BiTConfig(image_size_px=70, stages=(1, 2, 1, 1)), "backbone"),
    ],
)
def test_operations_of_a_training_without_gradients_of_what_is_frozen_equal_those_that_torch_counts(config, frozen):
    network = meta_network(config, 10)
    freeze(network, frozen)
    # Three forward passes count a gradient of the images, too, as the paper does.
    images = torch.zeros(
        3, 3, config.image_size_px, config.image_size_px, device="meta", requires_grad=frozen == "none"
    )
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(images).sum().backward()
    assert counter.get_total_flops() == 3 * training_flops(config, 10, frozen)


# Networks of more parameters are built and run on the meta device only, or in the slow test.
LARGEST = 12_000_000


def small(variant):
    config = network_variant(variant)
    side = {"vit": 3 * getattr(config, "patch_size_px", 0), "hybrid": 64, "bit": 48}[config.architecture]
    return network_variant(variant, image_size_px=side)


@pytest.mark.parametrize("variant", REGISTERED)
def test_every_variant_builds_and_runs(variant):
    config = small(variant)
    network = meta_network(config, 5)
    if count(network) > LARGEST:
        assert network(torch.zeros(2, 3, config.image_size_px, config.image_size_px, device="meta")).shape == (2, 5)
        return
    logits = build_network(config, 5).eval()(torch.rand(2, 3, config.image_size_px, config.image_size_px))
    assert torch.equal(logits, torch.zeros(2, 5))  # the head starts at zero


@pytest.fixture(scope="module")
def noise():
    """More numbers than the largest weight of a large variant has."""
    return torch.randn(22_000_000, generator=torch.Generator().manual_seed(0)) / 50


@pytest.mark.long
def test_large_variants_tell_images_apart(noise):
    """Their weights share the memory of `noise`: drawing hundreds of millions of them takes longer than the forward pass.
    H, g, G and R152x4 run on the meta device only."""
    tried = set()
    for variant in REGISTERED:
        config = small(variant)
        meta = meta_network(config, 5)
        if not LARGEST < count(meta) < 600_000_000:
            continue
        weights = {name: noise[: weight.numel()].view(weight.shape) for name, weight in meta.state_dict().items()}
        network = network_with(config, 5, weights)
        assert count(network) == count(meta)
        with torch.inference_mode():
            features = network.features(torch.rand(2, 3, config.image_size_px, config.image_size_px))
        assert features.isfinite().all(), variant
        assert not torch.equal(features[0], features[1]), variant
        tried.add(variant)
    assert {"b16", "l16"} <= tried


@pytest.mark.parametrize(
    ("written", "plain"),
    [("ViT-B/16", "b16"), ("R50+ViT-B/16", "r50_b16"), ("R26+S/32", "r26_s32"), ("BiT-R50x1", "bit_r50x1"),
     ("So400m/14", "so400m14"), ("R+Ti/16", "r_ti16"), ("vit-l32", "l32")],
)  # fmt: skip
def test_variants_are_accepted_as_papers_write_them(written, plain):
    assert network_variant(written) == network_variant(plain)
    assert network_variant("g14").embed_dim < network_variant("G14").embed_dim


@pytest.mark.parametrize("variant", ["x16", "b", "r50_b8", "bit_r51x1", "bit_r50x9", ""])
def test_unknown_variant_is_refused(variant):
    with pytest.raises(ValueError, match="is not a network variant"):
        network_variant(variant)
