"""The functions of `vitline model`: open any weights, run them on arrays and files, write them in other formats."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.flows import console
from vitline.flows.catalog.lists import find_model
from vitline.infra.config import canonical_json
from vitline.infra.settings import expanded
from vitline.infra.storage import is_location, open_store
from vitline.vit.config import Precision
from vitline.vit.convert.weights import UNPUBLISHED, Weights, load_weights
from vitline.vit.cost.throughput import BenchSetup, Speed, measure
from vitline.vit.input.augment import evaluation_pixels
from vitline.vit.models.variants import network_variant
from vitline.vit.models.vit import Transformer
from vitline.vit.pages.figures import MAX_IMAGES, inspect_network
from vitline.vit.pages.page import write_inspection
from vitline.vit.published.models import PublishedModel, file_bytes, publish
from vitline.vit.training.timing.device_peak import peak_flops

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif")
# A laptop measures these in a minute; a GPU measures all variants of the paper.
SMALL_VARIANTS = ("ti16", "s32", "s16", "b32", "r26_s32", "bit_r50x1")
PAPER_VARIANTS = (*SMALL_VARIANTS, "b16", "r50_b16", "l32", "l16", "h14", "bit_r152x2")


def open_weights(
    root: str,
    source: str,
    *,
    variant: str | None = None,
    classes: Sequence[str] | None = None,
    image_size_px: int | None = None,
) -> Weights:
    """The weights of `source`: the name of a published model below `root`, or a file or folder.

    Raises ValueError if there is no such source, if it is another variant, or if there is not one name for each class.
    """
    num_classes = len(classes) if classes else None
    weights = load_weights(
        place_of(root, source), variant=variant, num_classes=num_classes, image_size_px=image_size_px
    )
    if classes is None or tuple(classes) == weights.model.classes:
        return weights
    return replace(weights, model=replace(weights.model, classes=tuple(classes), digest=UNPUBLISHED))


def place_of(root: str, source: str) -> str:
    """The path of a file or folder, or the URI of a published model. A model's name takes precedence over a folder."""
    if source.endswith((".npz", ".safetensors")) or is_location(source):
        return source
    try:
        return find_model(root, source)
    except ValueError:
        if os.path.isdir(source):
            return source
        raise


def published_uri(root: str, source: str) -> str:
    """URI of a published model. Weights of another codebase are published below `root` first, under the name of their file or
    folder. Raises ValueError if `source` is neither."""
    place = place_of(root, source)
    if not place.endswith((".npz", ".safetensors")) and open_store(place).exists("config.json"):
        config = open_store(place).read_json("config.json")
        if "schema_version" in config:
            return open_store(place).uri
    model = load_weights(place).model
    stem = re.sub(
        r"[^a-z0-9._-]+", "-", Path(source.rstrip("/")).name.removesuffix(".npz").removesuffix(".safetensors").lower()
    )
    uri = convert_to(model, "vitline", stem.strip("-._")[:63], root)
    console.say(f"{source} is published as {uri}")
    return uri


def convert_to(model: PublishedModel, to: str, out: str, root: str) -> str:
    """Writes the model in another format and returns its place. Raises ValueError if the format cannot represent it."""
    if to != "vitline":
        out = expanded(out).removeprefix("file://")
        if "://" in out:
            raise ValueError(f"{out}: `--to {to}` writes to the local disk only; give a path, then copy the result.")
    if to == "vitline":
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", out):
            raise ValueError(
                f"{out!r} is not a valid model name: use lower-case letters, digits, '.', '_' and '-', a letter or digit first."
            )
        version = weights_digest(model)[:12]
        models = open_store(f"{root.rstrip('/')}/models")
        return publish(models, out, version, model.network, model.contract, model.classes, model.provenance)
    if to == "timm":
        from vitline.vit.convert.timm import write_timm

        write_timm(model.network, out, model.classes, model.contract)
    elif to == "huggingface":
        from vitline.vit.convert.huggingface import write_huggingface

        write_huggingface(model.network, out, model.classes, model.contract)
    elif to == "mlflow":
        if model.digest == UNPUBLISHED:
            raise ValueError(
                f"{model.uri} is not a published model at this resolution, and MLflow serves only published ones. First run "
                "`vitline model convert ... NAME` without --to, then convert NAME."
            )
        from vitline.vit.published.mlflow_model import save_mlflow_model

        save_mlflow_model(model, out)
    else:
        from vitline.vit.published.export import export_onnx, export_torch

        (export_onnx if to == "onnx" else export_torch)(model, out)
    return out


def weights_digest(model: PublishedModel) -> str:
    """Digest of everything that defines a model; its first digits are the version of a converted model."""
    config = [model.network.config, model.contract, model.classes]
    digest = hashlib.sha256(canonical_json(config).encode())
    for name, value in sorted(model.network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def predict_files(model: PublishedModel, images: Sequence[Path], top: int) -> list[dict[str, Any]]:
    """A row per image and class, best first. An image that cannot be read has a row with its error."""
    rows = list[dict[str, Any]]()
    for path in images:
        try:
            (best,) = model.predict([path], top=top)
        except (ValueError, OSError, MemoryError) as error:
            why = str(error) or "there is not enough memory to decode it"
            console.say(f"error: {path}: {why}")
            rows.append({"image": str(path), "class": None, "probability": None, "error": why})
            continue
        rows += [{"image": str(path), "class": name, "probability": p, "error": None} for name, p in best]
    return rows


def inspect_files(model: PublishedModel, images: Sequence[Path], out: Path, title: str) -> list[str]:
    """Writes the figures of a model, with attention on the images of files and folders; returns the names of the files."""
    pixels = []
    for path in list(_files(images))[:MAX_IMAGES]:
        try:
            pixels.append(
                evaluation_pixels(
                    decode_sandboxed(file_bytes(path, model.contract.decode), model.contract.decode),
                    model.contract.evaluation,
                )
            )
        except (ImageRejected, OSError, MemoryError) as error:
            console.say(f"left out: {path}: {str(error) or 'there is not enough memory to decode it'}")
    if not pixels and isinstance(model.network, Transformer):
        raise ValueError("Attention is shown on images, but none was given: use `--images FILE` or `--images FOLDER`.")
    side = model.network.config.image_size_px
    stacked = np.stack(pixels) if pixels else np.zeros((0, side, side, 3), np.uint8)
    inspection = inspect_network(model.network, model.normalised(stacked))
    return write_inspection(open_store(str(out)), inspection, stacked, title)


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            yield from (p for p in sorted(place.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES)
        else:
            yield place


def bench_rows(
    variants: Sequence[str] | None,
    sizes_px: Sequence[int],
    modes: tuple[str, ...],
    precision: Precision,
    batch_size: int | None,
    steps: int,
    compiled: bool,
) -> tuple[list[Speed], str]:
    """A row for every variant, resolution and mode; and a line about the peak of the device and its source."""
    names = variants or (PAPER_VARIANTS if torch.cuda.is_available() else SMALL_VARIANTS)
    configs = [(name, network_variant(name, image_size_px=size)) for name in names for size in sizes_px]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak, source = peak_flops(device, precision)
    setup, rows = BenchSetup(device, precision, batch_size, steps, compiled, peak), []
    for (name, config), mode in product(configs, modes):
        speed = measure(name, config, mode, setup)
        shown = f"{speed.images_per_s:.1f} images/s" if speed.images_per_s else "not even one image fits"
        console.say(f"{speed.variant} {speed.image_size_px} px {speed.mode}: {shown}")
        rows.append(speed)
    return rows, f"peak: {peak / 1e12:.2f} TFLOP/s ({source})" if peak else f"no MFU: {source}"
