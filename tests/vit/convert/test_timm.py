"""timm's networks and ours compute the same logits and gradients; other networks are refused with the reason."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.config import replace
from vitline.vit.convert.folder import read_classes
from vitline.vit.convert.report import ConversionError
from vitline.vit.convert.tables import names_of
from vitline.vit.convert.timm import BIT, HYBRID, STEM_ONLY, TRANSFORMER, from_timm, read_timm, to_timm, write_timm
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network, meta_network
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.models.variants import network_variant

TINY = {
    "img_size": 18,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 2.5,
    "num_classes": 5,
}
GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
MAP = {"class_token": False, "global_pool": "map"}
# (architecture, arguments, largest difference of logits in float64, which is larger for hybrids: GroupNorm's epsilon)
CASES = {
    "token": ("vit_base_patch16_224", TINY, 1e-10),
    "b16": ("vit_base_patch16_224", {"img_size": 64, "depth": 2, "num_classes": 7}, 1e-10),
    "tanh": ("vit_base_patch16_224", TINY | {"act_layer": "gelu_tanh"}, 1e-10),
    "no-qkv-bias": ("vit_base_patch16_224_miil", TINY, 1e-10),
    "positions-of-patches-only": ("vit_base_patch16_224", TINY | {"no_embed_class": True}, 1e-10),
    "no-positions": ("vit_base_patch16_224", TINY | {"pos_embed": "none"}, 1e-10),
    "average": ("vit_base_patch16_gap_224", TINY, 1e-10),
    "average-16-heads": ("vit_base_patch16_gap_224", {"img_size": 32, "depth": 1, "num_classes": 3}, 1e-10),
    "attention-pool": ("vit_base_patch16_siglip_224", TINY, 1e-10),
    "attention-pool-tanh": ("vit_base_patch32_siglip_256", TINY, 1e-10),
    "hybrid": ("vit_base_r50_s16_224", TINY | {"img_size": 32, "patch_size": 1}, 1e-5),
    "hybrid-stem": ("vit_tiny_r_s16_p8_224", TINY | {"img_size": 32, "patch_size": 2}, 1e-5),
}


@pytest.fixture
def theirs(timm, randomise):
    """theirs(case): (timm's network, the arguments that its config.json would have)."""

    def make(case: str):
        name, args, _ = CASES[case]
        if case == "hybrid":  # the architecture of timm with fewer blocks
            backbone = timm.models.vision_transformer_hybrid._resnetv2((1, 2))
            embed = partial(timm.layers.HybridEmbed, backbone=backbone)
            return randomise(timm.models.VisionTransformer(embed_layer=embed, **args)), {"architecture": name, **args}
        return randomise(timm.create_model(name, **args)), {"architecture": name, **args}

    return make


@pytest.fixture
def tiny_bit(timm, randomise):
    from timm.layers import StdConv2d

    conv = partial(StdConv2d, eps=1e-8)
    network = timm.models.resnetv2.ResNetV2((1, 2), (256, 512), num_classes=5, stem_type="fixed", conv_layer=conv)
    return randomise(network)


def images(network, dtype=torch.float32, count=3, size=None):
    size = size or network.config.image_size_px
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_timm(case, theirs, rel_diff):
    other, args = theirs(case)
    ours = from_timm(other.state_dict(), args, "timm")
    in_float64 = from_timm(other.double().state_dict(), args, "timm").network
    with torch.no_grad():
        x = images(ours.network, torch.float64)
        logits = other(x)
        assert rel_diff(in_float64(x), logits) <= CASES[case][2]
        assert rel_diff(ours.network(x.float()), other.float()(x.float())) <= 1e-5
    assert logits.abs().max() > 0.5
    assert logits.std(dim=0).max() > 0.05, "all images have the same logits: the comparison means nothing"
    assert set(ours.report.loaded) == set(ours.network.state_dict())
    assert set(", ".join(ours.report.loaded.values()).split(", ")) == set(other.state_dict())


def test_logits_of_bit_equal_those_of_timm(tiny_bit, rel_diff):
    args = {"architecture": "resnetv2_50x1_bit", "input_size": [3, 40, 40]}
    ours = from_timm(tiny_bit.state_dict(), args, "timm").network
    in_float64 = from_timm(tiny_bit.double().state_dict(), args, "timm").network
    with torch.no_grad():
        x = images(ours, torch.float64)
        assert rel_diff(in_float64(x), tiny_bit(x)) <= 1e-10
        assert rel_diff(ours(x.float()), tiny_bit.float()(x.float())) <= 1e-5
    assert ours.config == BiTConfig(stages=(1, 2), image_size_px=40)


@pytest.mark.parametrize("case", ["token", "average", "attention-pool", "hybrid", "bit"])
def test_gradients_equal_those_of_timm(case, theirs, tiny_bit, rel_diff):
    other, args = (tiny_bit, {"input_size": [3, 40, 40]}) if case == "bit" else theirs(case)
    ours = from_timm(other.state_dict(), args, "timm").network
    table = {"bit": BIT, "hybrid": HYBRID}.get(case, TRANSFORMER)
    x, labels = images(ours), torch.tensor([0, 2, 1])
    for network in (ours, other):
        F.cross_entropy(network(x), labels).backward()
    their_parameters = dict(other.named_parameters())
    for name, value in ours.named_parameters():
        (entry,) = names_of(name, table)
        match = their_parameters[entry]
        # The gradient of a kernel that was multiplied by a factor is divided by this factor.
        factor = (value / match.reshape(value.shape)).detach().nanmean(dim=tuple(range(1, value.ndim)), keepdim=True)
        gradient = value.grad * (factor if value.ndim == 4 else 1)
        assert rel_diff(gradient, match.grad.reshape(value.shape)) <= 1e-4, name


WRITTEN = {
    "token": ViTConfig(image_size_px=18, patch_size_px=4, embed_dim=32, depth=2, num_heads=4, mlp_dim=50),
    "dropout": ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=32, depth=1, num_heads=2, mlp_dim=64, dropout_rate=0.1),
    "gap": ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=32, depth=2, num_heads=4, mlp_dim=64, pool="gap"),
    "map": ViTConfig(
        image_size_px=16, patch_size_px=8, embed_dim=32, depth=2, num_heads=4, mlp_dim=48, pool="map", qkv_bias=False
    ),
    "none": ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=32, depth=2, num_heads=4, mlp_dim=64, pos_embed="none"),
    "b16": ViTConfig(image_size_px=32, patch_size_px=16, depth=1, gelu="erf"),
}  # fmt: skip


def written(config, randomise, tmp_path, num_classes=4, contract=None):
    network = randomise(
        meta_network(config, num_classes).to_empty(device="cpu")
    )  # without drawing initial weights first
    if config.architecture != "bit" and config.pos_embed == "sincos-2d":
        network = randomise(build_network(config, num_classes))
    write_timm(network, tmp_path, ["cat", "dog", "Ente", "鸟"][:num_classes], contract)
    return network


@pytest.mark.parametrize("case", WRITTEN)
def test_written_folder_has_the_same_logits_in_timm_and_reads_back(case, timm, randomise, rel_diff, tmp_path):
    ours = written(WRITTEN[case], randomise, tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        x = images(ours, torch.float64)
        assert rel_diff(theirs.double()(x), ours.double()(x)) <= 1e-10
    assert theirs.pretrained_cfg["label_names"] == ["cat", "dog", "Ente", "鸟"]
    assert read_classes(tmp_path) == ("cat", "dog", "Ente", "鸟")
    back = read_timm(tmp_path)
    assert back.config == WRITTEN[case]
    assert (back.report.adapted, back.report.skipped, back.report.missing) == ([], {}, {})
    for name, value in ours.float().state_dict().items():
        assert torch.equal(back.network.state_dict()[name], value), name


@pytest.mark.parametrize("case", ["token", "b16", "average", "attention-pool"])
def test_reading_and_writing_keeps_every_bit(case, theirs):
    other, args = theirs(case)
    _, state = to_timm(from_timm(other.state_dict(), args, "timm").network)
    assert state.keys() == other.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    "variant", ["r_ti16", *(pytest.param(v, marks=pytest.mark.slow) for v in ("r26_s32", "bit_r50x1"))]
)
def test_written_resnets_have_the_same_logits_in_timm_and_read_back(variant, timm, randomise, rel_diff, tmp_path):
    small = {} if variant.startswith("bit") else {"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64}
    config = replace(network_variant(variant), image_size_px=32, **small)
    ours = written(config, randomise, tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        x = images(ours, torch.float64, count=2)
        assert rel_diff(theirs.double()(x), ours.double()(x)) <= 1e-5
    named = {f"{theirs.pretrained_cfg[layer]}.weight" for layer in ("first_conv", "classifier")}
    assert named <= theirs.state_dict().keys()
    back = read_timm(tmp_path)
    assert back.config == config
    for name, value in ours.float().state_dict().items():
        # Kernels were divided and multiplied by a factor, with rounding each time.
        rtol = 3e-7 if value.ndim == 4 and "patch_embed" not in name else 0
        torch.testing.assert_close(back.network.state_dict()[name], value, rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", ["sincos-2d", "learned-2d"])
def test_computed_positions_are_written_as_a_table(kind, timm, randomise, rel_diff, tmp_path):
    ours = written(replace(WRITTEN["token"], pos_embed=kind), randomise, tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert rel_diff(theirs(images(ours)), ours(images(ours))) <= 1e-5


def test_image_contract_becomes_data_config_of_timm(timm, randomise, tmp_path):
    evaluation = AugmentConfig(image_size_px=16, eval_resize="shorter_side", eval_resize_px=20)
    contract = ImageContract(decode=DecodePolicy(), evaluation=evaluation, low=0.0, high=1.0)
    written(WRITTEN["gap"], randomise, tmp_path, contract=contract)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    data = timm.data.resolve_model_data_config(theirs)
    assert (data["mean"], data["std"]) == ([0.0] * 3, [1.0] * 3)
    assert (tuple(data["input_size"]), data["interpolation"], data["crop_pct"]) == ((3, 16, 16), "bilinear", 0.8)
    written(WRITTEN["gap"], randomise, tmp_path)
    data = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}"))
    assert (data["mean"], data["std"], data["crop_mode"]) == ([0.5] * 3, [0.5] * 3, "squash")


def test_folder_written_by_timm_is_read(timm, randomise, rel_diff, tmp_path):
    theirs = randomise(timm.create_model("vit_base_patch16_gap_224", img_size=32, depth=1, num_classes=3, patch_size=8))
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        ours = read_timm(place)
        assert ours.config == ViTConfig(
            image_size_px=32, patch_size_px=8, depth=1, num_heads=16, pool="gap", gelu="erf"
        )
        with torch.no_grad():
            assert rel_diff(ours.network(images(ours.network)), theirs(images(ours.network))) <= 1e-5
        assert ours.report.adapted == []


@pytest.mark.long
def test_every_architecture_of_timm_is_read_exactly_or_refused(timm):
    """Built on the meta device. Settings that no entry shows (heads, epsilon, GELU, pool) equal timm's for every name."""
    kinds = ("vit", "deit", "flexivit", "eva", "beit", "test_vit", "resnetv2", "aimv2", "siglip", "naflexvit", "samvit")
    names = [name for name in timm.list_models() if name.startswith(kinds)]
    read = 0
    for name in names:
        try:
            theirs = timm.create_model(name, device="meta", num_classes=3, **({} if "resnet" in name else {"depth": 1}))
        except Exception:  # some cannot be built on the meta device, or have no depth
            continue
        try:
            ours = from_timm(theirs.state_dict(), {"architecture": name}, name).config
        except ConversionError:
            continue
        read += 1
        if isinstance(ours, BiTConfig):
            assert name.endswith("_bit")
            continue
        block = theirs.blocks[0]
        assert type(block).__name__ == "Block", name
        assert (ours.num_heads, ours.norm_eps) == (block.attn.num_heads, block.norm1.eps), name
        assert ours.gelu == {"GELU": "erf", "GELUTanh": "tanh"}[type(block.mlp.act).__name__], name
        assert {"gap": "avg"}.get(ours.pool, ours.pool) == theirs.global_pool, name
        assert isinstance(theirs.fc_norm, torch.nn.Identity), name
        assert not theirs.pool_include_prefix, name
    assert len(names) > 300
    assert read > 60


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ti16", "b8", "h14", "g14", "G14", "so400m14", "r50_b16", "r50_l32", "bit_r152x4"])
def test_timm_builds_networks_from_written_names_and_arguments(variant, timm):
    args, state = to_timm(meta_network(network_variant(variant), 3).to_empty(device="meta"))
    theirs = timm.create_model(**args, device="meta").state_dict()
    assert {name: value.shape for name, value in state.items()} == {name: v.shape for name, v in theirs.items()}


def state_of(timm, **args):
    return timm.create_model("vit_base_patch16_224", **TINY | args).state_dict()


@pytest.mark.parametrize(
    ("build", "args", "message"),
    [
        ({"init_values": 1e-5}, {}, r"the network does not use: blocks\.0\.ls1\.gamma, blocks\.0\.ls2\.gamma"),
        ({"reg_tokens": 2}, {}, r"pos_embed|reg_token"),
        ({"qk_norm": True}, {}, r"blocks\.0\.attn\.k_norm\.bias"),
        ({"pre_norm": True}, {}, r"norm_pre\.bias.*patch_embed\.bias"),
        ({"class_token": False, "global_pool": "avg"}, {}, r"not supported: fc_norm, a norm after the average pool"),
        ({"global_pool": "avg", "fc_norm": False}, {}, r"global_pool='avg' with a class token"),
        ({"global_pool": "map"}, {"global_pool": "map"}, r"global_pool='map' with a class token"),
        (GAP, {"global_pool": "avgmax"}, r"global_pool='avgmax' without a class token"),
        ({}, {"act_layer": "quick_gelu"}, r"act_layer='quick_gelu'; supported: gelu and gelu_tanh"),
        ({}, {"pool_include_prefix": True, "attn_layer": "diff"}, r"attn_layer='diff', pool_include_prefix=True"),
        ({}, {"norm_layer": "rmsnorm"}, r"norm_layer='rmsnorm'"),
        ({"img_size": (16, 32)}, {}, r"pos_embed has shape \(1, 33, 32\)\. .*only square grids"),
        ({"img_size": (16, 24)}, {"img_size": [16, 24]}, r"images of \[16, 24\] pixels; only squares are supported"),
        ({"num_classes": 0}, {}, r"has no head\. Give class names"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused(timm, build, args, message):
    settings = {k: v for k, v in (TINY | build).items() if k in ("num_heads", "global_pool")}
    with pytest.raises(ConversionError, match=message):
        from_timm(state_of(timm, **build), settings | args, "somewhere")


def test_heads_and_resolution_come_from_architecture_or_arguments(timm):
    state = state_of(timm)
    with pytest.raises(ConversionError, match=r"width 32 at depth 3 is known\. Set num_heads"):
        from_timm(state, {}, "somewhere")
    named = from_timm(state, {"architecture": "vit_giant_patch14_224.augreg", "embed_dim": 32}, "x", num_classes=5)
    assert named.network.config.num_heads == 16
    ours = from_timm(state, {"num_heads": 8}, "somewhere")
    assert (ours.network.config.num_heads, ours.config.image_size_px) == (8, 16)
    assert ours.report.adapted == ["no architecture is named: assumed timm's default GELU, epsilons and heads"]
    base = {"architecture": "vit_base_patch16_224", "num_heads": 4}
    assert from_timm(state, base | {"input_size": [3, 18, 18]}, "x").config.image_size_px == 18
    other = from_timm(state, base | {"img_size": 224, "drop_path_rate": 0.1, "pos_drop_rate": 0.2}, "x")
    assert other.config.image_size_px == 16
    assert [note.split(":")[0] for note in other.report.adapted] == [
        "left out, because it differs or is absent here (in training only)",
        "dropout_rate",
        "image_size_px",
    ]


def test_missing_head_becomes_zeros_and_bfloat16_becomes_float32(timm):
    state = {name: value.bfloat16() for name, value in state_of(timm, num_classes=0).items()}
    ours = from_timm(state, {"architecture": "vit_base_patch16_224", "num_heads": 4}, "x", num_classes=9)
    assert torch.count_nonzero(ours.network.head.weight) == 0
    assert set(ours.report.missing) == {"head.weight", "head.bias"}
    assert ours.report.adapted == ["bfloat16 became float32"]
    assert {value.dtype for value in ours.network.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(WRITTEN["token"], pos_embed="relative"), "relative position embeddings"),
        (replace(WRITTEN["token"], pos_embed_at="every-layer"), "every-layer position embeddings"),
        (replace(WRITTEN["token"], pre_logits=True), "pre_logits in timm"),
        (replace(WRITTEN["token"], norm_eps=1e-12), "norm_eps=1e-12 in timm"),
        (HybridConfig(image_size_px=32, stages=(1, 1), embed_dim=32, depth=1, num_heads=2, mlp_dim=32), "blocks 1-1"),
        (HybridConfig(image_size_px=40, stages=(), patch_size=4, embed_dim=32, depth=1, num_heads=2, mlp_dim=32), "must divide"),
        (BiTConfig(stages=(1, 1)), "which has bit_r50x1"),
    ],
)  # fmt: skip
def test_unsupported_networks_are_not_written(config, message, tmp_path):
    with pytest.raises(ValueError, match=rf"not supported: .*{message}"):
        write_timm(build_network(config, 2), tmp_path / "out", ["a", "b"])
    assert not (tmp_path / "out").exists()


def test_pickles_and_unrelated_folders_are_refused(tmp_path):
    for name in ("pytorch_model.bin", "weights.pth", "a.ckpt", "a.pkl", "a.pt"):
        (tmp_path / name).write_bytes(b"anything")
        for place in (tmp_path, tmp_path / name):
            with pytest.raises(ConversionError, match=r"is a pickle.*save_file.*torch\.load.*weights_only=True"):
                read_timm(place)
        (tmp_path / name).unlink()
    with pytest.raises(ConversionError, match=r"has no model\.safetensors\. It contains nothing"):
        read_timm(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + b"\0" * 30)
    with pytest.raises(ConversionError, match="not a valid safetensors file"):
        read_timm(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"neither patch_embed\.proj\.weight nor .* Its first entries: x"):
        read_timm(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConversionError, match="was written by transformers"):
        read_timm(tmp_path)


def test_tables_name_each_entry_once():
    for table in (TRANSFORMER, HYBRID, STEM_ONLY, BIT):
        assert len(set(table.values())) == len(table)
        assert all(ours.count("#") == theirs.count("#") for ours, theirs in table.items())
