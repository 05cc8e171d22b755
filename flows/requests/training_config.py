"""A form for a pre-training and its corpora, or for a branch -> the config, or a refusal in one sentence (ValueError). Starts
nothing."""

from pathlib import Path
from typing import Any

from data_prep.shard_format import Manifest, load_manifest
from flows.catalog import find_corpus, find_model, find_run
from flows.records import list_run_keys
from flows.requests.forms import BranchRequest, PretrainRequest
from flows.requests.overrides import refuse_form_fields
from flows.requests.training_draft import check_loss, draft_training, training_name
from infra.config import replace
from infra.runs.run_state import NO_STATE, read_state
from infra.storage import open_store
from vit.config import MixedCorpus, MixtureConfig, ParentCheckpoint, TrainConfig
from vit.corpora.mixture_classes import NAMES, PREFIXED
from vit.corpora.training_corpora import open_corpora
from vit.model_record import published_record
from vit.models.config import check_same_network, network_config
from vit.run_spec import RunSpec, make_spec, parent_spec
from vit.training.checkpoint_names import kept_steps, newest_step, no_checkpoint


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


def resolve_branch(root: str, request: BranchRequest) -> TrainConfig:
    """The config of a run that goes on from a kept checkpoint: that of its parent but for what the request names, which is what
    `allow` of the parent lists. A request whose run has begun needs the checkpoint no longer."""
    run = find_run(root, request.parent)
    parent = ParentCheckpoint(run=run.uri, step=request.step)
    spec = parent_spec(parent)
    changes: dict[str, Any] = dict(request.overrides)
    refuse_form_fields({path for path in changes if path.partition(".")[0] not in ("recipe", "execution", "val_split")})
    if request.cooldown_images is not None:
        changes = _cooldown(spec, request) | changes
    if request.num_workers is not None:
        changes["execution.num_workers"] = request.num_workers
    allow = tuple(sorted(path for path in changes if path.startswith("recipe.")))
    name = request.name or f"{spec.config.name}-branch"[:63]
    config = replace(spec.config, name=name, parent=replace(parent, allow=allow).model_dump(), **changes)
    key = make_spec(config, root).run_key  # raises for what a branch may not change
    own = run.uri.rpartition("/")[0]
    if request.step not in kept_steps(run) and newest_step(open_store(f"{own}/{key}")) is None:
        raise ValueError(no_checkpoint(run, request.step))
    return config


def _cooldown(spec: RunSpec, request: BranchRequest) -> dict[str, Any]:
    """The changes for a cooldown: the schedule stays that of the parent up to the checkpoint, and then falls to zero."""
    recipe = spec.config.recipe
    steps = int(request.cooldown_images or 0) // recipe.input.global_batch_size
    if steps < 1:
        raise ValueError(
            f"cooldown_images={request.cooldown_images:,} is less than one batch of {recipe.input.global_batch_size:,} images. Set it "
            "to at least that number."
        )
    begun = recipe.total_steps - recipe.optim.cooldown_steps
    if recipe.optim.cooldown_steps and request.step > begun:
        raise ValueError(
            f"{spec.run_key} is in its cooldown at step {request.step:,}, which began at step {begun:,}. Branch from a checkpoint up "
            "to there, or without cooldown_images."
        )
    return {
        "recipe.total_steps": request.step + steps,
        "recipe.optim.cooldown_steps": steps,
        "recipe.optim.decay_steps": recipe.optim.decay_steps or recipe.total_steps,
    }
