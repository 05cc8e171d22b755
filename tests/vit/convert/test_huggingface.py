"""The ViT of transformers and ours compute the same function; other networks are refused with the reason."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.config import replace
from vitline.vit.convert.folder import read_classes
from vitline.vit.convert.huggingface import CLASSIC, IN_MEMORY, from_huggingface, read_huggingface, write_huggingface
from vitline.vit.convert.report import ConversionError
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, ViTConfig

TINY = {
    "image_size": 18, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 50, "num_labels": 4,
}  # fmt: skip
B16 = {"image_size": 64, "num_hidden_layers": 2, "num_labels": 4}
CASES = {
    "tiny": TINY,
    "b16": B16,
    "tanh": TINY | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "gelu-new": TINY | {"hidden_act": "gelu_new"},
    "no-qkv-bias": TINY | {"qkv_bias": False},
}
CLASSES = ["cat", "dog", "Ente", "鸟"]


@pytest.fixture
def theirs(transformers, randomise):
    """theirs(kind, **settings): a network of transformers with weights far from zero."""

    def make(kind="ViTForImageClassification", **settings):
        return randomise(getattr(transformers, kind)(transformers.ViTConfig(**settings)))

    return make


def images(size, dtype=torch.float32):
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("names", ["in memory", "in a file"])
def test_logits_equal_those_of_transformers(case, names, theirs, rel_diff, tmp_path):
    other = theirs(**CASES[case])
    if names == "in memory":
        ours = from_huggingface(other.state_dict(), other.config.to_dict(), "transformers")
        entries = set(other.state_dict())
    else:
        other.save_pretrained(tmp_path)
        ours = read_huggingface(tmp_path)
        entries = set(load_file(tmp_path / "model.safetensors"))
        assert "vit.encoder.layer.0.attention.attention.query.weight" in entries
    assert set(", ".join(ours.report.loaded.values()).split(", ")) == entries
    assert (ours.report.adapted, ours.report.skipped, ours.report.missing) == ([], {}, {})
    with torch.no_grad():
        x = images(other.config.image_size)
        logits = other(x).logits
        assert rel_diff(ours.network(x), logits) <= 1e-5
        other.set_attn_implementation("sdpa")
        assert rel_diff(ours.network.double()(x.double()), other.double()(x.double()).logits) <= 1e-10
    assert logits.abs().max() > 0.5
    assert logits.std(dim=0).max() > 0.05, "all images have the same logits: the comparison means nothing"


def test_gradients_equal_those_of_transformers(theirs, rel_diff):
    other = theirs(**TINY)
    ours = from_huggingface(other.state_dict(), other.config.to_dict(), "transformers")
    x, labels = images(18), torch.tensor([0, 2, 1])
    torch.nn.functional.cross_entropy(ours.network(x), labels).backward()
    torch.nn.functional.cross_entropy(other(x).logits, labels).backward()
    gradients = {name: value.grad for name, value in other.named_parameters()}
    for name, value in ours.network.named_parameters():
        match = torch.cat([gradients[entry] for entry in ours.report.loaded[name].split(", ")])
        assert rel_diff(value.grad, match) <= 1e-4, name


WRITTEN = {
    "tiny": ViTConfig(image_size_px=18, patch_size_px=4, embed_dim=32, depth=2, num_heads=4, mlp_dim=50),
    "b16": ViTConfig(image_size_px=32, patch_size_px=16, depth=1, gelu="erf", norm_eps=1e-12),
    "no-qkv-bias": ViTConfig(
        image_size_px=16, patch_size_px=8, embed_dim=32, depth=2, num_heads=2, mlp_dim=64, qkv_bias=False
    ),
}
COMPUTED = {
    kind: replace(WRITTEN["tiny"], pos_embed=kind, dropout_rate=0.1, stochastic_depth_rate=0.1)
    for kind in ("none", "sincos-2d", "learned-2d")
}


@pytest.mark.parametrize("case", [*WRITTEN, *COMPUTED])
def test_written_folder_has_the_same_logits_in_transformers_and_reads_back(
    case, transformers, randomise, rel_diff, tmp_path
):
    ours = randomise(build_network((WRITTEN | COMPUTED)[case], 4))
    write_huggingface(ours, tmp_path, CLASSES)
    other, about = transformers.ViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about.values()), about
    with torch.no_grad():
        x = images(ours.config.image_size_px)
        assert rel_diff(other(x).logits, ours(x)) <= 1e-5
    assert [other.config.id2label[i] for i in range(4)] == CLASSES
    assert read_classes(tmp_path) == tuple(CLASSES)
    back = read_huggingface(tmp_path)
    if case in WRITTEN:
        assert back.config == WRITTEN[case]
        for name, value in ours.state_dict().items():
            assert torch.equal(back.network.state_dict()[name], value), name


def test_reading_and_writing_keeps_every_bit(theirs, tmp_path):
    theirs(**TINY).save_pretrained(tmp_path / "theirs")
    write_huggingface(read_huggingface(tmp_path / "theirs").network, tmp_path / "ours", CLASSES)
    ours, other = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in ours.items())


def test_pooler_becomes_pre_logits_layer_unless_there_is_a_classifier(theirs, rel_diff, tmp_path):
    other = theirs("ViTModel", **TINY)
    other.save_pretrained(tmp_path)
    ours = read_huggingface(tmp_path, num_classes=9)
    assert ours.network.config.pre_logits
    assert set(ours.report.missing) == {"head.weight", "head.bias"}
    assert ours.report.loaded["pre_logits.weight"] == "pooler.dense.weight"
    with torch.no_grad():
        assert rel_diff(ours.network.features(images(18)), other(images(18)).pooler_output) <= 1e-5
    with pytest.raises(ConversionError, match=r"has no head\. Give class names"):
        read_huggingface(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {f"vit.{name}": value for name, value in state.items()} | {
        "classifier.weight": torch.ones(2, 32), "classifier.bias": torch.zeros(2),
        "vit.embeddings.mask_token": torch.zeros(1, 1, 32),
    }  # fmt: skip
    beside = from_huggingface(state, other.config.to_dict(), "x")
    assert beside.report.skipped == {
        "vit.embeddings.mask_token": "the mask token is used in pre-training only",
        "vit.pooler.dense.weight": "the classifier does not use the pooler",
        "vit.pooler.dense.bias": "the classifier does not use the pooler",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'; supported: gelu, gelu_pytorch_tanh, gelu_new"),
        ({"num_channels": 1}, "num_channels=1; supported: 3"),
        ({"model_type": "deit"}, "model_type='deit'"),
        ({"image_size": [18, 24]}, r"image_size=\[18, 24\]; only squares are supported"),
        ({"image_size": 32}, r"position_embeddings gives pos_embed the shape \(1, 17, 32\), .* has \(1, 65, 32\)"),
        ({"num_attention_heads": 5}, "num_heads=5 must divide embed_dim=32"),
        ({"hidden_size": 64}, r"gives norm.weight the shape \(32,\)"),
    ],
)
def test_unsupported_settings_are_refused(theirs, settings, message):
    other = theirs(**TINY)
    with pytest.raises(ConversionError, match=message):
        from_huggingface(other.state_dict(), other.config.to_dict() | settings, "somewhere")


def test_unused_and_missing_entries_are_named(theirs, tmp_path):
    other = theirs(**TINY)
    state, config = other.state_dict(), other.config.to_dict() | {"hidden_dropout_prob": 0.1}
    gone = "vit.layers.1.attention.k_proj.bias"
    with pytest.raises(
        ConversionError, match=r"not use: vit\.layers\.1\.attention\.q_proj\.bias.*in the file: blocks\.1"
    ):
        from_huggingface({name: value for name, value in state.items() if name != gone}, config, "x")
    with pytest.raises(ConversionError, match=r"the network does not use: vit\.layers\.0\.lambda1"):
        from_huggingface(state | {"vit.layers.0.lambda1": torch.ones(32)}, config, "x")
    with pytest.raises(
        ConversionError, match=r"is not a ViT of transformers, or it is incomplete: it has no .* first entries: a"
    ):
        from_huggingface({"a": torch.ones(1)}, {}, "x")
    (note,) = from_huggingface(state, config, "x").report.adapted
    assert note == "left out, because our networks apply dropout elsewhere (in training only): hidden_dropout_prob=0.1"
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConversionError, match=r"config\.json contains a list, expected a JSON object"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(WRITTEN["tiny"], pool="gap"), "pool=gap in transformers"),
        (replace(WRITTEN["tiny"], pool="map"), "pool=map in transformers"),
        (replace(WRITTEN["tiny"], pre_logits=True), "pre_logits in transformers"),
        (replace(WRITTEN["tiny"], pos_embed="relative"), "relative position embeddings"),
        (replace(WRITTEN["tiny"], pos_embed_at="shared"), "shared position embeddings"),
        (BiTConfig(stages=(1, 1)), "a BiT ResNet: .* in transformers"),
    ],
)
def test_unsupported_networks_are_not_written(config, message, tmp_path):
    with pytest.raises(ValueError, match=f"not supported: {message}"):
        write_huggingface(build_network(config, 2), tmp_path / "out", ["a", "b"])
    assert not (tmp_path / "out").exists()


def test_class_names_must_fit_the_head_and_differ(tmp_path):
    network = build_network(WRITTEN["tiny"], 2)
    with pytest.raises(ValueError, match="3 class names, but the head has 2 classes"):
        write_huggingface(network, tmp_path, ["a", "b", "c"])
    with pytest.raises(ValueError, match="a: more than one class has this name"):
        write_huggingface(network, tmp_path, ["a", "a"])


@pytest.mark.parametrize("cut", [None, 20])
def test_image_processor_of_transformers_follows_image_contract(cut, transformers, tmp_path):
    evaluation = AugmentConfig(image_size_px=18, eval_resize="shorter_side" if cut else "square", eval_resize_px=cut)
    contract = ImageContract(decode=DecodePolicy(), evaluation=evaluation, low=-1.0, high=3.0)
    write_huggingface(build_network(WRITTEN["tiny"], 4), tmp_path, CLASSES, contract)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    white = torch.full((3, 40, 60), 255, dtype=torch.uint8)
    pixels = processor(white, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 18, 18)
    assert pixels.unique().tolist() == pytest.approx([3.0])
    half = torch.cat([torch.zeros(3, 40, 30, dtype=torch.uint8), white[:, :, :30]], dim=2)
    pixels = processor(half, return_tensors="pt")["pixel_values"]
    assert float(pixels.mean()) == pytest.approx(1.0, abs=0.05)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert math.isclose(written["rescale_factor"], 1 / 255)


def test_tables_name_each_entry_once():
    for table in (CLASSIC, IN_MEMORY):
        assert len(set(table.values())) == len(table)
        assert all(ours.count("#") == theirs.count("#") for ours, theirs in table.items())
