"""Converts ViTForImageClassification and ViTModel of transformers to our networks and back, without importing transformers.

A network that computes another function is refused with the reason. Tested with transformers 5.23.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitline.vit.convert.folder import CONFIG, check_class_names, read_folder, write_folder
from vitline.vit.convert.preprocessing import mean_and_std
from vitline.vit.convert.report import ConversionError, ConversionReport, Converted, finish, refusing
from vitline.vit.convert.shapes import Entries
from vitline.vit.convert.tables import Table, give, position_table
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.network import Network
from vitline.vit.models.vit import VisionTransformer

# Our name: (name in files of every version; name in memory in transformers 5).
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
# The defaults of transformers: a config.json may leave out fields that equal them.
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
    """The network in a folder that `save_pretrained` of `ViTForImageClassification` or `ViTModel` wrote.

    Raises ConversionError like `from_huggingface`, for pickles, and if `config.json` is missing.
    """
    state, config = read_folder(directory)
    if config is None:
        raise ConversionError(
            f"{directory} has no {CONFIG}, which names the number of heads, the GELU and the epsilon. Add it from the "
            "place where the weights are from."
        )
    return from_huggingface(state, config, str(directory), num_classes=num_classes)


def from_huggingface(
    state: Mapping[str, Tensor], config: Mapping[str, Any], source: str, *, num_classes: int | None = None
) -> Converted:
    """The network from a state dict and `config.json` of transformers, with a report of every entry.

    Accepts old and new names, with and without the prefix `vit.`. A pooler becomes our pre-logits layer, unless there is a
    classifier: then it is skipped, because the classifier takes the class token itself. `num_classes` is needed for files
    without a classifier, which get a head of zeros. Raises ConversionError naming entries or settings with which our
    network would compute another function.
    """
    report = ConversionReport(source=source, family="transformers, ViT")
    with refusing(source):
        prefix = "vit." if any(name.startswith("vit.") for name in state) else ""
        in_memory = any(name.startswith(f"{prefix}layers.") for name in state)
        table = {n: t.replace("vit.", prefix, 1) for n, t in (IN_MEMORY if in_memory else CLASSIC).items()}
        entries = Entries(state, table, report, "a ViT of transformers")
        has_head = entries.has("head.weight")
        ours = _config(entries, config, pre_logits=entries.has("pre_logits.weight") and not has_head)
        classes = entries.classes(num_classes)
        weights, unused = entries.take(ours, classes)
        reasons = {f"{prefix}embeddings.mask_token": "the mask token is used in pre-training only"}
        if has_head:
            pooler = table["pre_logits"]
            reasons |= {f"{pooler}.{leaf}": "the classifier does not use the pooler" for leaf in ("weight", "bias")}
        report.skipped |= {name: why for name, why in reasons.items() if name in unused}
        return finish(ours, classes, weights, report, unused - set(report.skipped))


def write_huggingface(
    network: Network, directory: str | Path, classes: Sequence[str], contract: ImageContract | None = None
) -> None:
    """Writes a folder that `ViTForImageClassification.from_pretrained(directory)` loads, with the same logits.

    With `contract`, it also writes `preprocessor_config.json`. Dropout and stochastic depth are left out: transformers
    has no dropout between the layers of the MLP, and no stochastic depth. Raises ValueError, "not supported: ...", for
    what its ViT cannot compute: hybrids and BiT, a pool other than the class token, a pre-logits layer before the head,
    relative or every-layer position embeddings. Also raises it for a wrong number of class names, or duplicate ones.
    """
    check_class_names(classes, network.num_classes)
    if twice := [name for name, times in Counter(classes).items() if times > 1]:
        raise ValueError(
            f"{', '.join(sorted(twice)[:6])}: more than one class has this name, "
            "but transformers identifies classes by their "
            "names. Give each class a unique name."
        )
    if not isinstance(network, VisionTransformer):
        raise ValueError(f"not supported: {network.config.summary} in transformers, whose ViT takes patches of pixels.")
    ours = network.config
    if ours.pool != "token":
        raise ValueError(f"not supported: pool={ours.pool} in transformers, whose ViT uses the class token.")
    if ours.pre_logits:
        raise ValueError(
            "not supported: pre_logits in transformers, whose classifier takes the class token itself. Fine-tune the model "
            "first, which drops the layer."
        )
    files: dict[str, Any] = {CONFIG: _their_config(ours, classes)}
    if contract is not None:
        files["preprocessor_config.json"] = _preprocessor(contract)
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith("pos_embed")}
    positions = position_table(network, "transformers")
    weights["pos_embed"] = torch.zeros(1, ours.num_tokens, ours.embed_dim) if positions is None else positions
    write_folder(directory, give(weights, CLASSIC), files)


def _config(entries: Entries, config: Mapping[str, Any], *, pre_logits: bool) -> ViTConfig:
    report, settings = entries.report, _DEFAULTS | dict(config)
    refused = f"{report.source}: not supported: "
    if (kind := settings.get("model_type", "vit")) != "vit":
        raise ConversionError(f"{refused}model_type={kind!r}; supported: 'vit'.")
    if settings["hidden_act"] not in tuple(_GELU):
        raise ConversionError(f"{refused}hidden_act={settings['hidden_act']!r}; supported: {', '.join(_GELU)}.")
    if settings["num_channels"] != 3:
        raise ConversionError(f"{refused}num_channels={settings['num_channels']}; supported: 3.")
    if pre_logits and settings["pooler_act"] != "tanh":
        raise ConversionError(f"{refused}pooler_act={settings['pooler_act']!r}; supported: tanh.")
    if rates := [
        f"{name}={settings[name]:g}"
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")
        if settings.get(name)
    ]:
        report.adapted.append(
            f"left out, because our networks apply dropout elsewhere (in training only): {', '.join(rates)}"
        )
    return ViTConfig(
        image_size_px=_one(settings, "image_size", report),
        patch_size_px=_one(settings, "patch_size", report),
        embed_dim=settings["hidden_size"],
        depth=entries.depth,
        num_heads=settings["num_attention_heads"],
        mlp_dim=entries.mlp_dim,
        pre_logits=pre_logits,
        qkv_bias=entries.qkv_bias,
        gelu="erf" if _GELU[settings["hidden_act"]] == "erf" else "tanh",
        norm_eps=settings["layer_norm_eps"],
    )


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
    """The image contract as settings of `ViTImageProcessor`, whose resize (torchvision or Pillow) differs from ours."""
    mean, std = mean_and_std(contract.low, contract.high)
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
        "image_mean": mean,
        "image_std": std,
    }


def _one(settings: Mapping[str, Any], name: str, report: ConversionReport) -> int:
    value = settings[name]
    sides = [value] if isinstance(value, int) else list(value)
    if len(set(sides)) != 1:
        raise ConversionError(f"{report.source}: not supported: {name}={value}; only squares are supported.")
    return int(sides[0])
