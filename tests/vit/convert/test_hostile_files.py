"""Weights that somebody made to exhaust memory or time are refused from their headers, before anything of that size is built."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.config import digest_of
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.manifest import WeightsError
from vitline.vit.convert.folder import MAX_CONFIG_BYTES
from vitline.vit.convert.npz import read_npz
from vitline.vit.convert.report import ConversionError
from vitline.vit.convert.weights import load_weights
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, ViTConfig
from vitline.vit.published.model_record import read_classes, read_contract
from vitline.vit.published.models import load_model, model_digest, publish

TINY = ViTConfig(
    image_size_px=8, patch_size_px=4, embed_dim=8, depth=1, num_heads=2, mlp_dim=8, pool="gap", pos_embed="none"
)
ATTENTION, MLP = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1", "Transformer/encoderblock_0/MlpBlock_3"


def vit_entries(**changes):
    """The entries from which an `.npz` file's sizes are found, and others by their names with `__` for `/`."""
    entries = {
        "embedding/kernel": np.ones((4, 4, 3, 8), np.float32),
        "Transformer/posembed_input/pos_embedding": np.ones((1, 4, 8), np.float32),
        f"{ATTENTION}/query/kernel": np.ones((8, 2, 4), np.float32),
        f"{MLP}/Dense_0/kernel": np.ones((8, 8), np.float32),
        "head/kernel": np.ones((8, 3), np.float32),
    }
    return entries | {name.replace("__", "/"): array for name, array in changes.items()}


def npy(array, shape=None):
    """The bytes of an array, with the shape in its header replaced."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape or array.shape})
    return file.getvalue() + array.astype("<f4").tobytes()


def members(path, entries, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(f"{name}.npy", data if isinstance(data, bytes) else npy(data))
    return str(path)


def huge_header():
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b" " * 2**20


BOMBS = {
    "zeros": ({"embedding/bias": np.zeros(80 * 2**20, np.float32)}, r"unpack to 335,\d{3},\d{3} bytes"),
    "overlong": ({"embedding/bias": npy(np.zeros(8), (10**12,))}, r"embedding/bias .*4,000,000,000,000 bytes.* but has 32"),
    "empty axis": ({"embedding/bias": npy(np.zeros(0), (0, 10**15))}, r"embedding/bias has shape \(0, 1000000000000000\)"),
    "header": ({"embedding/bias": huge_header()}, "is not a valid .npz file"),
    "deep": ({"Transformer/encoderblock_100000000/x": np.ones(1)}, "block 100000000, expected fewer than 1,000"),
    "digits": ({f"Transformer/encoderblock_{'9' * 5000}/x": np.ones(1)}, r"block 999\S*, expected fewer than 1,000"),
    "scanned": ({"Transformer/encoderblock/x": np.ones((2000, 1))}, "2,000 stacked blocks, expected fewer than 1,000"),
    "wide": ({"embedding/kernel": np.ones((1, 1, 1, 2**17))}, "embed_dim=131072, expected at most 65,536"),
    "stages": (
        {"conv_root/kernel": np.ones((1, 1, 1, 64))} | {f"block{i}/unit1/x": np.ones(1) for i in range(1, 41)},
        "40 stages, expected at most 5",
    ),
    "units": ({"conv_root/kernel": np.ones((1, 1, 1, 64)), "block1/unit100000000/x": np.ones(1)}, "block 100000000"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_npz_files_are_refused_from_their_headers(bomb, tmp_path):
    entries, message = BOMBS[bomb]
    with pytest.raises(ConversionError, match=message):
        read_npz(members(tmp_path / "bomb.npz", vit_entries() | entries))


def test_npz_with_another_compression_or_too_many_entries_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="embedding/kernel is compressed by a method that numpy does not use"):
        read_npz(members(tmp_path / "bomb.npz", vit_entries(), zipfile.ZIP_BZIP2))
    many = {str(i): b"" for i in range(20_001)}
    with pytest.raises(ConversionError, match="20,001 entries, expected at most 20,000"):
        read_npz(members(tmp_path / "bomb.npz", many, zipfile.ZIP_STORED))


def test_positions_are_not_resampled_before_the_weights_fit_together(tmp_path):
    wide = vit_entries(
        embedding__kernel=np.ones((1, 1, 3, 2**16)), Transformer__posembed_input__pos_embedding=np.ones((1, 1, 2**16))
    )
    with pytest.raises(ConversionError, match="cannot be converted"):  # 256 x 256 positions would be 17 GB
        read_npz(members(tmp_path / "bomb.npz", wide), image_size_px=256)


def test_optimizer_state_is_not_unpacked(tmp_path, monkeypatch):
    entries = {f"opt/target/{name}": array for name, array in vit_entries().items()} | {"opt/state/m": np.ones(9)}
    read, read_array = [], np.lib.format.read_array
    monkeypatch.setattr(np.lib.format, "read_array", lambda *a, **k: read.append(1) or read_array(*a, **k))
    with pytest.raises(ConversionError, match="parameters without values"):
        read_npz(members(tmp_path / "model.npz", entries))
    assert len(read) == len(vit_entries())


def timm_folder(folder, config, **changes):
    names = {
        "patch_embed.proj.weight": (8, 3, 4, 4), "blocks.0.mlp.fc1.weight": (8, 8), "blocks.0.attn.qkv.weight": (24, 8),
        "head.weight": (3, 8),
    }  # fmt: skip
    state = {name: torch.ones(shape) for name, shape in names.items()} | changes
    save_file(state, folder / "model.safetensors")
    args = {"num_heads": 2, "class_token": False, "global_pool": "avg"}
    (folder / "config.json").write_text(json.dumps({"model_args": args | config.pop("model_args", {})} | config))
    return str(folder)


BAD_TIMM = {
    "deep": ({}, {"blocks.100000000.x": torch.ones(1)}, "block 100000000, expected fewer than 1,000"),
    "image": ({"model_args": {"img_size": 10**9}}, {}, "image_size_px=1000000000, expected at most 8,192"),
    "wide": ({}, {"patch_embed.proj.weight": torch.ones(2**17, 1, 1, 1)}, "embed_dim=131072, expected at most 65,536"),
    "scalar": ({}, {"head.weight": torch.tensor(1.0)}, r"head.weight has shape \(\), expected 2 axes"),
}


@pytest.mark.parametrize("bad", BAD_TIMM)
def test_timm_folders_are_refused_before_the_network_is_built(bad, tmp_path):
    config, changes, message = BAD_TIMM[bad]
    with pytest.raises(ConversionError, match=message):
        load_weights(timm_folder(tmp_path, dict(config), **changes))


def test_bit_of_timm_is_refused_before_it_is_built(tmp_path):
    save_file(
        {"stem.conv.weight": torch.ones(64, 3, 7, 7), "stages.0.blocks.0.x": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}))
    with pytest.raises(ConversionError, match="image_size_px=1000000000, expected at most 8,192"):
        load_weights(str(tmp_path), num_classes=3)


BAD_HUGGINGFACE = {
    "width": ({"hidden_size": 10**18}, {}, "embed_dim=1000000000000000000, expected at most 65,536"),
    "image": ({"image_size": 10**12}, {}, "image_size_px=1000000000000, expected at most 8,192"),
    "deep": ({}, {"vit.encoder.layer.100000000.x": torch.ones(1)}, "block 100000000, expected fewer than 1,000"),
    "scalar": ({}, {"vit.encoder.layer.0.intermediate.dense.weight": torch.tensor(1.0)}, r"shape \(\), expected 2 axes"),
    "kind": ({"hidden_act": ["gelu"]}, {}, "hidden_act=\\['gelu'\\]"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_HUGGINGFACE)
def test_folders_of_transformers_are_refused_before_the_network_is_built(bad, tmp_path):
    config, changes, message = BAD_HUGGINGFACE[bad]
    state = {"vit.encoder.layer.0.intermediate.dense.weight": torch.ones(8, 8), "classifier.weight": torch.ones(3, 8)}
    save_file(state | changes, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"} | sizes | config))
    with pytest.raises(ConversionError, match=message):
        load_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "config.json is nested too deeply"),
        ('{"a": "' + " " * MAX_CONFIG_BYTES + '"}', "config.json has .* bytes, expected at most"),
    ],
    ids=["nested", "large"],
)
def test_config_json_is_refused_before_it_is_parsed(text, message, tmp_path):
    folder = timm_folder(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConversionError, match=message):
        load_weights(folder)


@pytest.mark.parametrize(
    "about", [{"crop_pct": 1e-300}, {"crop_pct": 0}, {"crop_pct": "x"}, {"std": [0, 0, 0]}, {"mean": [1]}]
)
def test_image_preprocessing_that_no_image_survives_is_refused(about, tmp_path):
    from vitline.vit.convert.timm import write_timm

    write_timm(build_network(TINY, 3), tmp_path, ["a", "b", "c"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"] |= {"crop_mode": "center"} | about
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = next(iter(about))
    with pytest.raises(ConversionError, match=f"{name}.*, expected"):
        load_weights(str(tmp_path))


def published(folder, network):
    contract = ImageContract(
        decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=network.config.image_size_px)
    )
    uri = publish(open_store(folder), "net", "1", network, contract, ["a", "b", "c"], {"from": "test"})
    return open_store(uri)


def rewritten(store, change):
    """Changes `config.json`, and its digest too, as somebody who made the folder can."""
    config = store.read_json("config.json")
    change(config)
    classes, contract = read_classes(store, config), read_contract(store, config)
    config["digest"] = model_digest(config, contract, classes)
    assert config["digest"] == digest_of(
        [config["architecture"], config["model"], {p["name"]: p["sha256"] for p in config["tensors"]},
         contract, classes]
    )  # fmt: skip
    store.write_json("config.json", config)


def test_published_model_that_asks_for_more_than_it_holds_is_refused(tmp_path):
    store = published(tmp_path / "deep", build_network(TINY, 3))
    rewritten(store, lambda config: config["model"].update(depth=100_000_000))
    with pytest.raises(WeightsError, match="depth=100000000, expected at most 1,000"):
        load_model(store.uri)

    store = published(tmp_path / "repeated", build_network(TINY, 3))
    rewritten(store, lambda config: config["tensors"].extend(config["tensors"] * 3))
    with pytest.raises(WeightsError, match=r"lists .* bytes of tensors, but the file has"):
        load_model(store.uri)

    def backwards(config):
        piece = config["tensors"][0]
        config["tensors"].extend([*config["tensors"] * 3, piece | {"start": 2**50, "end": 0}])

    store = published(tmp_path / "backwards", build_network(TINY, 3))
    rewritten(store, backwards)
    with pytest.raises(WeightsError, match=r"lists .* bytes of tensors, but the file has"):
        load_model(store.uri)

    store = published(tmp_path / "renamed", build_network(TINY, 3))
    rewritten(store, lambda config: config["tensors"][0].update(name="other"))
    with pytest.raises(WeightsError, match="the tensors do not fit"):
        load_model(store.uri)


@pytest.mark.slow
def test_sizes_within_the_limits_are_built():
    assert build_network(BiTConfig(image_size_px=64, stages=(1, 1, 1, 1, 1)), 2).num_classes == 2
