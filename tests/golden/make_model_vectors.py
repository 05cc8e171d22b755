"""Writes `model_vectors.json`: the logits of the original networks, in float64, for random weights and images.

Needs jax, flax, scipy and torch, and checkouts of the three original repositories (the commits are stored with the
vectors); TensorFlow and the input pipelines are not needed. Run from the project's root:

    python tests/golden/make_model_vectors.py VISION_TRANSFORMER_DIR BIG_VISION_DIR BIG_TRANSFER_DIR
"""

import functools
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from random_weights import random_images, random_weights  # noqa: E402

COMMITS = {
    "vision_transformer": "c6de1e5378c9831a8477feb30994971bdc409e46",
    "big_vision": "0127fb6b337ee2a27bf4e54dea79cff176527356",
    "big_transfer": "140de6e704fd8d61f3e5ea20ffde130b7d5fd065",
}
TINY = {"hidden_size": 48, "transformer": {"mlp_dim": 96, "num_heads": 4, "num_layers": 3}}
TINY_BV = {"width": 48, "depth": 3, "mlp_dim": 96, "num_heads": 4, "patch_size": (8, 8)}


def main() -> None:
    vision_transformer, big_vision, big_transfer = map(Path, sys.argv[1:4])
    stub_utils()
    sys.path[:0] = [str(vision_transformer), str(big_vision), str(big_transfer)]
    import jax

    jax.config.update("jax_enable_x64", True)
    cases = {
        "paper-token": original(TINY | {"representation_size": 48}, 8, 32, pre_linen, gradient=True),
        "paper-gap": original(TINY | {"classifier": "gap"}, 8, 32, unchanged),
        "paper-head-dim-80": original(
            {"hidden_size": 160, "transformer": {"mlp_dim": 320, "num_heads": 2, "num_layers": 2}}, 7, 30, pre_linen
        ),
        "paper-hybrid": original(TINY | hybrid(1, 2), 1, 64, old_group_norm),
        "paper-hybrid-odd-sides": original(TINY | hybrid(1, 1, 1), 1, 50, pre_linen),
        "paper-stem-only": original(TINY | hybrid(), 8, 64, unchanged),
        "paper-b16": original(
            {"hidden_size": 768, "transformer": {"mlp_dim": 3072, "num_heads": 12, "num_layers": 12}},
            16, 224, pre_linen, num_classes=100, num_images=1,
        ),
        "big-vision-token": later(TINY_BV | {"pool_type": "tok", "rep_size": True}, 32, prefix("params/")),
        "big-vision-map": later(TINY_BV | {"pool_type": "map"}, 32, prefix("opt/target/")),
        "big-vision-sincos": later(TINY_BV | {"posemb": "sincos2d", "rep_size": True}, 40, prefix("params/img/")),
        "big-vision-scanned": later(TINY_BV | {"scan": True}, 32, unchanged),
        "big-vision-depth-24": later(TINY_BV | {"depth": 24}, 32, unchanged),
        "bit": bit((1, 1, 2, 1), 1, 70),
        "bit-wide": bit((1, 1, 1, 1), 2, 64),
    }  # fmt: skip
    vectors = {"commits": COMMITS, "command": "python tests/golden/make_model_vectors.py", "cases": cases}
    (HERE / "model_vectors.json").write_text(json.dumps(vectors, indent=None, separators=(",", ":")) + "\n")


def stub_utils() -> None:
    """big_vision's models import its utilities, which import TensorFlow; networks use none of them."""
    sys.modules["big_vision.utils"] = types.ModuleType("big_vision.utils")


def hybrid(*stages: int) -> dict[str, Any]:
    config = types.SimpleNamespace(num_layers=stages, width_factor=1)
    return {"resnet": config}


# Namings of files: (today's name, array) -> (name in a file, array).


def unchanged(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    return name, array


def pre_linen(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Names as in the files of the paper: counters over all layers of a block."""
    if "encoderblock" in name:
        for new, old in (("LayerNorm_1", "LayerNorm_2"), ("Attention_0", "Attention_1"), ("MlpBlock_0", "MlpBlock_3")):
            name = name.replace(new, old)
    return name, array


def old_group_norm(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    parent = name.split("/")[-2] if "/" in name else ""
    return pre_linen(name, array.reshape(1, 1, 1, -1) if parent.startswith("gn") else array)


def prefix(text: str):
    return lambda name, array: (text + name, array)


# The originals.


def original(config, patch, size, naming, num_classes=7, num_images=2, gradient=False):
    """A network of the vision_transformer repository."""
    import jax.numpy as jnp

    models = importlib.import_module("vit_jax.models_vit")
    # Its blocks fix float32; everything else follows its input.
    block = models.Encoder1DBlock
    models.Encoder1DBlock = functools.partial(block, dtype=jnp.float64)
    try:
        settings = {"classifier": "token", "representation_size": None} | config
        transformer = settings.pop("transformer") | {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
        model = models.VisionTransformer(
            num_classes=num_classes,
            patches=types.SimpleNamespace(size=(patch, patch)),
            transformer=transformer,
            **settings,
        )
        return answers(model, size, naming, num_images, gradient, train=False)
    finally:
        models.Encoder1DBlock = block


def later(config, size, naming):
    """A network of the big_vision repository."""
    models = importlib.import_module("big_vision.models.vit")
    if not isinstance(models.MlpBlock, functools.partial):  # the attention pool's fixes float32
        models.MlpBlock = functools.partial(models.MlpBlock, dtype_mm="float64")
    return answers(models.Model(num_classes=7, dtype_mm="float64", **config), size, naming, 2, False)


def answers(model, size, naming, num_images, gradient, **call):
    """Seeds, shapes by name in the file, logits, and of one case the gradients, as norm and as product with a direction."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import flatten_dict, unflatten_dict

    images = jnp.asarray(random_images(num_images, size, seed=1), jnp.float64)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, **call))["params"]
    named = {name: np.zeros(leaf.shape, np.int8) for name, leaf in flatten_dict(shapes, sep="/").items()}
    in_file = dict(naming(name, array) for name, array in named.items())
    back = dict(zip((naming(name, array)[0] for name, array in named.items()), named, strict=True))
    weights = random_weights({name: array.shape for name, array in in_file.items()}, seed=2)
    params = unflatten_dict(
        {back[n]: jnp.asarray(w, jnp.float64).reshape(named[back[n]].shape) for n, w in weights.items()}, sep="/"
    )

    def logits(params):
        out = model.apply({"params": params}, images, **call)
        return out[0] if isinstance(out, tuple) else out

    case = {
        "size_px": size,
        "num_images": num_images,
        "shapes": {name: list(array.shape) for name, array in in_file.items()},
        "logits": np.asarray(logits(params), np.float64).tolist(),
    }
    if gradient:
        targets = jax.nn.one_hot(jnp.arange(num_images) + 1, 7)
        grads = jax.grad(lambda p: -(targets * jax.nn.log_softmax(logits(p))).sum())(params)
        case["gradients"] = {
            naming(n, named[n])[0]: np.asarray(g).ravel().tolist()[:64] for n, g in flatten_dict(grads, sep="/").items()
        }
    return case


def bit(stages, width, size):
    """A network of the big_transfer repository: its PyTorch code, which pads the stem's pool with zeros as TensorFlow's."""
    import torch

    models = importlib.import_module("bit_pytorch.models")
    model = models.ResNetV2(list(stages), width, head_size=7).double().eval()
    names = {
        "resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64 * width),
        "resnet/group_norm/gamma": (2048 * width,),
        "resnet/group_norm/beta": (2048 * width,),
        "resnet/head/conv2d/kernel": (1, 1, 2048 * width, 7),
        "resnet/head/conv2d/bias": (7,),
    }
    channels = 64 * width
    for b, units in enumerate(stages):
        mid = 64 * width * 2**b
        for u in range(units):
            unit = f"resnet/block{b + 1}/unit{u + 1:02d}"
            for letter, (side, i, o) in zip("abc", ((1, channels, mid), (3, mid, mid), (1, mid, 4 * mid)), strict=True):
                names[f"{unit}/{letter}/standardized_conv2d/kernel"] = (side, side, i, o)
                names |= {f"{unit}/{letter}/group_norm/{part}": (i,) for part in ("gamma", "beta")}
            if u == 0:
                names[f"{unit}/a/proj/standardized_conv2d/kernel"] = (1, 1, channels, 4 * mid)
            channels = 4 * mid
    weights = random_weights(names, seed=2)
    model.load_from(weights)
    with torch.no_grad():  # load_from leaves the head alone where it fine-tunes
        model.head.conv.weight.copy_(torch.from_numpy(weights["resnet/head/conv2d/kernel"].transpose(3, 2, 0, 1)))
        model.head.conv.bias.copy_(torch.from_numpy(weights["resnet/head/conv2d/bias"]))
        images = torch.from_numpy(random_images(2, size, seed=1)).double().permute(0, 3, 1, 2)
        logits = model(images)
    return {
        "size_px": size,
        "num_images": 2,
        "shapes": {n: list(s) for n, s in names.items()},
        "logits": logits.tolist(),
    }


if __name__ == "__main__":
    main()
