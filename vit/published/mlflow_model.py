"""Saves a published model as an MLflow model without a pickle. `mlflow models serve` returns classes for images.

from vitline import load_model
from vitline.vit.published.mlflow_model import save_mlflow_model
save_mlflow_model(load_model("models/emoji-vit/0a1b2c3d4e5f"), "emoji-vit-mlflow")
"""

import base64
import binascii
import importlib.metadata
import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vitline.infra.storage import json_bytes, open_store
from vitline.vit.published.model_record import (
    CARD,
    CLASSES,
    CONFIG,
    CONTRACT,
    WEIGHTS,
    Prediction,
    file_key,
    published_record,
)
from vitline.vit.published.models import PublishedModel, load_model

TOP = 5
# MLflow copies this file into the folder and runs it where the model is loaded.
CODE = '''"""Serves the published model in this folder. Needs the packages vitline and torch."""

from vitline.infra.mlflow.tracking import serve_images
from vitline.vit.published.mlflow_model import load_served

serve_images(load_served)
'''
# Needed in addition to the base install: torch, and the packages of MLflow's model server.
_TORCH, _BESIDE = "torch", ("mlflow", "pandas")


def save_mlflow_model(model: PublishedModel, directory: str | Path) -> Path:
    """Writes an MLflow model folder with a copy of the published model, and returns its path.

    Input: rows with `image`, the bytes of an image file, also in base64. Output per row: `classes`, the five most probable,
    and their `probabilities`. The package vitline must be installed where the model is loaded; its requirements cannot
    list vitline, which is on no package index, so README.md in the folder says so. Raises ValueError if `directory` is
    not empty or the model was replaced since it was loaded, WeightsError if it is damaged, and RuntimeError if MLflow
    is not installed.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty. Choose a new or empty folder for the MLflow model.")
    try:
        from vitline.infra.mlflow.tracking import save_served_model

        needed = requirements()
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        raise RuntimeError(f"MLflow models need the package mlflow: {error}. pip install 'vitline[local]'.") from error
    store = open_store(model.uri)
    with tempfile.TemporaryDirectory(prefix="vitline-served-") as folder:
        copy = Path(folder, "published")
        copy.mkdir()
        record = published_record(store)
        for name in (WEIGHTS, CLASSES, CONTRACT, CARD):
            (copy / name).write_bytes(store.read(file_key(record, name)))
        record.pop("weights", None)  # here all lie beside config.json, where other tools look for the weights
        (copy / CONFIG).write_bytes(json_bytes(record))
        if (found := load_model(str(copy)).digest) != model.digest:
            raise ValueError(
                f"{model.uri} has digest {found[:12]}, but {model.digest[:12]} was loaded. Load the model again."
            )
        about = {"vitline_model_digest": model.digest, "vitline_version": importlib.metadata.version("vitline")}
        save_served_model(directory, CODE, {"model": str(copy)}, _example(model), needed, about)
    (directory / "README.md").write_text(_readme(model), encoding="utf-8")
    return directory


def load_served(uri: str, digest: str | None = None) -> Callable[[list[Any]], list[Prediction]]:
    """A function from images, as bytes or base64, to their most probable classes. The code of an MLflow model calls it.

    Raises ValueError if the published model does not have `digest`.
    """
    model = load_model(uri)
    if digest not in (None, model.digest):
        raise ValueError(
            f"{uri} has digest {model.digest[:12]}, but this version of the registry is for {str(digest)[:12]}. The "
            "published model was replaced: `vitline model ls` lists the published models."
        )

    def answer(images: Sequence[bytes | str]) -> list[Prediction]:
        best = model.predict([image_bytes(image) for image in images], top=TOP)
        return [{"classes": [name for name, _ in row], "probabilities": [p for _, p in row]} for row in best]

    return answer


def image_bytes(image: Any) -> bytes:
    """The bytes of the image in a request. Raises ValueError for values that are neither bytes nor base64."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str):
        raise ValueError(f"an image must be bytes or base64 text, not {type(image).__name__}.")
    try:
        return base64.b64decode(image, validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"an image is not valid base64: {error}. Send the bytes of the file, base64-encoded, in column `image`."
        ) from error


def requirements() -> list[str]:
    """The packages to install where a served model is loaded, except vitline, with the versions installed here."""
    base = [line for line in importlib.metadata.requires("vitline") or [] if "extra ==" not in line]
    # A local version such as 2.13.0+cpu is on no package index.
    pinned = {name: importlib.metadata.version(name).split("+")[0] for name in (_TORCH, *_BESIDE)}
    return [*base, *(f"{name}=={version}" for name, version in pinned.items())]


def _example(model: PublishedModel) -> bytes:
    """A grey image of the model's input size, as PNG."""
    size = model.network.config.image_size_px
    file = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()


def _readme(model: PublishedModel) -> str:
    version = importlib.metadata.version("vitline")
    return f"""# An MLflow model of vitline

{model.network.config.summary}; {len(model.classes):,} classes. Digest `{model.digest}`.
`artifacts/published` is the published model: weights, config, image contract, classes, card.

Install the package **vitline** (this folder was made with {version}) where the model is loaded or served. It is on no
package index, so `requirements.txt` lists only its dependencies, including torch.

```bash
mlflow models serve -m . --env-manager local -p 5005
curl -H 'Content-Type: application/json' 127.0.0.1:5005/invocations \\
  -d "{{\\"dataframe_records\\": [{{\\"image\\": \\"$(base64 -w0 picture.png)\\"}}]}}"
```
The response has, for each image, `classes` (the five most probable, best first) and their `probabilities`.
"""
