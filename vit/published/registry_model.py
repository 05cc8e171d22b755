"""The files of a published model in MLflow's registry: a pyfunc that loads the published folder. Imports no torch.

MLflow stores a few small files and no weights. `pointer.json` has the URI and the digest of the published folder.
`mlflow.pyfunc.load_model("models:/birds@candidate")` and `mlflow models serve` load it from there, with the credentials of
their environment or of the stack of the current folder, and refuse another digest. They need the package vitline.
"""

import base64
import importlib.metadata
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from vitline.vit.published.model_record import ModelRecord, Prediction

POINTER = "pointer.json"
LOAD_IN_THREE_LINES = (
    "from vitline import load_model",
    "model = load_model({uri!r})",
    "print(model.predict(['picture.jpg']))",
)
INPUTS = [{"type": "binary", "name": "image", "required": True}]
OUTPUTS = [
    {"type": "array", "items": {"type": "string"}, "name": "classes", "required": True},
    {"type": "array", "items": {"type": "double"}, "name": "probabilities", "required": True},
]


def registry_files(uri: str, config: ModelRecord, contract: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of an MLflow model by name, from `config.json` and `image_contract.json` of the published folder at `uri`.

    Input: rows with `image`, the bytes of an image file (base64 in JSON). Output per row: `classes`, the five most probable
    ones, and their `probabilities`.
    """
    pointer = {
        "schema_version": 1,
        "uri": uri,
        "digest": config["digest"],
        "image_contract": contract,
        "num_classes": config["num_classes"],
        "load": [line.format(uri=uri) for line in LOAD_IN_THREE_LINES],
    }
    example = {"columns": ["image"], "data": [[grey_picture(config["model"]["image_size_px"])]]}
    files = {
        "MLmodel": description(config["digest"]),
        POINTER: pointer,
        "input_example.json": example,
        "serving_input_example.json": {"dataframe_split": example},
    }
    texts = {name: json.dumps(content, indent=2) for name, content in files.items()}
    texts["requirements.txt"] = "\n".join(requirements())
    return {name: f"{text}\n".encode() for name, text in texts.items()}


def description(digest: str) -> dict[str, Any]:
    """The content of the MLmodel file. MLflow reads it as YAML, and JSON is valid YAML."""
    return {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "data": POINTER,
                "python_version": ".".join(map(str, sys.version_info[:3])),
            }
        },
        "metadata": {"vitline_model_digest": digest, "vitline_version": importlib.metadata.version("vitline")},
        "model_uuid": digest[:32],
        "signature": {"inputs": json.dumps(INPUTS), "outputs": json.dumps(OUTPUTS), "params": None},
        "saved_input_example_info": {
            "artifact_path": "input_example.json",
            "pandas_orient": "split",
            "serving_input_path": "serving_input_example.json",
            "type": "dataframe",
        },
    }


def requirements() -> list[str]:
    """The packages to install where the model is loaded, except vitline itself, which is on no package index."""
    base = [line for line in importlib.metadata.requires("vitline") or [] if "extra ==" not in line]
    return [*base, "mlflow", "s3fs", "torch"]


def grey_picture(size_px: int) -> str:
    """A grey PNG in base64, for the input example."""
    file = io.BytesIO()
    Image.new("RGB", (size_px, size_px), (128, 128, 128)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class RegistryModel:
    """The model object that MLflow calls."""

    def __init__(self, pointer: Mapping[str, Any]) -> None:
        from vitline.vit.published.mlflow_model import load_served  # imports torch

        self._answer = load_served(pointer["uri"], pointer["digest"])

    def predict(self, model_input: Any, params: Any = None) -> list[Prediction]:
        """`classes` and `probabilities` for every row. Raises ValueError for a row that is no image."""
        return self._answer(list(model_input["image"]))


def _load_pyfunc(path: str) -> RegistryModel:
    """MLflow calls this function by its name. Raises WeightsError if the published folder is missing, and ValueError if it
    has another model."""
    return RegistryModel(json.loads(Path(path).read_text()))
