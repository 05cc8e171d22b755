"""The recipe for a user's own images. It depends on their number only, so the same folder always gives the same run."""

import re
from typing import Any, NamedTuple

from vitline.data_prep.shard_format import Manifest
from vitline.vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe, loss_for
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.plan import propose_num_lanes
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.variants import SIZES

PEAK_LR, WEIGHT_DECAY = 1e-3, 0.1
MOST_THREADS = 12  # decoding threads per GPU, as in the recipes of the paper


class Tier(NamedTuple):
    """Network and training length for corpora of up to `max_images` training images."""

    max_images: float
    network: dict[str, Any]
    epochs: int
    global_batch_size: int


SMALL = {"embed_dim": 128, "depth": 4, "num_heads": 4, "mlp_dim": 512}
# Few images need a small network and many epochs; a larger Vision Transformer needs more data (paper, Sec. 4.3).
TIERS = (
    Tier(3_000, {"image_size_px": 32, "patch_size_px": 8, **SMALL}, 80, 128),
    Tier(20_000, {"image_size_px": 64, "patch_size_px": 8, **SIZES["ti"], "depth": 6}, 60, 256),
    Tier(200_000, {"image_size_px": 128, "patch_size_px": 16, **SIZES["ti"]}, 60, 512),
    Tier(2_000_000, {"image_size_px": 224, "patch_size_px": 16, **SIZES["s"]}, 90, 1024),
    Tier(float("inf"), {"image_size_px": 224, "patch_size_px": 16, **SIZES["b"]}, 90, 4096),
)


def own_images(
    name: str,
    corpus_uri: str,
    manifest: Manifest,
    *,
    num_workers: int,
    total_steps: int | None = None,
    num_gpus: int | None = 0,
    num_cpus: int = 1,
) -> TrainConfig:
    """A complete config for pre-training on the `train` split of a corpus.

    Mean pooling; softmax loss for one label per image, sigmoid loss for several. `total_steps` replaces the epochs of the
    tier. With `num_gpus`, one worker per GPU in bfloat16 and compiled, with decoding threads on all of `num_cpus`. With 0
    GPUs, `num_workers` on CPUs in float32. None leaves the choice of the device to the cluster.
    """
    split = manifest.split("train")
    tier = next(t for t in TIERS if split.num_rows <= t.max_images)
    network = ViTConfig(pool="gap", head_bias_init=0.0 if manifest.single_label else -6.9, **tier.network)
    batch = tier.global_batch_size
    mean_bytes = manifest.counts.num_bytes / manifest.counts.num_accepted
    lanes = propose_num_lanes(
        split,
        global_batch_size=batch,
        shuffle_window=4,
        mean_row_group_bytes=round(mean_bytes * split.rows_per_row_group),
    )
    steps = total_steps if total_steps is not None else max(20, tier.epochs * split.num_rows // batch)
    recipe = TrainRecipe(
        model=network,
        input=InputConfig(
            global_batch_size=batch,
            num_lanes=lanes,
            shuffle_window=4,
            augment=AugmentConfig(image_size_px=network.image_size_px, min_area_fraction=0.3),
        ),
        optim=OptimConfig(
            peak_lr=PEAK_LR, warmup_steps=min(max(1, steps // 10), max(0, steps - 1)), weight_decay=WEIGHT_DECAY
        ),
        precision="bfloat16" if num_gpus else "float32",
        loss=loss_for(single_label=manifest.single_label),
        total_steps=steps,
    )
    return TrainConfig(
        name=re.sub("[._]", "-", name)[:63],
        corpus=corpus_uri,
        val_split="val" if "val" in manifest.splits else None,
        recipe=recipe,
        execution=ExecutionConfig(
            **on_devices(min(num_gpus or num_workers, lanes), num_gpus, num_cpus),
            save_every_steps=max(20, steps // 20),
            log_every_steps=max(1, min(10, steps // 20)),
        ),
    )


def on_devices(num_workers: int, num_gpus: int | None, num_cpus: int) -> dict[str, Any]:
    """The fields of ExecutionConfig that depend on the machine, for `num_workers` on these GPUs and CPUs."""
    if not num_gpus:
        return {"num_workers": num_workers, "device": "auto" if num_gpus is None else "cpu"}
    # One CPU core per worker is reserved for the training loop.
    threads = max(1, min(MOST_THREADS, num_cpus // num_workers - 1))
    return {
        "num_workers": num_workers,
        "device": "cuda",
        "micro_batch_size": 256,
        "decode_threads": threads,
        "compile": True,
    }
