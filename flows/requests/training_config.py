"""A form for a pre-training and its corpus -> the config, or a refusal in one sentence (ValueError). Starts nothing."""

from data_prep.shard_format import Manifest, load_manifest
from flows.catalog import find_corpus
from flows.requests.forms import PretrainRequest
from flows.requests.training_draft import draft_training, training_name
from infra.config import replace
from vit.config import TrainConfig


def resolve_pretrain(root: str, request: PretrainRequest) -> TrainConfig:
    """The config of a pre-training on a prepared corpus."""
    store = find_corpus(root, request.corpus)
    manifest = load_manifest(store)
    name = request.name or training_name(manifest.name, request.recipe)
    return on_corpus(draft_training(name, request), store.uri, manifest)


def on_corpus(config: TrainConfig, uri: str, manifest: Manifest) -> TrainConfig:
    """The config with its corpus; refuses a loss that does not suit the labels."""
    if config.recipe.loss == "softmax" and not manifest.single_label:
        raise ValueError(
            f"{uri} has several labels per image, but the training {config.name!r} uses a softmax loss. "
            'Set the override {"recipe.loss": "sigmoid"} (`--set recipe.loss=sigmoid`).'
        )
    val = config.val_split if config.val_split in manifest.splits else None
    return replace(config, corpus=uri, val_split=val)
