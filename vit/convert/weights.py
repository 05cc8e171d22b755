"""Loads weights of any supported kind as a model: a published model, an official `.npz`, a folder of timm or Hugging Face."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.storage import open_store
from vitline.vit.convert.folder import MAX_CONFIG_BYTES, read_classes
from vitline.vit.convert.huggingface import read_huggingface
from vitline.vit.convert.npz import read_npz
from vitline.vit.convert.preprocessing import evaluation_of
from vitline.vit.convert.report import (
    ConversionError,
    ConversionReport,
    check_classes,
    check_variant,
    refusing,
    resampled,
)
from vitline.vit.convert.timm import read_timm
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.network import Network
from vitline.vit.published.models import PublishedModel, load_model

UNPUBLISHED = "unpublished"


@dataclass(frozen=True)
class Weights:
    """A model, and the report of its conversion."""

    model: PublishedModel
    report: ConversionReport


def load_weights(
    uri: str, *, variant: str | None = None, num_classes: int | None = None, image_size_px: int | None = None
) -> Weights:
    """The model in a folder or file, at its own resolution or at `image_size_px`.

    Family and sizes are found from the content, and `variant` and `num_classes` are compared with them. Raises
    ConversionError, or WeightsError for a published model that was changed.
    """
    if uri.endswith(".npz"):
        done = read_npz(uri, variant=variant, num_classes=num_classes, image_size_px=image_size_px)
        view = AugmentConfig(image_size_px=done.config.image_size_px, antialias=False)
        return Weights(_model(uri, done.network, view, None, done.report), done.report)
    config = _json(uri, "config.json")
    if config is not None and "schema_version" in config:
        weights = _published(uri, image_size_px)
    else:
        weights = _folder(uri, config, num_classes, image_size_px)
    network = weights.model.network
    if variant is not None:
        check_variant(network.config, variant, uri)
    check_classes(network.num_classes, num_classes, uri)
    return weights


def _published(uri: str, image_size_px: int | None) -> Weights:
    model, report = load_model(uri), ConversionReport(source=uri, family="a published model")
    network = resampled(model.network, image_size_px, report)
    if network is model.network:
        return Weights(model, report)
    contract = at_size(model.contract, network.config.image_size_px)
    return Weights(
        PublishedModel(uri, UNPUBLISHED, network, contract, model.classes, {"made_from": model.digest}), report
    )


def _folder(uri: str, config: dict[str, Any] | None, num_classes: int | None, image_size_px: int | None) -> Weights:
    """Loads a folder of timm or transformers on the local disk."""
    path = Path(uri.removeprefix("file://")).expanduser()
    if "://" in str(path):
        raise ConversionError(
            f"{uri} is not a published model. If it is a folder of timm or Hugging Face, copy it to this machine first."
        )
    huggingface = config is not None and (config.get("model_type") == "vit" or "hidden_size" in config)
    read = read_huggingface if huggingface else read_timm
    done = read(path, num_classes=num_classes)
    network = done.network
    if any(value.dtype == torch.float64 for value in network.parameters()):
        network = network.float()
        done.report.adapted.append("float64 became float32")
    with refusing(uri):
        view = evaluation_of(network, config, _json(uri, "preprocessor_config.json"), done.report)
    moved = resampled(network, image_size_px, done.report)
    contract = at_size(ImageContract(decode=DecodePolicy(), evaluation=view), moved.config.image_size_px)
    with refusing(uri):
        classes = read_classes(path if path.is_dir() else path.parent)
    return Weights(_model(uri, moved, contract.evaluation, classes, done.report), done.report)


def at_size(contract: ImageContract, image_size_px: int) -> ImageContract:
    """The image contract for another input size; a shorter side before the crop scales with it."""
    view = contract.evaluation
    grown = view.eval_resize_px and round(view.eval_resize_px * image_size_px / view.image_size_px)
    changes = {"image_size_px": image_size_px, "eval_resize_px": grown}
    evaluation = AugmentConfig.model_validate(view.model_dump() | changes)
    return ImageContract(decode=contract.decode, evaluation=evaluation, low=contract.low, high=contract.high)


def _model(
    uri: str, network: Network, view: AugmentConfig, classes: tuple[str, ...] | None, report: ConversionReport
) -> PublishedModel:
    named = classes is not None and len(classes) == network.num_classes
    return PublishedModel(
        uri=uri,
        digest=UNPUBLISHED,
        network=network,
        contract=ImageContract(decode=DecodePolicy(), evaluation=view),
        classes=classes if named and classes else tuple(f"class {i}" for i in range(network.num_classes)),
        provenance={"converted_from": uri, "family": report.family},
    )


def _json(uri: str, key: str) -> dict[str, Any] | None:
    try:
        store = open_store(uri)
        if (size := store.size(key)) > MAX_CONFIG_BYTES:
            raise ConversionError(f"{uri}/{key} has {size:,} bytes, expected at most {MAX_CONFIG_BYTES:,}.")
        tree = store.read_json(key)
    except ConversionError:
        raise
    except RecursionError as error:
        raise ConversionError(f"{uri}/{key} is nested too deeply. Download it again.") from error
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None
