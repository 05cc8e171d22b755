"""transformers' ViTForImageClassification and ViTModel <-> ours, by their names; transformers is not imported.

What is not the same function is refused, with the reason. Checked against transformers 5.23.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.convert.folder import CONFIG, read_folder, write_folder
from vit.convert.report import ConversionError, ConversionReport, Converted, finish
from vit.convert.tables import Table, give, head_classes, numbered, position_table, take, zero_head
from vit.input.image_contract import ImageContract
from vit.models.build import meta_network
from vit.models.config import ViTConfig
from vit.models.network import Network
from vit.models.vit import VisionTransformer

# Ours: (as files hold them, in every version; as transformers 5 holds them in memory).
_NAMES: Mapping[str, tuple[str, str]] = {
    "patch_embed": ("vit.embeddings.patch_embeddings.projection",) * 2,
    "cls_token": ("vit.embeddings.cls_token",) * 2,
    "pos_embed": ("vit.embeddings.position_embeddings",) * 2,
    "blocks.#.norm1": ("vit.encoder.layer.#.layernorm_before", "vit.layers.#.layernorm_before"),
    "blocks.#.attention.qkv": (
        "vit.encoder.layer.#.attention.attention.{query,key,value}",
        "vit.layers.#.attention.{q_proj,k_proj,v_proj}",
    ),
    "blocks.#.attention.out": ("vit.encoder.layer.#.attention.output.dense", "vit.layers.#.attention.o_proj"),
    "blocks.#.norm2": ("vit.encoder.layer.#.layernorm_after", "vit.layers.#.layernorm_after"),
    "blocks.#.fc1": ("vit.encoder.layer.#.intermediate.dense", "vit.layers.#.mlp.fc1"),
    "blocks.#.fc2": ("vit.encoder.layer.#.output.dense", "vit.layers.#.mlp.fc2"),
    "norm": ("vit.layernorm",) * 2,
    "pre_logits": ("vit.pooler.dense",) * 2,
    "head": ("classifier",) * 2,
}
CLASSIC: Table = {ours: classic for ours, (classic, _) in _NAMES.items()}
IN_MEMORY: Table = {ours: in_memory for ours, (_, in_memory) in _NAMES.items()}

_GELU = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_HIDDEN_ACT = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
# transformers' own defaults: a config.json may leave out what equals them.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "pooler_act": "tanh",
}
_BILINEAR = 2  # as Pillow numbers its filters


def read_huggingface(directory: str | Path, *, num_classes: int | None = None) -> Converted:
    """The network of a folder that `ViTForImageClassification` or `ViTModel` was saved to.

    Raises ConversionError as `from_huggingface` does, for pickles, and where `config.json` is missing.
    """
    state, config = read_folder(directory)
    if config is None:
        raise ConversionError(f"{directory} has no {CONFIG}, without which heads, GELU and epsilon are unknown.")
    return from_huggingface(state, config, str(directory), num_classes=num_classes)


def from_huggingface(
    state: Mapping[str, Tensor], config: Mapping[str, Any], source: str, *, num_classes: int | None = None
) -> Converted:
    """The network of transformers' state dict and `config.json`, with a report of every entry.

    Names of both ages are taken, with and without `vit.` in front. A pooler is our pre-logits layer where nothing else
    follows it, and is skipped where a classifier does, which takes the class token itself. `num_classes` is for files
    without a classifier: its head is zeros. Raises ConversionError naming entries or settings that make another function
    of it than our network computes.
    """
    report = ConversionReport(source=source, family="transformers, ViT")
    prefix = "vit." if any(name.startswith("vit.") for name in state) else ""
    in_memory = any(name.startswith(f"{prefix}layers.") for name in state)
    table = {n: t.replace("vit.", prefix, 1) for n, t in (IN_MEMORY if in_memory else CLASSIC).items()}
    has_head, pooler = "classifier.weight" in state, f"{prefix}pooler.dense"
    ours = _config(state, prefix, config, report, pre_logits=f"{pooler}.weight" in state and not has_head)
    classes = head_classes(state, "classifier.weight", num_classes, report)
    weights, unused = take(meta_network(ours, classes).state_dict(), table, state, report)
    if not has_head:
        zero_head(weights, ours.embed_dim, classes, report)
    reasons = {f"{prefix}embeddings.mask_token": "stands for masked patches, in pre-training alone"}
    if has_head:
        reasons |= {f"{pooler}.{leaf}": "the classifier does not use the pooler" for leaf in ("weight", "bias")}
    report.skipped |= {name: why for name, why in reasons.items() if name in unused}
    return finish(ours, classes, weights, report, unused - set(report.skipped))


def write_huggingface(
    network: Network, directory: str | Path, classes: Sequence[str], contract: ImageContract | None = None
) -> None:
    """A folder that `ViTForImageClassification.from_pretrained(directory)` loads, with the same logits.

    With `contract`, `preprocessor_config.json` stands beside it. Dropout and stochastic depth are left out: transformers
    has no dropout between the layers of the MLP, and no stochastic depth. Raises ValueError, "not supported: ...", for
    what its ViT cannot compute: hybrids and BiT, another pool than the class token, a pre-logits layer before the head,
    relative or every-layer positions; and for a wrong number of class names, or one that comes twice.
    """
    if len(classes) != network.num_classes:
        raise ValueError(f"{len(classes)} class names for a head of {network.num_classes} classes.")
    if twice := [name for name, times in Counter(classes).items() if times > 1]:
        raise ValueError(
            f"{', '.join(sorted(twice)[:6])}: more than one class; transformers finds classes by their names."
        )
    if not isinstance(network, VisionTransformer):
        raise ValueError(f"not supported: {network.config.summary} in transformers, whose ViT cuts patches of pixels.")
    ours = network.config
    if ours.pool != "token":
        raise ValueError(f"not supported: pool={ours.pool} in transformers, whose ViT takes the class token.")
    if ours.pre_logits:
        raise ValueError(
            "not supported: pre_logits in transformers, whose classifier takes the class token itself. Fine-tuning drops it."
        )
    files: dict[str, Any] = {CONFIG: _their_config(ours, classes)}
    if contract is not None:
        files["preprocessor_config.json"] = _preprocessor(contract)
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith("pos_embed")}
    positions = position_table(network, "transformers")
    weights["pos_embed"] = torch.zeros(1, ours.num_tokens, ours.embed_dim) if positions is None else positions
    write_folder(directory, give(weights, CLASSIC), files)


def _config(
    state: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any], report: ConversionReport, *, pre_logits: bool
) -> ViTConfig:
    said = _DEFAULTS | dict(config)
    refused = f"{report.source}: not supported: "
    if (kind := said.get("model_type", "vit")) != "vit":
        raise ConversionError(f"{refused}model_type={kind!r}; 'vit' is.")
    if said["hidden_act"] not in _GELU:
        raise ConversionError(f"{refused}hidden_act={said['hidden_act']!r}; {', '.join(_GELU)} are.")
    if said["num_channels"] != 3:
        raise ConversionError(f"{refused}num_channels={said['num_channels']}; 3 are.")
    if pre_logits and said["pooler_act"] != "tanh":
        raise ConversionError(f"{refused}pooler_act={said['pooler_act']!r}; tanh is.")
    blocks = max(numbered(state, rf"{prefix}{age}\.(\d+)\.") for age in (r"encoder\.layer", "layers"))
    hidden = next(
        (v for n, v in state.items() if n.endswith(("0.intermediate.dense.weight", "0.mlp.fc1.weight"))), None
    )
    if hidden is None:
        shown = ", ".join(sorted(state)[:5])
        raise ConversionError(f"{report.source} is no ViT of transformers: it has no block 0, and starts with {shown}.")
    if rates := [
        f"{name}={said[name]:g}" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob") if said.get(name)
    ]:
        report.adapted.append(f"left out, since its places differ here, in training alone: {', '.join(rates)}")
    try:
        return ViTConfig(
            image_size_px=_one(said, "image_size", report),
            patch_size_px=_one(said, "patch_size", report),
            embed_dim=said["hidden_size"],
            depth=blocks,
            num_heads=said["num_attention_heads"],
            mlp_dim=hidden.shape[0],
            pre_logits=pre_logits,
            qkv_bias=any(n.endswith((".attention.query.bias", ".attention.q_proj.bias")) for n in state),
            gelu="erf" if _GELU[said["hidden_act"]] == "erf" else "tanh",
            norm_eps=said["layer_norm_eps"],
        )
    except ValueError as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{report.source} does not describe a network: {error}") from error


def _their_config(ours: ViTConfig, classes: Sequence[str]) -> dict[str, Any]:
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": ours.embed_dim,
        "num_hidden_layers": ours.depth,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.mlp_dim,
        "hidden_act": _HIDDEN_ACT[ours.gelu],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": ours.norm_eps,
        "image_size": ours.image_size_px,
        "patch_size": ours.patch_size_px,
        "num_channels": 3,
        "qkv_bias": ours.qkv_bias,
        "id2label": {str(i): name for i, name in enumerate(classes)},
        "label2id": {name: i for i, name in enumerate(classes)},
    }


def _preprocessor(contract: ImageContract) -> dict[str, Any]:
    """The image contract in the words of `ViTImageProcessor`, which resizes by torchvision or Pillow, not as we do."""
    low, high = contract.low, contract.high
    size, cut = contract.evaluation.image_size_px, contract.evaluation.eval_resize_px
    square = {"height": size, "width": size}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": cut} if cut else square,
        "resample": _BILINEAR,
        "do_center_crop": bool(cut),
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [-low / (high - low)] * 3,
        "image_std": [1 / (high - low)] * 3,
    }


def _one(said: Mapping[str, Any], name: str, report: ConversionReport) -> int:
    value = said[name]
    sides = [value] if isinstance(value, int) else list(value)
    if len(set(sides)) != 1:
        raise ConversionError(f"{report.source}: not supported: {name}={value}; squares are.")
    return int(sides[0])
