"""timm's names of our modules, and of the arguments that both have."""

from vitline.vit.convert.tables import Table

TRANSFORMER: Table = {
    "patch_embed": "patch_embed.proj",
    "cls_token": "cls_token",
    "pos_embed": "pos_embed",
    "blocks.#.norm1": "blocks.#.norm1",
    "blocks.#.attention.qkv": "blocks.#.attn.qkv",
    "blocks.#.attention.out": "blocks.#.attn.proj",
    "blocks.#.norm2": "blocks.#.norm2",
    "blocks.#.fc1": "blocks.#.mlp.fc1",
    "blocks.#.fc2": "blocks.#.mlp.fc2",
    "norm": "norm",
    "pool.probe": "attn_pool.latent",
    "pool.query": "attn_pool.q",
    "pool.key_value": "attn_pool.kv",
    "pool.out": "attn_pool.proj",
    "pool.norm": "attn_pool.norm",
    "pool.fc1": "attn_pool.mlp.fc1",
    "pool.fc2": "attn_pool.mlp.fc2",
    "head": "head",
}
BACKBONE = "patch_embed.backbone"
HYBRID: Table = TRANSFORMER | {
    "resnet.conv_root": f"{BACKBONE}.stem.conv",
    "resnet.norm_root": f"{BACKBONE}.stem.norm",
    **{f"resnet.stages.#.#.{kind}{n}": f"{BACKBONE}.stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "resnet.stages.#.#.conv_proj": f"{BACKBONE}.stages.#.blocks.#.downsample.conv",
    "resnet.stages.#.#.norm_proj": f"{BACKBONE}.stages.#.blocks.#.downsample.norm",
}  # fmt: skip
STEM_ONLY: Table = HYBRID | {"resnet.conv_root": f"{BACKBONE}.conv", "resnet.norm_root": f"{BACKBONE}.norm"}
BIT: Table = {
    "conv_root": "stem.conv",
    **{f"stages.#.#.{kind}{n}": f"stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "stages.#.#.conv_proj": "stages.#.blocks.#.downsample.conv",
    "norm": "norm",
    "head": "head.fc",
}

NORM_EPS = 1e-6  # of timm's LayerNorm; a config.json cannot set another one
# timm's value -> ours (the tables above map ours to timm's).
GELU = {"gelu": "erf", "gelu_tanh": "tanh"}
POOL = {"token": "token", "avg": "gap", "map": "map"}
DROPOUT = ("pos_drop_rate", "proj_drop_rate")
