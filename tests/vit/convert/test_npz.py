"""Official files, compared with their authors' networks by golden float64 logits (`tests/golden/make_model_vectors.py`)."""

import json
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from vitline.vit.convert.npz import BIT, TRANSFORMER, read_npz
from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.convert.tables import names_of, numbers_of
from vitline.vit.models.pos_embed import resample_pos_embed

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
sys.path.insert(0, str(GOLDEN))
from random_weights import random_images, random_weights  # noqa: E402

CASES = json.loads((GOLDEN / "model_vectors.json").read_text())["cases"]


def entries_of(case):
    return random_weights(CASES[case]["shapes"], seed=2)


def written(folder, entries):
    np.savez(folder / "model.npz", **entries)
    return str(folder / "model.npz")


def images_of(case):
    images = random_images(CASES[case]["num_images"], CASES[case]["size_px"], seed=1)
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def converted(case, folder, **asked):
    if "sincos" in case:
        asked = {"image_size_px": CASES[case]["size_px"]} | asked
    return read_npz(written(folder, entries_of(case)), **asked)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_original_networks(case, tmp_path):
    network, expected = converted(case, tmp_path).network, torch.tensor(CASES[case]["logits"], dtype=torch.float64)
    scale = expected.abs().max()
    assert expected.std() > 0.05
    with torch.inference_mode():
        error32 = (network(images_of(case)).double() - expected).abs().max() / scale
        assert error32 <= (5e-5 if "depth-24" in case else 1e-5)
        if case != "paper-b16":  # float64 is too slow for 86 million weights; the small networks cover it
            error64 = (network.double()(images_of(case).double()) - expected).abs().max() / scale
            assert error64 <= 1e-10


def test_gradients_equal_those_of_the_original_network(tmp_path):
    case = CASES["paper-token"]
    done = converted("paper-token", tmp_path)
    network = done.network.double()
    labels = torch.arange(case["num_images"]) + 1
    torch.nn.functional.cross_entropy(network(images_of("paper-token").double()), labels, reduction="sum").backward()
    parameters = dict(network.named_parameters())
    compared = 0
    for name, entries in done.report.loaded.items():
        names = entries.split(", ")  # query, key and value of one fused matrix
        for entry, found in zip(names, parameters[name].grad.chunk(len(names)), strict=True):
            expected = torch.tensor(case["gradients"][entry], dtype=torch.float64)
            if found.ndim == 2 and entry.endswith("kernel"):
                found = found.T
            if found.ndim == 4:
                found = found.permute(2, 3, 1, 0)
            # A key bias shifts all logits of a query equally, which softmax ignores, so its gradient is rounding noise.
            torch.testing.assert_close(found.reshape(-1)[: len(expected)], expected, rtol=1e-4, atol=1e-10)
            compared += 1
    assert compared == len(case["shapes"]) == 58


def test_report_lists_every_entry(tmp_path):
    done = converted("paper-token", tmp_path)
    named = ", ".join(done.report.loaded.values()).split(", ")
    assert sorted(named) == sorted(CASES["paper-token"]["shapes"])
    assert set(done.report.loaded) == set(done.network.state_dict())
    assert (done.report.adapted, done.report.skipped, done.report.missing) == ([], {}, {})
    assert (done.config.image_size_px, done.config.patch_size_px, done.config.pre_logits) == (32, 8, True)

    done = converted("big-vision-token", tmp_path)
    assert done.report.adapted == ["pos_embed: a zero entry for the class token was added at the front"]
    assert not done.network.pos_embed[:, 0].any()


def test_other_towers_and_optimizer_state_are_skipped_and_reported(tmp_path):
    towers = {"params/txt/Embed_0/embedding": np.ones((3, 4)), "params/t": np.ones(1)}
    done = read_npz(written(tmp_path, entries_of("big-vision-sincos") | towers), image_size_px=40)
    assert sorted(done.report.skipped) == ["params/t", "params/txt/Embed_0/embedding"]
    assert done.report.missing == {"(positions)": "fixed sin-cos embeddings of 5 x 5 patches: the file has none"}

    doubled = {name: array.astype(np.float64) for name, array in entries_of("big-vision-map").items()}
    done = read_npz(written(tmp_path, doubled | {"opt/state/step": np.array(7, np.int32)}))
    assert set(done.report.skipped) == {"opt/state/step"}
    assert done.report.adapted == ["float64 became float32"]


def test_bfloat16_and_inlined_attention_pool_are_read(tmp_path):
    entries = {name.removeprefix("opt/target/"): array for name, array in entries_of("big-vision-map").items()}
    plain = read_npz(written(tmp_path, entries)).network.state_dict()
    old = {name.removeprefix("MAPHead_0/"): array for name, array in entries.items()}
    done = read_npz(written(tmp_path, old))
    assert all(torch.equal(value, plain[name]) for name, value in done.network.state_dict().items())
    assert done.report.adapted == ["the attention pool was at the top level of the file"]

    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16).view("V2") for name, array in entries.items()}
    done = read_npz(written(tmp_path, halves))
    assert "bfloat16 became float32" in done.report.adapted
    for name, value in done.network.state_dict().items():
        assert torch.equal(value.bfloat16().float(), value)
        torch.testing.assert_close(value, plain[name], rtol=2**-7, atol=0)


def test_higher_resolution_resamples_positions_and_is_reported(tmp_path):
    before = converted("paper-token", tmp_path).network
    done = converted("paper-token", tmp_path, image_size_px=48)
    assert torch.equal(done.network.pos_embed, resample_pos_embed(before.pos_embed, 36))
    assert done.report.adapted == ["pos_embed: resampled from 4 x 4 to 6 x 6 patches (bilinear-align-corners)"]
    assert done.config.image_size_px == 48


def test_file_without_head_needs_number_of_classes(tmp_path):
    entries = {name: array for name, array in entries_of("paper-gap").items() if not name.startswith("head/")}
    with pytest.raises(ConversionError, match=r"has no head\. Give class names"):
        read_npz(written(tmp_path, entries))
    done = read_npz(written(tmp_path, entries), num_classes=5)
    assert done.network.head.weight.shape == (5, 48)
    assert not done.network.head.weight.any()
    assert set(done.report.missing) == {"head.weight", "head.bias"}


def changed(**changes):
    entries = entries_of("paper-token")
    for name, array in changes.items():
        name = name.replace("__", "/")
        if array is None:
            del entries[name]
        else:
            entries[name] = array
    return entries


@pytest.mark.parametrize(
    ("entries", "asked", "message"),
    [
        (changed(stray__kernel=np.ones(3)), {}, "entries that the network does not use: stray/kernel"),
        (changed(embedding__bias=np.full(48, np.nan, np.float32)), {}, "embedding/bias has values that are not finite"),
        (changed(Transformer__posembed_input__pos_embedding=None), {}, "has no position embeddings"),
        (changed(Transformer__posembed_input__pos_embedding=np.ones((1, 7, 48))), {}, "pos_embedding has shape (1, 7, 48)"),
        (changed(Transformer__posembed_input__pos_embedding=np.ones(7)), {}, "has shape (7,), expected 3 axes"),
        (changed(head__kernel=np.ones(7)), {}, "head/kernel has shape (7,)"),
        (
            changed(Transformer__encoderblock_1__MultiHeadDotProductAttention_1__key__kernel=np.ones((48, 1, 48))),
            {},
            "key/kernel has shape (48, 1, 48), but .* has (48, 4, 12)",
        ),
        (changed(embedding__bias=None), {}, "parameters without values in the file: patch_embed.bias"),
        (changed(embedding__bias=np.ones(47)), {}, r"embedding/bias gives patch_embed.bias the shape (47,), .* has (48,)"),
        (changed(), {"variant": "b16"}, "is not b16: .*embed_dim: 48 instead of 768"),
        (changed(), {"num_classes": 5}, "has a head of 7 classes, not 5"),
        (changed(), {"image_size_px": 4}, "image_size_px=4 must be at least patch_size_px=8"),
        (changed(embedding__kernel=None), {}, "is not an official .npz checkpoint, or it is incomplete: it has no embedding/kernel"),
        ({"embedding/kernel": np.array([{}], dtype=object)}, {}, "it has pickled entries"),
        (changed(embedding__bias=np.array(["a"])), {}, "embedding/bias has dtype <U1, expected floating-point"),
        ({}, {}, "contains no weights"),
    ],
)  # fmt: skip
def test_unexpected_missing_and_misshapen_entries_are_refused(entries, asked, message, tmp_path):
    with pytest.raises(ConversionError, match=message.replace("(", r"\(").replace(")", r"\)")):
        read_npz(written(tmp_path, entries), **asked)


def test_truncated_and_foreign_files_are_refused(tmp_path):
    path = Path(written(tmp_path, entries_of("paper-gap")))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConversionError, match=r"is not a valid \.npz file"):
        read_npz(str(path))
    (tmp_path / "array.npz").write_bytes(b"\x93NUMPY\x01\x00nothing")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as file:
        file.writestr("archive/data.pkl", b"x")
    for name in ("array.npz", "zip.npz"):
        with pytest.raises(ConversionError, match=f"{name} is no"):
            read_npz(f"{tmp_path}/{name}")
    with pytest.raises(ConversionError, match=re.escape(f"There is no file {tmp_path}/none.npz")):
        read_npz(f"{tmp_path}/none.npz")


def test_stages_and_units_are_counted_from_1_in_files():
    line, report = "stages.#.#.conv2.weight", ConversionReport(source="x", family="")
    assert names_of("resnet.stages.0.8.conv2.weight", TRANSFORMER) == ["block1/unit9/conv2/kernel"]
    for ours, theirs in {
        "stages.0.8.conv2.weight": "block1/unit09",
        "stages.3.9.conv2.weight": "block4/unit10",
    }.items():
        assert names_of(ours, BIT) == [f"{theirs}/conv2/kernel"]
    assert list(numbers_of(line, BIT, ["block1/unit09/gn1/scale", "head/kernel", "block4/unit10/x"], report)) == [
        (0, 8),
        (3, 9),
    ]


def test_tables_name_each_entry_once():
    for table in (TRANSFORMER, BIT):
        assert len(set(table.values())) == len(table)
        assert all(ours.count("#") == theirs.count("#") for ours, theirs in table.items())
