"""Resolving, planning and describing trainings for the command line and for forms; no mathematics of its own."""

import json
import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from flows import console
from flows.catalog import find_corpus, find_model
from flows.pretrain import pretrain
from flows.stage import Cluster
from infra.config import replace
from infra.local.paths import log_dir
from infra.settings import Settings
from infra.storage import open_store
from vit.config import ExecutionConfig, InputConfig, OptimConfig, TrainConfig, TrainRecipe, ViTConfig

Plan = dict[str, Any]


def training_name(corpus: str, what: str) -> str:
    """A name for a training: corpora may also have dots and underscores in theirs."""
    return f"{re.sub('[._]', '-', corpus)}-{what}"[:63]


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """["recipe.seed=1"] -> {"recipe.seed": 1}; a value is JSON, or a string where it is none. Raises ValueError."""
    overrides = {}
    for item in items:
        path, sign, text = item.partition("=")
        if not sign or not path:
            raise ValueError(f"--set {item!r} is not of the form path.to.field=value.")
        try:
            overrides[path] = json.loads(text)
        except json.JSONDecodeError:
            overrides[path] = text
    return overrides


def resolve_config(root: str, corpus: str, recipe: str, overrides: Sequence[str]) -> TrainConfig:
    """The whole config of a pre-training. Raises ValueError for a corpus, recipe, field or value that does not exist."""
    from data_prep.shard_format import load_manifest
    from vit.recipes import recipe_named

    store = find_corpus(root, corpus)
    chosen, execution = recipe_named(recipe).make()
    manifest = load_manifest(store)
    if chosen.loss == "softmax" and not manifest.single_label:
        raise ValueError(
            f"{store.uri} has several labels an image; recipe {recipe!r} uses softmax. Add --set recipe.loss=sigmoid."
        )
    config = TrainConfig(
        name=training_name(manifest.name, recipe),
        corpus=store.uri,
        val_split="val" if "val" in manifest.splits else None,
        recipe=chosen,
        execution=execution,
    )
    return replace(config, **parse_overrides(overrides))


def finetune_config(
    root: str,
    model: str,
    corpus: str,
    steps: int,
    lr: float,
    batch: int,
    image_size_px: int | None,
    overrides: Sequence[str],
) -> TrainConfig:
    """The config of a fine-tuning by the paper's rules (arXiv:2010.11929, B.1.1)."""
    from data_prep.shard_format import load_manifest
    from vit.input.plan import propose_num_lanes
    from vit.published import ImageContract

    uri = find_model(root, model)
    published = open_store(uri).read_json("config.json")
    contract = ImageContract.model_validate(open_store(uri).read_json("image_contract.json"))
    size = image_size_px or published["model"]["image_size_px"]
    network = ViTConfig.model_validate(
        published["model"] | {"image_size_px": size, "pre_logits": False, "head_bias_init": 0.0}
    )
    store = find_corpus(root, corpus)
    manifest = load_manifest(store)
    split = manifest.split("train")
    lanes = propose_num_lanes(
        split, global_batch_size=batch, shuffle_window=4, mean_row_group_bytes=mean_row_group_bytes(manifest)
    )
    recipe = TrainRecipe(
        model=network,
        input=InputConfig(
            global_batch_size=batch, num_lanes=lanes, augment=replace(contract.evaluation, image_size_px=size)
        ),
        optim=OptimConfig(optimizer="sgd", peak_lr=lr, warmup_steps=min(500, steps // 5), schedule="cosine"),
        total_steps=steps,
    )
    config = TrainConfig(
        name=training_name(manifest.name, "finetune"),
        stage="finetune",
        corpus=store.uri,
        val_split="val" if "val" in manifest.splits else None,
        init_model=uri,
        recipe=recipe,
        execution=ExecutionConfig(save_every_steps=max(1, steps // 4)),
    )
    return replace(config, **parse_overrides(overrides))


def mean_row_group_bytes(manifest: Any) -> int:
    counts, rows = manifest.counts, manifest.split("train").rows_per_row_group
    return ceil(counts.num_bytes / counts.num_accepted * rows)


def plan_training(config: TrainConfig) -> Plan:
    """Steps, epochs, compute, reading and memory of a training, before anything is spent.

    Raises ValueError for lanes, workers or batch that do not fit the corpus.
    """
    from data_prep.shard_format import load_manifest
    from vit.input.order import Order
    from vit.input.plan import plan_order
    from vit.models.variants import forward_flops

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
        order, world_size=config.execution.num_workers, mean_row_group_bytes=mean_row_group_bytes(manifest)
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
        "micro_batches_per_step": ceil(
            recipe.input.global_batch_size / config.execution.num_workers / config.execution.micro_batch_size
        ),
        "reading": {name: getattr(reading, name) for name in reading.__dataclass_fields__},
    }


def train_and_show(settings: Settings, config: TrainConfig, *, as_json: bool) -> None:
    """Runs a training to its end and prints where the model lies and how it scored."""
    plan_training(config)  # what cannot be read as asked is refused before a cluster is started
    with Cluster(settings, log_dir(settings), console.say) as cluster:
        spec, result = pretrain(config, settings.root, cluster)
    shown = {"run": spec.run_key, "reused": result.reused, "wall_s": round(result.wall_s, 1), **result.state}
    if as_json:
        console.emit(shown)
    else:
        console.table("", ["field", "value"], [[key, str(value)] for key, value in shown.items()])


def describe_model(uri: str) -> Mapping[str, Any]:
    """A published model without its weights: sizes, FLOPs, contract, provenance."""
    from vit.models.variants import forward_flops

    store = open_store(uri)
    config = store.read_json("config.json")
    network = ViTConfig.model_validate(config["model"])
    sizes = [piece["end"] - piece["start"] for piece in config["tensors"]]
    return {
        "uri": store.uri,
        "digest": config["digest"],
        "model": config["model"],
        "classes": config["num_classes"],
        "parameters": sum(sizes) // 4,
        "weights_bytes": sum(sizes),
        "forward_gflop_per_image": forward_flops(network, config["num_classes"]) / 1e9,
        "image_contract": store.read_json("image_contract.json"),
        "provenance": config["provenance"],
    }
