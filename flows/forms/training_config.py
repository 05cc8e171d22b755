"""A form for a pre-training and its corpora, or for a branch -> the config and its inputs, or a refusal in one sentence (ValueError).
Starts nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitline.data_prep.find_corpus import Corpora, FoundCorpus
from vitline.data_prep.shard_format import Manifest
from vitline.flows.catalog.lists import find_model, find_run
from vitline.flows.catalog.records import list_run_keys
from vitline.flows.forms.forms import BranchRequest, PipelineRequest, PretrainRequest
from vitline.flows.forms.overrides import refuse_form_fields
from vitline.flows.forms.probed_corpora import with_probed_corpora
from vitline.flows.forms.training_draft import (
    check_loss,
    draft_training,
    recipe_of,
    recipe_title,
    steps_of,
    training_name,
)
from vitline.flows.forms.user_code import with_user_code
from vitline.infra.config import replace
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import checkpoint_steps, newest_step, no_checkpoint
from vitline.vit.config import MixedCorpus, MixtureConfig, ParentCheckpoint, TrainConfig, TrainRecipe
from vitline.vit.corpora.mixture_classes import NAMES, PREFIXED
from vitline.vit.models.config import check_same_network
from vitline.vit.published.model_record import ModelRecord, network_of, published_record
from vitline.vit.run.resolved import ResolvedTraining, resolve
from vitline.vit.run.run_spec import RunSpec, parent_spec


def resolve_pretrain(root: str, request: PretrainRequest) -> ResolvedTraining:
    """A pre-training on a prepared corpus, or on a mixture of them, from random weights or those of a model."""
    check_mixture_fields(request)
    corpora, names = Corpora(open_store(root)), (request.corpus, *(each.corpus for each in request.mix_with))
    found = [corpora.named(name) for name in names]
    name = request.name or training_name(_together([each.manifest for each in found]), recipe_title(recipe_of(request)))
    draft, published = draft_training(name, request), dict[str, ModelRecord]()
    if request.init_from is not None:
        model = initial_model(root, request.init_from)
        published[model] = published_record(open_store(model))
        check_same_network(network_of(open_store(model), published[model]), draft.recipe.model, "trained on as")
        draft = replace(draft, init_model=model)
    return with_corpora(root, corpora, draft, request, found, published)


def with_corpora(
    root: str,
    corpora: Corpora,
    draft: TrainConfig,
    request: PretrainRequest | PipelineRequest,
    found: Sequence[FoundCorpus],
    published: Mapping[str, ModelRecord] | None = None,
) -> ResolvedTraining:
    """The training of a draft on its prepared corpora, among `corpora`: `corpus` of the form, then those of `mix_with`. Raises as
    `on_corpora`, `with_probed_corpora` and `resolve`."""
    config = with_probed_corpora(on_corpora(draft, request, found), corpora)
    return resolve(config, root, corpora.opened, published)


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


def check_mixture_fields(request: PretrainRequest | PipelineRequest) -> None:
    """Refuses fields of a mixture without one."""
    if not request.mix_with and (request.corpus_weight != 1 or request.class_map != NAMES):
        field = "class_map" if request.class_map != NAMES else "corpus_weight"
        raise ValueError(
            f"{field}={getattr(request, field)!r} has an effect in a mixture only. Leave it out, or name further corpora in mix_with "
            "(`--corpus` once more)."
        )


def on_corpora(
    draft: TrainConfig, request: PretrainRequest | PipelineRequest, found: Sequence[FoundCorpus]
) -> TrainConfig:
    """The config of a draft on its prepared corpora. Refuses a loss that does not suit the labels."""
    for store, manifest in found:
        check_loss(draft, store.uri, manifest)
    val = draft.val_split if any(draft.val_split in manifest.splits for _, manifest in found) else None
    uris = [store.uri for store, _ in found]
    return replace(draft, corpus=uris[0], mixture=_mixture(request, uris), val_split=val)


def weights_of(request: PretrainRequest | PipelineRequest) -> list[float]:
    """The weights of the corpora of a form, in its order."""
    return [request.corpus_weight, *(each.weight for each in request.mix_with)]


def class_table_of(request: PretrainRequest | PipelineRequest) -> str | None:
    """The whole path or URI of the class table that a form names, since a job runs in another folder; None without a table."""
    if request.class_map in (NAMES, PREFIXED):
        return None
    return request.class_map if "://" in request.class_map else str(Path(request.class_map).expanduser().resolve())


def _mixture(request: PretrainRequest | PipelineRequest, uris: Sequence[str]) -> MixtureConfig | None:
    if not request.mix_with:
        return None
    corpora = (MixedCorpus(corpus=uri, weight=weight) for uri, weight in zip(uris, weights_of(request), strict=True))
    return MixtureConfig(corpora=tuple(corpora), class_map=class_table_of(request) or request.class_map)


def _together(manifests: Sequence[Manifest]) -> str:
    """`birds`, `birds-and-city`, or `birds-and-2-more`."""
    first, *others = (manifest.name for manifest in manifests)
    if not others:
        return first
    return f"{first}-and-{others[0] if len(others) == 1 else f'{len(others)}-more'}"


def resolve_branch(root: str, request: BranchRequest) -> ResolvedTraining:
    """A training that continues from a kept checkpoint. Its config is that of its parent but for what the request names, which is what
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
    corpora = Corpora(open_store(root))
    config = with_user_code(with_probed_corpora(config, corpora))
    training = resolve(config, root, corpora.opened, parent=spec)
    key = training.spec().run_key  # raises for what a branch may not change
    own = run.uri.rpartition("/")[0]
    if request.step not in checkpoint_steps(run) and newest_step(open_store(f"{own}/{key}")) is None:
        raise ValueError(no_checkpoint(run, request.step))
    return training


def _cooldown(spec: RunSpec, request: BranchRequest) -> dict[str, Any]:
    """The changes for the cooldown of a form. Raises ValueError where there can be none."""
    recipe = spec.config.recipe
    steps = steps_of(int(request.cooldown_images or 0), recipe, "cooldown_images")
    begun = recipe.total_steps - recipe.optim.cooldown_steps
    if recipe.optim.cooldown_steps and request.step > begun:
        raise ValueError(
            f"{spec.run_key} is in its cooldown at step {request.step:,}, which began at step {begun:,}. Branch from a checkpoint up "
            "to there, or without cooldown_images."
        )
    return cooldown_changes(recipe, request.step, steps)


def cooldown_changes(recipe: TrainRecipe, step: int, steps: int) -> dict[str, int]:
    """What a branch at a step changes for a cooldown of so many steps: the schedule stays as it is up to there, and then falls to
    zero."""
    return {
        "recipe.total_steps": step + steps,
        "recipe.optim.cooldown_steps": steps,
        "recipe.optim.decay_steps": recipe.optim.decay_steps or recipe.total_steps,
    }
