"""Published models: weights, config, image contract, classes and a card in one folder (DESIGN 3.6).

from vit.published import load_model
model = load_model("models/emoji-vit/0a1b2c3d4e5f")
print(model.predict(["cat.png"]))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.decode import DecodePolicy, decode
from infra.config import FrozenConfig, digest_of
from infra.storage import Store, open_store
from vit.checkpoint import CheckpointError
from vit.config import ViTConfig
from vit.input.augment import evaluation_pixels
from vit.input.config import AugmentConfig
from vit.models.pos_embed import RESAMPLE_METHOD, resample_pos_embed
from vit.models.vit import VisionTransformer
from vit.tensor_file import read_tensors, write_tensors

SCHEMA_VERSION = 1
HEAD = ("head.weight", "head.bias")


class ImageContract(FrozenConfig):
    """How bytes become the model's input; it travels with the weights and every consumer goes through it."""

    decode: DecodePolicy
    """Bytes to RGB pixels."""
    evaluation: AugmentConfig
    """Resize, antialias, crop and resolution of evaluation."""
    low: float = -1.0
    """Value of a black pixel."""
    high: float = 1.0
    """Value of a white pixel."""


@dataclass(frozen=True)
class PublishedModel:
    """A network with what is needed to use it; `digest` is the identity that scores carry."""

    uri: str
    digest: str
    network: VisionTransformer
    contract: ImageContract
    classes: tuple[str, ...]
    provenance: Mapping[str, Any]

    @torch.inference_mode()
    def predict(self, images: Sequence[str | Path | bytes], top: int = 5) -> list[list[tuple[str, float]]]:
        """The `top` classes of each image (a path or its bytes) with softmax probabilities, best first."""
        if not images:
            return []
        decoded = (decode(_bytes(image), self.contract.decode) for image in images)
        pixels = np.stack([evaluation_pixels(image, self.contract.evaluation) for image in decoded])
        low, high = self.contract.low, self.contract.high
        # Divided and shifted, as in training: the usual contract gives bit for bit the same input.
        normalised = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255 / (high - low)).add_(low)
        best = self.network(normalised).softmax(dim=-1).topk(min(top, len(self.classes)))
        return [
            [(self.classes[int(k)], float(p)) for p, k in zip(probabilities, ids, strict=True)]
            for probabilities, ids in zip(best.values, best.indices, strict=True)
        ]


def publish(
    models: Store,
    name: str,
    version: str,
    network: VisionTransformer,
    contract: ImageContract,
    classes: Sequence[str],
    provenance: Mapping[str, Any],
) -> str:
    """Writes `<name>/<version>/`, `config.json` last, and returns its URI. Publishing the same model again is harmless."""
    if len(classes) != network.num_classes:
        raise ValueError(f"{len(classes)} class names for a head of {network.num_classes} classes in {name}/{version}.")
    if contract.evaluation.image_size_px != network.config.image_size_px:
        raise ValueError(
            f"{name}/{version}: the image contract gives {contract.evaluation.image_size_px} px, "
            f"the network takes {network.config.image_size_px} px."
        )
    store = models.child(f"{name}/{version}")
    weights = {key: value.detach().cpu() for key, value in network.state_dict().items()}
    pieces = write_tensors(store, "model.safetensors", weights)
    config = {
        "schema_version": SCHEMA_VERSION,
        "architecture": "vit",
        "model": network.config.model_dump(mode="json"),
        "num_classes": network.num_classes,
        "pos_embed_resample": RESAMPLE_METHOD,
        "tensors": pieces,
        "provenance": dict(provenance),
    }
    contract_json, class_list = contract.model_dump(mode="json"), list(classes)
    config["digest"] = model_digest(config, contract_json, class_list)
    # Beside the digest, so that a file that was changed can be named.
    config["files"] = {"image_contract.json": digest_of(contract_json), "classes.json": digest_of(class_list)}
    store.write_json("image_contract.json", contract_json)
    store.write_json("classes.json", {"schema_version": SCHEMA_VERSION, "classes": class_list})
    store.write("card.md", card(name, version, config, contract, class_list).encode())
    store.write_json("config.json", config)
    return store.uri


def model_digest(config: Mapping[str, Any], contract: Mapping[str, Any], classes: Sequence[str]) -> str:
    """The identity of a model: architecture, weights, image contract, classes; not where or when it was made."""
    weights = {piece["name"]: piece["sha256"] for piece in config["tensors"]}
    return digest_of([config["architecture"], config["model"], weights, contract, classes])


def load_model(uri: str) -> PublishedModel:
    """A published model, its weights checked against their digests, in evaluation mode on the CPU.

    Raises CheckpointError, naming the folder, when it is not a published model or a byte differs.
    """
    store = open_store(uri)
    try:
        config = store.read_json("config.json")
        contract = store.read_json("image_contract.json")
        classes = store.read_json("classes.json")["classes"]
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{uri} is no published model: {error}. `vitline model ls` lists those there are."
        ) from error
    if config.get("schema_version") != SCHEMA_VERSION or config.get("architecture") != "vit":
        raise CheckpointError(f"{uri}/config.json is not of schema_version {SCHEMA_VERSION} with architecture 'vit'.")
    if config["digest"] != model_digest(config, contract, classes):
        found = {"image_contract.json": digest_of(contract), "classes.json": digest_of(classes)}
        changed = [name for name, digest in found.items() if config.get("files", {}).get(name, digest) != digest]
        raise CheckpointError(
            f"{uri}: {' and '.join(changed) or 'config.json'} was changed after publishing; publish the model again."
        )
    try:
        tensors = read_tensors(store, "model.safetensors", config["tensors"])
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{uri}/model.safetensors: {error}") from error
    network = VisionTransformer(ViTConfig.model_validate(config["model"]), len(classes))
    network.load_state_dict(dict(zip((p["name"] for p in config["tensors"]), tensors, strict=True)), strict=True)
    return PublishedModel(
        uri,
        config["digest"],
        network.eval(),
        ImageContract.model_validate(contract),
        tuple(classes),
        config["provenance"],
    )


def adapt(
    source: VisionTransformer, config: ViTConfig, num_classes: int, head_bias_init: float = 0.0
) -> VisionTransformer:
    """`source` made ready for fine-tuning: a zero-initialised linear head, positions resampled, no pre-logits layer.

    Source: arXiv:2010.11929, Sec. 3.2 and B.1.1. Raises ValueError naming each setting in which the two networks differ
    beyond resolution and head.
    """
    config = ViTConfig.model_validate(config.model_dump() | {"pre_logits": False, "head_bias_init": head_bias_init})
    free = {"image_size_px", "pre_logits", "head_bias_init", "dropout_rate"}
    theirs, ours = source.config.model_dump(exclude=free), config.model_dump(exclude=free)
    if changed := [f"{key}: {theirs[key]} -> {ours[key]}" for key in ours if theirs[key] != ours[key]]:
        raise ValueError(f"The pre-trained network cannot become the asked one: {'; '.join(changed)}.")
    network = VisionTransformer(config, num_classes)
    weights: dict[str, Tensor] = {
        key: value
        for key, value in source.state_dict().items()
        if key not in HEAD and not key.startswith("pre_logits.")
    }
    weights["pos_embed"] = resample_pos_embed(weights["pos_embed"], config.num_patches)
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert set(missing) == set(HEAD), missing
    assert not unexpected, unexpected
    return network


def card(name: str, version: str, config: Mapping[str, Any], contract: ImageContract, classes: Sequence[str]) -> str:
    """The model card: what it is, what it was made from, how to use it."""
    model, provenance = config["model"], config["provenance"]
    parameters = sum(int(np.prod(p["shape"])) for p in config["tensors"])
    made = "\n".join(f"- {key.replace('_', ' ')}: `{value}`" for key, value in provenance.items())
    return f"""# {name} {version}

A Vision Transformer: width {model["embed_dim"]}, depth {model["depth"]}, {model["num_heads"]} heads, patches of \
{model["patch_size_px"]} px, images of {model["image_size_px"]} px, {parameters:,} parameters, {len(classes):,} classes.
Digest `{config["digest"]}`.

## Made from
{made}

## Use
```python
from vit.published import load_model

model = load_model("<this folder>")
print(model.predict(["picture.jpg"]))
```
Images go through `image_contract.json`: RGB, resized to {contract.evaluation.image_size_px} px \
({contract.evaluation.eval_resize}, antialias {"on" if contract.evaluation.antialias else "off"}), \
values from {contract.low:g} to {contract.high:g}.
"""


def _bytes(image: str | Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()
