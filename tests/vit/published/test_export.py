"""Exported programs compute the logits of the network for any batch size; one that does not is refused and deleted."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from vitline.data_prep.decode import DecodePolicy
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.published import export
from vitline.vit.published.export import export_onnx, export_torch
from vitline.vit.published.models import PublishedModel

TINY = {"image_size_px": 16, "patch_size_px": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
NETWORKS = {
    "token": ViTConfig(**TINY),
    "gap-2d": ViTConfig(**TINY, pool="gap", pos_embed="learned-2d"),
    "map-sincos": ViTConfig(**TINY, pool="map", pos_embed="sincos-2d", pre_logits=True),
    "relative": ViTConfig(**TINY, pos_embed="relative"),
    "hybrid": HybridConfig(image_size_px=32, stages=(1,), embed_dim=32, depth=1, num_heads=2, mlp_dim=64),
    "bit": BiTConfig(image_size_px=32, stages=(1, 1)),
}

# An export takes seconds, whatever the size of the network.
CASES = [pytest.param(c, marks=pytest.mark.slow if c in ("map-sincos", "relative") else ()) for c in NETWORKS]


def published(case: str) -> PublishedModel:
    torch.manual_seed(0)
    network = build_network(NETWORKS[case], 4).eval()
    for name, value in network.named_parameters():
        if name.startswith("head") or "pos_embed" in name or "token" in name:
            torch.nn.init.normal_(value)
    contract = ImageContract(
        decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=network.config.image_size_px)
    )
    return PublishedModel("models/birds/1", "0a1b2c", network, contract, ("cat", "dog", "Ente", "鸟"), {})


def images(model: PublishedModel, count: int) -> torch.Tensor:
    size = model.network.config.image_size_px
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7 + count))


def assert_equal(loaded, model):
    for count in (1, 3):
        with torch.no_grad():
            expected = model.network(images(model, count))
        assert expected.abs().max() > 0.5
        assert (loaded(images(model, count)) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_torch_program_equals_the_network_for_any_batch_size(case, tmp_path):
    model = published(case)
    path = export_torch(model, tmp_path / "m.pt2")
    assert_equal(torch.export.load(path).module(), model)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_onnx_model_equals_the_network_for_any_batch_size(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = published(case)
    session = onnxruntime.InferenceSession(str(export_onnx(model, tmp_path / "m.onnx")))
    assert [(i.name, i.shape[0]) for i in session.get_inputs()] == [("image", "batch")]
    assert [o.name for o in session.get_outputs()] == ["logits"]
    assert_equal(lambda x: torch.from_numpy(session.run(None, {"image": x.numpy()})[0]), model)


def test_export_writes_classes_and_image_contract_to_a_json_file(tmp_path):
    model = published("token")
    export_torch(model, tmp_path / "m.pt2")
    about = json.loads((tmp_path / "m.pt2.json").read_text(encoding="utf-8"))
    assert (about["digest"], about["classes"]) == ("0a1b2c", ["cat", "dog", "Ente", "鸟"])
    assert ImageContract.model_validate(about["image_contract"]) == model.contract
    assert about["input"] == {"name": "image", "dtype": "float32", "shape": ["batch", 3, 16, 16]}
    assert 0 <= about["largest_difference"] <= 1e-5


def test_program_with_other_logits_is_refused_and_deleted(tmp_path, monkeypatch):
    model = published("gap-2d")
    wrong = SimpleNamespace(module=lambda: lambda x: model.network(x) * 1.0001)
    monkeypatch.setattr(torch.export, "load", lambda path: wrong)
    with pytest.raises(
        RuntimeError, match=r"of models/birds/1 computes logits that differ .* differ by 1\.0e-04.*Nothing was written"
    ):
        export_torch(model, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_zero_padding_of_onnxruntime_before_max_pool_is_detected(tmp_path, monkeypatch):
    """Fails once onnxruntime computes what the file says: then `_keep_zero_padding` can be removed."""
    monkeypatch.setattr(export, "_keep_zero_padding", lambda graph: None)
    with pytest.raises(RuntimeError, match="ONNX of models/birds/1 computes logits that differ"):
        export_onnx(published("bit"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_onnx_export_without_its_packages_names_the_extra(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "onnxscript" else find(name, *rest)
    )
    with pytest.raises(RuntimeError, match=r"needs onnxscript: pip install 'vitline\[export\]'"):
        export_onnx(published("token"), tmp_path / "m.onnx")
