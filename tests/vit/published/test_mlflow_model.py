"""A published model that is saved as an MLflow model makes the same predictions."""

import base64
from pathlib import Path

import pytest
import torch

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.storage import open_store
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.mlflow_model import image_bytes, requirements, save_mlflow_model
from vitline.vit.published.models import load_model, publish

from ...pictures import noise

CLASSES = ["cat", "dog", "Ente", "鸟", "fish", "cow"]


@pytest.fixture
def model(root):
    torch.manual_seed(0)
    config = ViTConfig(image_size_px=16, patch_size_px=8, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    network = build_network(config, len(CLASSES))
    torch.nn.init.normal_(network.head.weight)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=16))
    return load_model(publish(open_store(root), "birds", "1", network, contract, CLASSES, {"run_key": "birds-0a"}))


@pytest.fixture
def folder(model, tmp_path) -> Path:
    return save_mlflow_model(model, tmp_path / "served")


def expected(model, images):
    return [
        {"classes": [name for name, _ in row], "probabilities": [p for _, p in row]} for row in model.predict(images)
    ]


def test_mlflow_loads_the_model_and_predicts_the_same(model, folder):
    import pandas
    from mlflow.pyfunc import load_model as load

    served, images = load(str(folder)), [noise(0, (30, 20)), noise(1, (30, 20))]
    answers = expected(model, images)
    assert len(answers[0]["classes"]) == 5
    assert answers[0] != answers[1]
    as_text = [base64.b64encode(image).decode() for image in images]
    assert served.predict(pandas.DataFrame({"image": images})) == answers
    assert served.predict(pandas.DataFrame({"image": as_text})) == answers
    assert served.predict([{"image": image} for image in images]) == answers
    assert served.metadata.metadata["vitline_model_digest"] == model.digest
    example = served.input_example
    assert len(served.predict(example)) == 1
    assert [column.name for column in served.metadata.get_output_schema()] == ["classes", "probabilities"]


def test_folder_has_no_pickle_and_lists_its_requirements(model, folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {f"artifacts/published/{name}" for name in ("model.safetensors", "config.json", "classes.json")} <= files
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pth", ".pt", ".bin"))]
    assert load_model(str(folder / "artifacts" / "published")).digest == model.digest
    needed = (folder / "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.split('+')[0]}" in needed
    assert {"safetensors", "pyarrow", "jaxtyping"} <= {line.split("=")[0].split(">")[0] for line in needed}
    assert not any(line.startswith(("vitline", "ray", "prefect")) for line in requirements())
    assert "**vitline**" in (folder / "README.md").read_text()


def test_non_empty_folder_and_invalid_images_are_refused(model, folder):
    with pytest.raises(ValueError, match="served is not empty"):
        save_mlflow_model(model, folder)
    with pytest.raises(ValueError, match="an image is not valid base64"):
        image_bytes("not base64!")
    with pytest.raises(ValueError, match="must be bytes or base64 text, not int"):
        image_bytes(3)
