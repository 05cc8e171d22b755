"""The fields of `config.json` of a published model. Imports no torch, so that commands and the sender to MLflow stay fast."""

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.storage import Store, open_store
from vitline.vit.models.config import NetworkConfig, network_config

if TYPE_CHECKING:
    from vitline.vit.checkpoints.tensor_file import TensorPiece


SCHEMA_VERSION = 2
"""1: classes, image contract and card lie beside `config.json`. 2: with the weights, in a folder named by their content."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CLASSES, CONTRACT, CARD = "classes.json", "image_contract.json", "card.md"
PUBLISHING = "publishing.json"
"""Lies beside weights whose publication has begun; deleted once it is committed."""
REPUBLISH = "delete the folder of the model and publish it again"  # what is published is never replaced


class MixtureEntry(TypedDict):
    """A corpus of a mixture in records."""

    corpus: str
    """NAME/VERSION."""
    digest: str
    weight: float
    share: float
    """Fraction of the examples."""


class ModelProvenance(TypedDict, total=False):
    """What a model was made from. A training writes the first five, of a mixture eight; conversions write the file that they read;
    a final trial, whose network was kept, writes the last six, and no run key: several runs may share it."""

    run_key: str
    config_digest: str
    corpus_digest: str
    steps: int
    images_seen: int
    """Images that the network was trained on, counting repeats."""
    parent: str
    """Of a branch: run key and step of the checkpoint that it started from, as `<run key>@<step>`."""
    mixture: list[MixtureEntry]
    """The corpora of a mixture; `corpus_digest` is then a digest over them, their weights and classes."""
    class_map: str
    """Of a mixture: `names`, `prefixed` or the URI of the class table."""
    class_map_digest: str
    head: str
    """Of a network that was trained without labels: that its head was not trained."""
    converted_from: str
    family: str
    trial: str
    """Key of the final trial that has fine-tuned it."""
    score: str
    """Key of the score record of this trial."""
    protocol: str
    precision: str
    """Of matrix products in fine-tuning and scoring."""
    init_model: str
    """URI of the model that was fine-tuned; absent if it was trained from scratch."""
    init_model_digest: str


class PublishingMark(TypedDict):
    """`publishing.json` beside weights that no `config.json` names yet."""

    schema_version: int
    at: float
    """When the publication began, in Unix seconds."""
    run_key: str | None
    """The run that the model is of, if any."""


class ModelRecord(TypedDict):
    """`config.json` of a published model."""

    schema_version: int
    architecture: str
    model: dict[str, Any]
    """The network's config as JSON, for `network_of`."""
    num_classes: int
    tensors: "list[TensorPiece]"
    """The tensors of the weights file."""
    weights: NotRequired[str]
    """Key of the weights file, `<12 hex of the content>/model.safetensors`. Copies for MLflow have
    `model.safetensors` and no such field."""
    probe: list[float]
    """The first logits of a synthetic image."""
    provenance: ModelProvenance
    created_at: float
    """Unix seconds."""
    vitline_version: str
    """The version of vitline that published it."""
    digest: str
    files: NotRequired[dict[str, str]]
    """Digests of the image contract and of the classes, so that an error can name the file that was changed."""


def file_key(record: ModelRecord, name: str) -> str:
    """Key of a file (WEIGHTS, CLASSES, CONTRACT or CARD) below the folder of a published model."""
    return record.get("weights", WEIGHTS).removesuffix(WEIGHTS) + name


def read_classes(store: Store, record: ModelRecord) -> list[str]:
    """The classes of a published model, in the order of its head. Raises FileNotFoundError, and ValueError or KeyError for a
    file that is damaged."""
    classes: list[str] = store.read_json(file_key(record, CLASSES))["classes"]
    return classes


def read_contract(store: Store, record: ModelRecord) -> dict[str, Any]:
    """The image contract of a published model, as JSON. Raises FileNotFoundError, and ValueError for a damaged file."""
    contract: dict[str, Any] = store.read_json(file_key(record, CONTRACT))
    return contract


def published_record(store: Store) -> ModelRecord:
    """The record of a published model. Raises FileNotFoundError if there is none, and
    UnreadableRecord, with what reads it, for a schema version that this code does not know."""
    record: ModelRecord = store.read_json(CONFIG)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        by = record.get("vitline_version") if isinstance(record, dict) else None
        reader = f"vitline {by}, which published it, or a later version" if by else "the vitline that published it"
        raise UnreadableRecord(
            f"{store.uri_of(CONFIG)} has schema_version {version}, but this vitline reads {SCHEMA_VERSION}. Use {reader}, "
            f"or {REPUBLISH}."
        )
    return record


def network_of(store: Store, record: ModelRecord) -> NetworkConfig:
    """The network of the published model in a store. Raises UnreadableRecord for one that this version of vitline cannot build."""
    with reading(store.uri_of(CONFIG)):
        return network_config(record["model"])


def published_network(uri: str) -> NetworkConfig:
    """The network of the published model at a URI. Raises what `published_record` and `network_of` raise."""
    store = open_store(uri)
    return network_of(store, published_record(store))


def model_record(uri: str) -> ModelRecord | None:
    """The record of the published model at a URI, whatever its version, for lists and reports; None if there is none."""
    try:
        record: ModelRecord = open_store(uri).read_json(CONFIG)
    except FileNotFoundError:
        return None
    return record


class ModelCheck(TypedDict):
    """The result of `verify_model`."""

    uri: str
    digest: str
    tensors: int
    bytes: int
    probe_difference: float
    """Largest difference of the probe's logits, relative to the largest logit."""


class Prediction(TypedDict):
    """The answer of a served model for one image."""

    classes: list[str]
    """The most probable classes, best first."""
    probabilities: list[float]
