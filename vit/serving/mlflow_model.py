"""A published model as an MLflow model: `mlflow models serve` answers with classes for images, without a pickle.

from vit.published import load_model
from vit.serving.mlflow_model import save_mlflow_model
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

from infra.storage import open_store
from vit.published import PublishedModel, load_model

FILES = ("model.safetensors", "image_contract.json", "classes.json", "card.md", "config.json")
TOP = 5
# MLflow copies this into the folder and runs it where the model is loaded.
CODE = '''"""The model of this folder, by the published folder beside it. Needs the package vitline, and torch."""

from infra.mlflow.tracking import serve_images
from vit.serving.mlflow_model import load_served

serve_images(load_served)
'''
# Beside the base install: torch, and what MLflow's model server needs.
_TORCH, _BESIDE = "torch", ("mlflow", "pandas")


def save_mlflow_model(model: PublishedModel, directory: str | Path) -> Path:
    """An MLflow model folder that holds a copy of the published one; returns its path.

    Input: rows with `image`, bytes of an image file or base64 of them. Output, a row each: `classes`, the five most likely,
    and `probabilities`. The package vitline has to be installed where it is loaded, at no version that its requirements
    could name; README.md in the folder says so. Raises ValueError where `directory` is not empty, CheckpointError where the
    published folder was changed since it was loaded, and RuntimeError where MLflow is not installed.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; an MLflow model wants a folder of its own.")
    try:
        from infra.mlflow.tracking import save_served_model

        needed = requirements()
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        raise RuntimeError(f"MLflow models need the package mlflow: {error}. pip install 'vitline[local]'.") from error
    store = open_store(model.uri)
    with tempfile.TemporaryDirectory(prefix="vitline-served-") as folder:
        copy = Path(folder, "published")
        copy.mkdir()
        for name in FILES:
            (copy / name).write_bytes(store.read(name))
        if (found := load_model(str(copy)).digest) != model.digest:
            raise ValueError(f"{model.uri} holds {found[:12]} by now, not {model.digest[:12]}; load the model again.")
        about = {"vitline_model_digest": model.digest, "vitline_version": importlib.metadata.version("vitline")}
        save_served_model(directory, CODE, {"model": str(copy)}, _example(model), needed, about)
    (directory / "README.md").write_text(_readme(model), encoding="utf-8")
    return directory


def load_served(uri: str, digest: str | None = None) -> Callable[[list[Any]], list[dict[str, Any]]]:
    """What answers requests: images, as bytes or base64, to their likeliest classes. For the code of an MLflow model.

    Raises ValueError where the published folder holds another model than that of `digest`.
    """
    model = load_model(uri)
    if digest not in (None, model.digest):
        raise ValueError(
            f"{uri} holds the model {model.digest[:12]} by now, not {str(digest)[:12]}, which this version of the registry "
            "was made for. `vitline model ls` lists what there is."
        )

    def answer(images: Sequence[bytes | str]) -> list[dict[str, Any]]:
        best = model.predict([image_bytes(image) for image in images], top=TOP)
        return [{"classes": [name for name, _ in row], "probabilities": [p for _, p in row]} for row in best]

    return answer


def image_bytes(image: Any) -> bytes:
    """The bytes that a request means. Raises ValueError for what is neither bytes nor base64."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str):
        raise ValueError(f"an image is bytes or base64 text, not {type(image).__name__}.")
    try:
        return base64.b64decode(image, validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"an image is no base64: {error}. Send the file's bytes, base64-encoded, in column `image`."
        ) from error


def requirements() -> list[str]:
    """What pip has to install where a served model is loaded, vitline itself excepted; torch as it is here."""
    base = [line for line in importlib.metadata.requires("vitline") or [] if "extra ==" not in line]
    # A local version, as in 2.13.0+cpu, is on no index.
    pinned = {name: importlib.metadata.version(name).split("+")[0] for name in (_TORCH, *_BESIDE)}
    return [*base, *(f"{name}=={version}" for name, version in pinned.items())]


def _example(model: PublishedModel) -> bytes:
    """A grey picture of the model's size, as PNG."""
    size = model.network.config.image_size_px
    file = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()


def _readme(model: PublishedModel) -> str:
    version = importlib.metadata.version("vitline")
    return f"""# An MLflow model of vitline

{model.network.config.summary}; {len(model.classes):,} classes. Digest `{model.digest}`.
`artifacts/published` is the published folder: weights, config, image contract, classes, card.

The package **vitline** (made with {version}) has to be installed where this is loaded or served; it is on no index that
`requirements.txt` could name. `requirements.txt` lists what it needs beside itself, and torch.

```bash
mlflow models serve -m . --env-manager local -p 5005
curl -H 'Content-Type: application/json' 127.0.0.1:5005/invocations \\
  -d "{{\\"dataframe_records\\": [{{\\"image\\": \\"$(base64 -w0 picture.png)\\"}}]}}"
```
The answer has, for each image, `classes` (the likeliest five, best first) and their `probabilities`.
"""
