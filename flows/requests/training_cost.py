"""What a training will take: steps, epochs, compute and memory, before it starts. No mathematics of its own."""

from math import ceil
from typing import Any, TypedDict

from infra.storage import open_store
from vit.config import TrainConfig

DEVICES = {
    "auto": "auto: a GPU for each worker if the cluster has GPUs or its autoscaler can add some, else a CPU",
    "cuda": "cuda: a GPU for each worker; waits for GPUs",
    "cpu": "cpu",
}


class TrainingCorpus(TypedDict):
    """The corpus of a training."""

    name: str
    digest: str
    images: int
    """Rows of the split that is trained on."""
    classes: int


class TrainingCost(TypedDict):
    """What a training will take."""

    config_digest: str
    corpus: TrainingCorpus
    steps: int
    images: int
    """Images to train on, counting repeats."""
    epochs: float
    forward_gflop_per_image: float
    training_exaflop: float
    workers: int
    device: str
    micro_batches_per_step: int
    reading: dict[str, Any]
    """The fields of `vit.input.plan.OrderPlan`."""


def training_cost(config: TrainConfig) -> TrainingCost:
    """Steps, epochs, compute, reading and memory of a training, before it starts.

    Raises ValueError for lanes, workers or batch that do not fit the corpus.
    """
    from data_prep.shard_format import load_manifest
    from vit.input.order import Order
    from vit.input.plan import plan_order
    from vit.models.flops import forward_flops

    recipe, manifest = config.recipe, load_manifest(open_store(config.corpus))
    split = manifest.split(config.split)
    order = Order(
        split,
        corpus_digest=manifest.digest,
        seed=recipe.seed,
        global_batch_size=recipe.input.global_batch_size,
        num_lanes=recipe.input.num_lanes,
        shuffle_window=recipe.input.shuffle_window,
    )
    reading = plan_order(
        order, world_size=config.execution.num_workers, mean_row_group_bytes=manifest.mean_row_group_bytes("train")
    )
    images = recipe.total_steps * recipe.input.global_batch_size
    flops = forward_flops(recipe.model, manifest.num_classes)
    return {
        "config_digest": config.config_digest,
        "corpus": {
            "name": manifest.name,
            "digest": manifest.digest,
            "images": split.num_rows,
            "classes": manifest.num_classes,
        },
        "steps": recipe.total_steps,
        "images": images,
        "epochs": images / split.num_rows,
        "forward_gflop_per_image": flops / 1e9,
        "training_exaflop": 3 * flops * images / 1e18,
        "workers": config.execution.num_workers,
        "device": DEVICES[config.execution.device],
        "micro_batches_per_step": ceil(
            recipe.input.global_batch_size / config.execution.num_workers / config.execution.micro_batch_size
        ),
        "reading": {name: getattr(reading, name) for name in reading.__dataclass_fields__},
    }
