"""A form for a pre-training and its corpora -> the config, or a refusal in one sentence (ValueError). Starts nothing."""

from pathlib import Path

from data_prep.shard_format import Manifest, load_manifest
from flows.catalog import find_corpus, find_model
from flows.records import list_run_keys
from flows.requests.forms import PretrainRequest
from flows.requests.training_draft import check_loss, draft_training, training_name
from infra.config import replace
from infra.runs.run_state import NO_STATE, read_state
from infra.storage import open_store
from vit.config import MixedCorpus, MixtureConfig, TrainConfig
from vit.corpora.mixture_classes import NAMES, PREFIXED
from vit.corpora.training_corpora import open_corpora
from vit.model_record import published_record
from vit.models.config import check_same_network, network_config


def resolve_pretrain(root: str, request: PretrainRequest) -> TrainConfig:
    """The config of a pre-training on a prepared corpus, or on a mixture of them, from random weights or those of a model."""
    config = _from_random_weights(root, request)
    if request.init_from is None:
        return config
    model = initial_model(root, request.init_from)
    source = network_config(published_record(open_store(model))["model"])
    check_same_network(source, config.recipe.model, "trained on as")
    return replace(config, init_model=model)


def initial_model(root: str, reference: str) -> str:
    """URI of the model of a NAME, NAME/VERSION, NAME@ALIAS, URI, or of the key of a run that has published one."""
    if reference not in list_run_keys(open_store(root)):
        return find_model(root, reference)
    state = read_state(open_store(root).child(f"runs/{reference}")) or NO_STATE
    if "model" not in state:
        raise ValueError(
            f"{reference} has published no model; it is {state['state']}. Wait for its end, or start from one of its checkpoints "
            "(`vitline pretrain branch`)."
        )
    return find_model(root, state["model"])


def _from_random_weights(root: str, request: PretrainRequest) -> TrainConfig:
    store = find_corpus(root, request.corpus)
    manifest = load_manifest(store)
    if request.mix_with:
        return _on_mixture(root, request, store.uri, manifest)
    if request.corpus_weight != 1 or request.class_map != NAMES:
        field = "class_map" if request.class_map != NAMES else "corpus_weight"
        raise ValueError(
            f"{field}={getattr(request, field)!r} has an effect in a mixture only. Leave it out, or name further corpora in mix_with "
            "(`--corpus` once more)."
        )
    name = request.name or training_name(manifest.name, request.recipe)
    return on_corpus(draft_training(name, request), store.uri, manifest)


def on_corpus(config: TrainConfig, uri: str, manifest: Manifest) -> TrainConfig:
    """The config with its corpus; refuses a loss that does not suit the labels."""
    check_loss(config, uri, manifest)
    val = config.val_split if config.val_split in manifest.splits else None
    return replace(config, corpus=uri, val_split=val)


def _on_mixture(root: str, request: PretrainRequest, first: str, manifest: Manifest) -> TrainConfig:
    further = [find_corpus(root, each.corpus) for each in request.mix_with]
    manifests = [manifest, *(load_manifest(store) for store in further)]
    name = request.name or training_name(_together(manifests), request.recipe)
    config = draft_training(name, request)
    weighted = [
        MixedCorpus(corpus=first, weight=request.corpus_weight),
        *(MixedCorpus(corpus=s.uri, weight=e.weight) for s, e in zip(further, request.mix_with, strict=True)),
    ]
    for each, of in zip(weighted, manifests, strict=True):
        check_loss(config, each.corpus, of)
    val = config.val_split if any(config.val_split in each.splits for each in manifests) else None
    mixture = MixtureConfig(corpora=tuple(weighted), class_map=_absolute(request.class_map))
    config = replace(config, corpus=first, mixture=mixture.model_dump(), val_split=val)
    open_corpora(config)  # raises for classes that do not fit together
    return config


def _together(manifests: list[Manifest]) -> str:
    """`birds-and-city`, or `birds-and-2-more`."""
    first, *others = (manifest.name for manifest in manifests)
    return f"{first}-and-{others[0] if len(others) == 1 else f'{len(others)}-more'}"


def _absolute(class_map: str) -> str:
    """The class map with the whole path of a table, since a job runs in another folder."""
    if class_map in (NAMES, PREFIXED) or "://" in class_map:
        return class_map
    return str(Path(class_map).expanduser().resolve())
