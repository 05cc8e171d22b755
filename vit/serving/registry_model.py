"""What MLflow's registry keeps of a published model: a pyfunc that loads the published folder itself. Imports no torch.

MLflow holds a few small files and no weights: `pointer.json` says where the published folder lies and which digest it has.
`mlflow.pyfunc.load_model("models:/birds@candidate")` and `mlflow models serve` read it from there, with the credentials of
their own environment or of the stack of the current folder, and refuse another digest. The package vitline has to be
installed where they run.
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

POINTER = "pointer.json"
LOAD_IN_THREE_LINES = (
    "from vit.published import load_model",
    "model = load_model({uri!r})",
    "print(model.predict(['picture.jpg']))",
)
INPUTS = [{"type": "binary", "name": "image", "required": True}]
OUTPUTS = [
    {"type": "array", "items": {"type": "string"}, "name": "classes", "required": True},
    {"type": "array", "items": {"type": "double"}, "name": "probabilities", "required": True},
]


def registry_files(uri: str, config: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of an MLflow model by name, from `config.json` and `image_contract.json` of the published folder at `uri`.

    Rows with `image` (bytes of an image file, base64 in JSON) go in; a row each with `classes`, the likeliest five, best
    first, and their `probabilities` comes out.
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
    """The MLmodel file; MLflow reads it as YAML, of which JSON is a part."""
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
    """What pip has to install beside vitline, which is on no index, where the model is loaded."""
    base = [line for line in importlib.metadata.requires("vitline") or [] if "extra ==" not in line]
    return [*base, "mlflow", "s3fs", "torch"]


def grey_picture(size_px: int) -> str:
    """A PNG in base64, for the input example."""
    file = io.BytesIO()
    Image.new("RGB", (size_px, size_px), (128, 128, 128)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class RegistryModel:
    """What MLflow calls."""

    def __init__(self, pointer: Mapping[str, Any]) -> None:
        from vit.serving.mlflow_model import load_served  # torch is needed from here on

        self._answer = load_served(pointer["uri"], pointer["digest"])

    def predict(self, model_input: Any, params: Any = None) -> list[dict[str, Any]]:
        """An answer for every row: `classes` and `probabilities`. Raises ValueError for what is no image."""
        return self._answer(list(model_input["image"]))


def _load_pyfunc(path: str) -> RegistryModel:
    """The name and the argument are MLflow's. Raises CheckpointError where the published folder is gone, and ValueError
    where another model stands there by now."""
    return RegistryModel(json.loads(Path(path).read_text()))
