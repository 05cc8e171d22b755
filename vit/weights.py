"""Any weights as a model that can be used: a published one, an official `.npz`, a folder of timm or Hugging Face."""

from dataclasses import dataclass
from pathlib import PurePosixPath

from data_prep.decode import DecodePolicy
from infra.storage import open_store
from vit.input.config import AugmentConfig
from vit.models.build import at_resolution
from vit.models.convert.folder import read_classes
from vit.models.convert.huggingface import read_huggingface
from vit.models.convert.npz import read_npz
from vit.models.convert.report import ConversionError, ConversionReport, Converted, check_variant
from vit.models.convert.timm import read_timm
from vit.published import ImageContract, PublishedModel, load_model

UNPUBLISHED = "unpublished"


@dataclass(frozen=True)
class Weights:
    """A model, and how its weights were converted; a published one was not."""

    model: PublishedModel
    report: ConversionReport | None


def load_weights(
    uri: str, *, variant: str | None = None, num_classes: int | None = None, image_size_px: int | None = None
) -> Weights:
    """The model that a folder or file holds, at its own resolution or at `image_size_px`.

    Family and sizes are found from the content; `variant` is checked against them. Raises ConversionError, or
    CheckpointError for a published model that was changed.
    """
    if uri.endswith(".npz"):
        done = read_npz(uri, variant=variant, num_classes=num_classes, image_size_px=image_size_px)
        return Weights(_model(uri, done, None, antialias=False), done.report)
    config = _folder_config(uri)
    if config is not None and "schema_version" in config:
        model = load_model(uri)
        if image_size_px in (None, model.network.config.image_size_px):
            return Weights(model, None)
        network = at_resolution(model.network, image_size_px)
        contract, provenance = at_size(model.contract, image_size_px), {"made_from": model.digest}
        return Weights(PublishedModel(uri, UNPUBLISHED, network, contract, model.classes, provenance), None)
    huggingface = config is not None and (config.get("model_type") == "vit" or "hidden_size" in config)
    done = read_huggingface(uri, num_classes=num_classes) if huggingface else read_timm(uri, num_classes=num_classes)
    if variant is not None:
        check_variant(done.config, variant, done.report)
    if num_classes not in (None, done.network.num_classes):
        raise ConversionError(f"{uri} has a head of {done.network.num_classes} classes, not {num_classes}.")
    if image_size_px is not None:
        done = Converted(at_resolution(done.network, image_size_px), done.report)
    folder = uri if not uri.endswith(".safetensors") else str(PurePosixPath(uri).parent)
    return Weights(_model(uri, done, read_classes(folder), antialias=True), done.report)


def at_size(contract: ImageContract, image_size_px: int) -> ImageContract:
    """The same way from bytes to pixels, to another side; a shorter side before a crop grows with it."""
    view = contract.evaluation
    grown = view.eval_resize_px and round(view.eval_resize_px * image_size_px / view.image_size_px)
    changes = {"image_size_px": image_size_px, "eval_resize_px": grown}
    evaluation = AugmentConfig.model_validate(view.model_dump() | changes)
    return ImageContract(decode=contract.decode, evaluation=evaluation, low=contract.low, high=contract.high)


def _model(uri: str, done: Converted, classes: tuple[str, ...] | None, antialias: bool) -> PublishedModel:
    """With the evaluation of the originals: straight to the square, values in [-1, 1]."""
    network = done.network
    named = classes is not None and len(classes) == network.num_classes
    return PublishedModel(
        uri=uri,
        digest=UNPUBLISHED,
        network=network,
        contract=ImageContract(
            decode=DecodePolicy(),
            evaluation=AugmentConfig(
                image_size_px=network.config.image_size_px, train_crop="inception", antialias=antialias
            ),
        ),
        classes=classes if named and classes else tuple(f"class {i}" for i in range(network.num_classes)),
        provenance={"converted_from": uri, "family": done.report.family},
    )


def _folder_config(uri: str) -> dict | None:
    try:
        return open_store(uri).read_json("config.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
