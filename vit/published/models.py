"""Published models: weights, config, image contract, classes and a card in one folder.

from vitline import load_model
model = load_model("birds")
print(model.predict(["picture.jpg"]))
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.infra.config import digest_of
from vitline.infra.local.running_stack import local_store
from vitline.infra.provenance import versions
from vitline.infra.records import UnreadableRecord
from vitline.infra.storage import Store, in_bucket, is_location, json_bytes, open_store
from vitline.vit.checkpoints.manifest import WeightsError
from vitline.vit.checkpoints.tensor_file import raw_bytes, read_tensors, write_tensors
from vitline.vit.input.augment import evaluation_pixels
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network, network_with
from vitline.vit.models.config import NetworkConfig, TransformerConfig, check_same_network
from vitline.vit.models.limits import check_limits
from vitline.vit.models.network import Network, normalised
from vitline.vit.models.pos_embed import resample_positions
from vitline.vit.published.model_card import card
from vitline.vit.published.model_names import find_published
from vitline.vit.published.model_record import (
    CARD,
    CLASSES,
    CONFIG,
    CONTRACT,
    PUBLISHING,
    REPUBLISH,
    SCHEMA_VERSION,
    WEIGHTS,
    ModelCheck,
    ModelProvenance,
    ModelRecord,
    PublishingMark,
    file_key,
    network_of,
    published_record,
    read_classes,
    read_contract,
)

log = logging.getLogger(__name__)
HEAD = ("head.weight", "head.bias")


@dataclass(frozen=True)
class PublishedModel:
    """A network with everything needed to use it. Scores refer to the model by its `digest`."""

    uri: str
    digest: str
    network: Network
    contract: ImageContract
    classes: tuple[str, ...]
    provenance: Mapping[str, Any]

    @torch.inference_mode()
    def predict(self, images: Sequence[str | Path | bytes], top: int = 5) -> list[list[tuple[str, float]]]:
        """The `top` most probable classes of each image (a path or bytes), with softmax probabilities.

        Images are decoded in another process, which can do nothing else (`SECURITY.md`).
        """
        if not images:
            return []
        policy = self.contract.decode
        decoded = (
            decode_sandboxed(image if isinstance(image, bytes) else file_bytes(Path(image), policy), policy)
            for image in images
        )
        pixels = np.stack([evaluation_pixels(image, self.contract.evaluation) for image in decoded])
        best = self.network(self.normalised(pixels)).softmax(dim=-1).topk(min(top, len(self.classes)))
        return [
            [(self.classes[int(k)], float(p)) for p, k in zip(probabilities, ids, strict=True)]
            for probabilities, ids in zip(best.values, best.indices, strict=True)
        ]

    def normalised(self, pixels: np.ndarray) -> Tensor:
        """The network's input (N, 3, H, W) from uint8 pixels (N, H, W, 3) already resized by the contract."""
        return normalised(torch.from_numpy(pixels), self.contract.low, self.contract.high)


def publish(
    models: Store,
    name: str,
    version: str,
    network: Network,
    contract: ImageContract,
    classes: Sequence[str],
    provenance: Mapping[str, Any],
    check_lease: Callable[[], object] = lambda: None,
) -> str:
    """Publishes `<name>/<version>/` and returns its URI. A version that is published already stays as it is.

    All files lie in a folder that is named after their content; `config.json`, which names it, is created last, if it is
    absent. Until then `publishing.json` is beside them, so that garbage collection knows what a killed process has left.
    A writer that was suspended meanwhile changes no byte that the published model is read from. `check_lease` is called
    before the first write and before the commit, and raises where another attempt may publish instead. Raises ValueError for
    another image contract or other classes than those that are published, and for a network that they do not fit.
    """
    _check_fit(f"{name}/{version}", network, contract, classes)
    store = models.child(f"{name}/{version}")
    contract_json, class_list = contract.model_dump(mode="json"), list(classes)
    files = {CONTRACT: digest_of(contract_json), CLASSES: digest_of(class_list)}
    if store.exists(CONFIG):
        return _kept(store, published_record(store), files)
    weights = {key: value.detach().cpu() for key, value in network.state_dict().items()}
    config: ModelRecord = {
        "schema_version": SCHEMA_VERSION,
        "architecture": network.config.architecture,
        "model": network.config.model_dump(mode="json"),
        "num_classes": network.num_classes,
        "tensors": [],
        "probe": probe(network),
        "provenance": cast(ModelProvenance, dict(provenance)),
        "created_at": time.time(),
        "vitline_version": versions().get("vitline", ""),
        "digest": "",
        "files": files,
    }
    content = [config["architecture"], config["model"], content_digest(weights), files, config["provenance"]]
    folder = digest_of(content)[:12]
    config["weights"] = f"{folder}/{WEIGHTS}"
    check_lease()
    mark: PublishingMark = {"schema_version": 1, "at": time.time(), "run_key": provenance.get("run_key")}
    store.write_json(f"{folder}/{PUBLISHING}", mark)
    config["tensors"] = write_tensors(store, config["weights"], weights)
    config["digest"] = model_digest(config, contract_json, class_list)
    texts = {
        CONTRACT: json_bytes(contract_json),
        CLASSES: json_bytes({"schema_version": SCHEMA_VERSION, "classes": class_list}),
        CARD: card(name, version, config, contract, class_list).encode(),
    }
    _create_each(store, folder, texts)
    check_lease()
    if not store.create_if_absent(CONFIG, json_bytes(config)):
        theirs = published_record(store)
        mine = file_key(theirs, WEIGHTS) == config["weights"]
        for key in [f"{folder}/{PUBLISHING}"] if mine else store.list(f"{folder}/"):
            store.delete(key)
        return _kept(store, theirs, files)
    if {WEIGHTS, *texts} - {key.rpartition("/")[2] for key in store.list(f"{folder}/")}:
        # This process was suspended before its commit for so long that garbage collection took the files.
        write_tensors(store, config["weights"], weights)
        _create_each(store, folder, texts)
    store.delete(f"{folder}/{PUBLISHING}")
    return store.uri


def _check_fit(title: str, network: Network, contract: ImageContract, classes: Sequence[str]) -> None:
    """Raises ValueError for classes or an image contract that the network does not fit."""
    if len(classes) != network.num_classes:
        raise ValueError(
            f"{title}: got {len(classes)} class names, but the head has {network.num_classes} classes. "
            "Give one name per class."
        )
    if contract.evaluation.image_size_px != network.config.image_size_px:
        raise ValueError(
            f"{title}: the image contract resizes to {contract.evaluation.image_size_px} px, but the network "
            f"takes {network.config.image_size_px} px. Use the same size for both."
        )


def _create_each(store: Store, folder: str, texts: Mapping[str, bytes]) -> None:
    for name, data in texts.items():
        store.create_if_absent(f"{folder}/{name}", data)


def _kept(store: Store, published: ModelRecord, files: Mapping[str, str]) -> str:
    """The URI of a version that is published already: its weights stay.

    Raises ValueError if it has another image contract or other classes. Those of a training cannot differ, because its
    version is a digest of what they are made from; its weights may, by rounding.
    """
    differ = [name for name, digest in files.items() if published.get("files", {}).get(name, digest) != digest]
    if differ:
        raise ValueError(
            f"{store.uri} is published already, with another {' and '.join(differ)}. A published model does not change: "
            "publish under another name."
        )
    log.info("%s is published already, with digest %s; it stays", store.uri, published["digest"][:12])
    return store.uri


def content_digest(weights: Mapping[str, Tensor]) -> str:
    """The digest of the names, types, shapes and bytes of CPU tensors, in their order."""
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()


def model_digest(config: ModelRecord, contract: Mapping[str, Any], classes: Sequence[str]) -> str:
    """The digest of a model: architecture, weights, image contract and classes, not where or when it was made."""
    weights = {piece["name"]: piece["sha256"] for piece in config["tensors"]}
    return digest_of([config["architecture"], config["model"], weights, contract, classes])


PROBE_TOLERANCE = 1e-4
"""Largest allowed difference of a probe's logits on another machine or library version, relative to the largest logit."""


@torch.inference_mode()
def probe(network: Network, most: int = 16) -> list[float]:
    """The first logits of a synthetic image. A loader can compare its own logits with them."""
    # On the CPU, because GPUs may round convolutions to TF32, and the logits are compared across machines.
    weights = {name: value.detach().cpu().float() for name, value in network.state_dict().items()}
    copy = network_with(network.config, network.num_classes, weights)
    side = network.config.image_size_px
    y, x, c = torch.meshgrid(torch.arange(side), torch.arange(side), torch.arange(3), indexing="ij")
    image = ((7 * x + 13 * y + 29 * c) % 256).permute(2, 0, 1)[None]
    return [float(value) for value in copy(image / 127.5 - 1)[0, :most]]


def verify_model(uri: str) -> ModelCheck:
    """Checks every tensor of a published model against its digest, and computes its probe logits again.

    Raises WeightsError naming the file or tensor that differs, or the difference of the logits.
    """
    model = load_model(uri)
    config = published_record(open_store(uri))
    expected, found = torch.tensor(config["probe"]), torch.tensor(probe(model.network))
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    if not difference <= PROBE_TOLERANCE:
        raise WeightsError(
            f"{uri}: the weights are unchanged, but the logits of the probe image differ from those at publishing by "
            f"{difference:.1e} of the largest logit; rounding explains up to {PROBE_TOLERANCE:g}. Compare the torch "
            "version and the device with those of the publishing machine."
        )
    return {
        "uri": model.uri,
        "digest": model.digest,
        "tensors": len(config["tensors"]),
        "bytes": sum(piece["end"] - piece["start"] for piece in config["tensors"]),
        "probe_difference": difference,
    }


def load_model(model: str | os.PathLike[str]) -> PublishedModel:
    """Loads a published model on the CPU in evaluation mode, and checks its weights against their digests.

    `model` is NAME (its newest version), NAME/VERSION, a path or a URI. Names are looked up below $VITLINE_ROOT, else in
    the local stack, else in `.vitline/store`, as the commands do. Raises WeightsError for an unknown name, for a
    folder that is not a published model, and if any byte differs.
    """
    name = os.fspath(model)
    if "://" in name and not in_bucket(name):
        return read_model(name)
    if "://" not in name and os.path.exists(os.path.join(path := os.path.expanduser(name), "config.json")):
        return read_model(path)
    with local_store() as (root, missing):
        if is_location(name):
            return read_model(name)
        try:
            uri = find_published(root, name)
        except ValueError as error:
            raise WeightsError(f"{error}{missing}") from None
        return read_model(uri)


def read_model(uri: str) -> PublishedModel:
    """Like `load_model`, for a path or URI only, with the credentials from the environment of this process."""
    store = open_store(uri)
    try:
        config = published_record(store)
        contract, classes = read_contract(store, config), read_classes(store, config)
    except UnreadableRecord as error:
        raise WeightsError(str(error)) from error
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise WeightsError(
            f"{uri} is not a published model: {error}. `vitline model ls` lists the published models."
        ) from error
    if config["digest"] != model_digest(config, contract, classes):
        found = {CONTRACT: digest_of(contract), CLASSES: digest_of(classes)}
        changed = [name for name, digest in found.items() if config.get("files", {}).get(name, digest) != digest]
        raise WeightsError(
            f"{uri}: {' and '.join(changed) or 'config.json'} was changed after publishing. Restore it from a copy, or {REPUBLISH}."
        )
    return PublishedModel(
        uri,
        config["digest"],
        _network(store, config, len(classes)),
        ImageContract.model_validate(contract),
        tuple(classes),
        config["provenance"],
    )


def _network(store: Store, config: ModelRecord, num_classes: int) -> Network:
    """The network of a model. Raises WeightsError if its weights differ from `config.json`, or do not fit the network."""
    file = f"{store.uri}/{file_key(config, WEIGHTS)}"
    try:
        described = network_of(store, config)
    except UnreadableRecord as error:
        raise WeightsError(str(error)) from error
    try:
        check_limits(described)
        size = store.size(file_key(config, WEIGHTS))
        listed = sum(max(0, piece["end"] - piece["start"]) for piece in config["tensors"])
        if listed > size:  # the same bytes listed many times would fill the memory
            raise ValueError(f"config.json lists {listed:,} bytes of tensors, but the file has {size:,}")
        tensors = read_tensors(store, file_key(config, WEIGHTS), config["tensors"])
    except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
        raise WeightsError(
            f"{file}: {str(error).rstrip('.')}. Restore the file from a copy, or {REPUBLISH}."
        ) from error
    weights = dict(zip((p["name"] for p in config["tensors"]), tensors, strict=True))
    try:
        return network_with(described, num_classes, weights)
    except RuntimeError as error:
        raise WeightsError(f"{file}: the tensors do not fit the network of config.json: {error}") from error


def adapt(source: Network, config: NetworkConfig, num_classes: int, head_bias_init: float = 0.0) -> Network:
    """`source` prepared for fine-tuning: new linear head, resampled position embeddings, no pre-logits layer.

    Source: arXiv:2010.11929, Sec. 3.2 and B.1.1. Raises ValueError naming each setting that differs and that
    fine-tuning cannot change.
    """
    config = config.for_transfer(head_bias_init=head_bias_init)
    check_same_network(source.config, config, "fine-tuned as")
    network = build_network(config, num_classes)
    weights: dict[str, Tensor] = {
        key: value
        for key, value in source.state_dict().items()
        if key not in HEAD and not key.startswith("pre_logits.")
    }
    if isinstance(config, TransformerConfig):
        weights = resample_positions(weights, config)
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert set(missing) == set(HEAD), missing
    assert not unexpected, unexpected
    return network


def initialised(source: PublishedModel, config: NetworkConfig, classes: Sequence[str]) -> Network:
    """A network of `config` with the weights of a published model, to pre-train from. The head, with its pre-logits layer, is kept
    where the model has the same classes in the same order and the same such layer; else it is new. Position embeddings are
    resampled. Raises ValueError naming each setting that differs and has weights."""
    check_same_network(source.network.config, config, "started from")
    network = build_network(config, len(classes))
    same_layer = getattr(source.network.config, "pre_logits", False) == getattr(config, "pre_logits", False)
    kept = tuple(classes) == source.classes and same_layer
    weights: dict[str, Tensor] = {
        key: value
        for key, value in source.network.state_dict().items()
        if kept or (key not in HEAD and not key.startswith("pre_logits."))
    }
    if isinstance(config, TransformerConfig):
        weights = resample_positions(weights, config)
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert kept or all(key in HEAD or key.startswith("pre_logits.") for key in missing), missing
    assert not unexpected, unexpected
    assert not (kept and missing), missing
    return network


def file_bytes(path: Path, policy: DecodePolicy) -> bytes:
    """The bytes of an image file. Raises ImageRejected, without reading it, if it is larger than the policy allows."""
    if (size := path.stat().st_size) > policy.max_bytes:
        raise ImageRejected("too_many_bytes", f"{size:,} bytes, limit {policy.max_bytes:,}")
    return path.read_bytes()
