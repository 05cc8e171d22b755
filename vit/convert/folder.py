"""Reads and writes folders of timm and transformers: `model.safetensors` and `config.json`. Pickles are refused."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from vitline.infra.storage import read_small
from vitline.vit.convert.report import ConversionError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""The 21,843 class names of ImageNet-21k take 2 MB."""
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")


def read_folder(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """(weights, config) of a folder, or of a .safetensors file and the `config.json` beside it. Config is None if absent.

    Raises ConversionError for a file that is missing, damaged or of another format. A pickle is never opened.
    """
    path = Path(path)
    file = path / WEIGHTS if path.is_dir() else path
    if file.suffix in PICKLES:
        raise ConversionError(_about_pickle(file))
    if path.is_dir() and not file.exists():
        found = sorted(each.name for each in path.iterdir())
        if pickles := [name for name in found if name.endswith(PICKLES)]:
            raise ConversionError(_about_pickle(path / pickles[0]))
        raise ConversionError(
            f"{path} has no {WEIGHTS}. It contains {', '.join(found[:6]) or 'nothing'}. "
            "Give a folder that timm or transformers saved with safetensors."
        )
    try:
        state = safetensors.torch.load_file(file)
    except FileNotFoundError as error:
        raise ConversionError(f"There is no file {file}.") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise ConversionError(f"{file} is not a valid safetensors file: {error}. Download it again.") from error
    return state, _read_config(file.parent / CONFIG)


def read_classes(path: str | Path) -> tuple[str, ...] | None:
    """The class names in the `config.json` of a folder, in the order of the head; None if it has none."""
    config = _read_config(Path(path) / CONFIG) or {}
    names = config.get("id2label") or config.get("label_names")
    names = names or (config.get("pretrained_cfg") or {}).get("label_names")
    if isinstance(names, Mapping):
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(map(str, names)) if names else None


def check_class_names(classes: Sequence[str], num_classes: int) -> None:
    """Raises ValueError unless there is one name per class of the head."""
    if len(classes) != num_classes:
        raise ValueError(
            f"Got {len(classes)} class names, but the head has {num_classes} classes. Give one name per class."
        )


def write_folder(directory: str | Path, state: Mapping[str, Tensor], files: Mapping[str, Any]) -> None:
    """Writes `model.safetensors`, then each of `files` as JSON."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.cpu().contiguous() for name, value in state.items()}
    safetensors.torch.save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    for name, tree in files.items():
        (directory / name).write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_config(file: Path) -> dict[str, Any] | None:
    try:
        data = read_small(str(file), MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConversionError(f"{error} Download it again.") from error
    try:
        tree = json.loads(data.decode())
    except RecursionError as error:
        raise ConversionError(f"{file} is nested too deeply. Download it again.") from error
    except ValueError as error:
        raise ConversionError(f"{file} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(tree, dict):
        raise ConversionError(f"{file} contains a {type(tree).__name__}, expected a JSON object. Download it again.")
    return tree


def _about_pickle(file: Path) -> str:
    return (
        f"{file} is a pickle. It could run any code, so it is not opened. If you trust it, convert it: `import torch, "
        f"safetensors.torch as s; s.save_file(torch.load('{file.name}', weights_only=True), '{WEIGHTS}')`."
    )
