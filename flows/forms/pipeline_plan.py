"""A form for a pipeline -> its plan and key, or a refusal in one sentence (ValueError). Starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.find_corpus import Corpora
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.named_corpora import CorpusChoice, choose_corpus, corpus_identity, named_tasks
from vitline.flows.forms.nights import NightSettings, night_settings
from vitline.flows.forms.probed_corpora import check_probed_names
from vitline.flows.forms.requested_protocol import requested_protocols
from vitline.flows.forms.training_config import check_mixture_fields, class_table_of, on_corpora, weights_of
from vitline.flows.forms.training_draft import draft_training, steps_of
from vitline.flows.forms.user_code import check_optimizer
from vitline.infra.config import digest_of
from vitline.infra.keys import run_key
from vitline.infra.names import known_names_text
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig, TrainRecipe, check_layers
from vitline.vit.corpora.class_table import read_class_table
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.input.mixture import Mixture


@dataclass(frozen=True)
class PipelinePlan:
    """The resolved request of a pretrain-then-transfer run."""

    key: str
    request: PipelineRequest
    sources: tuple[CorpusChoice, ...]
    """What to pre-train on: one corpus, or those of a mixture."""
    tasks: tuple[CorpusChoice, ...]
    training: TrainConfig
    """The pre-training without its corpora, which may not be prepared yet."""
    protocols: Mapping[str, Protocol | Probe]
    """By their names without overrides, in the order in which they run."""
    nights: NightSettings
    night: datetime | None = None
    note: str | None = None
    """What the user should know of the tasks, as a sentence; None if there is nothing to say."""

    @property
    def verdict_protocol(self) -> str:
        """The protocol whose scores are compared with those of other pipelines."""
        return self.nights.verdict_protocol or [*self.protocols][-1]


def resolve_pipeline(root: str, request: PipelineRequest, night: datetime | None = None) -> PipelinePlan:
    """The plan of a pipeline whose names exist and whose overrides fit. The same request and night give the same key."""
    check_mixture_fields(request)
    training = draft_training(request.name, request)
    changes = {k: v for k, v in request.overrides.items() if k.partition(".")[0] == "protocol"}
    protocols = requested_protocols(request.protocol, changes, request.from_scratch)
    for each in protocols.values():
        if isinstance(each, Protocol):
            check_layers(each.optim, training.recipe.model)
            check_optimizer(training.recipe.model, each.optim)
    corpora = Corpora(open_store(root))
    names, note = named_tasks(root, corpora, request.tasks)
    trained_on = (request.corpus, *(each.corpus for each in request.mix_with))
    sources = [choose_corpus(root, corpora, name) for name in trained_on]
    tasks = [choose_corpus(root, corpora, name) for name in names]
    check_probed_names(training, corpora, {each.name for each in (*sources, *tasks) if isinstance(each, CorpusConfig)})
    first, *others = protocols.values()
    protocol = [first, *others] if others else first
    identity: list[Any] = [training.recipe, training.val_split, protocol, request.seed, request.from_scratch]
    inputs = {f"{i}": corpus_identity(root, corpora, choice) for i, choice in enumerate((sources[0], *tasks))}
    if request.mix_with:
        identity.append(_check_mixture(corpora, training, request, sources))
        inputs |= {f"mixed.{i}": corpus_identity(root, corpora, choice) for i, choice in enumerate(sources[1:])}
    nights = night_settings(request.overrides)
    _check_verdict(nights, [*protocols])
    if nights.ingest:
        _check_growing(corpora, sources[0], request.corpus)
        identity.append("ingest")
        if night is not None:  # by its name: the digest changes when it grows
            inputs["0"] = corpora.at(str(sources[0])).manifest.name
    if nights.advance_images is not None:
        _check_long_run(training.recipe, nights)
        identity.append({"advance_images": nights.advance_images, "cooldown_images": nights.cooldown_images})
    if nights.cooldown_at_hours is not None:
        _check_cooldown(training.recipe, nights, request.deadline_hours)
        identity.append({"cooldown_at_hours": nights.cooldown_at_hours, "cooldown_images": nights.cooldown_images})
    if nights.num_seeds > 1:  # one seed is no part of the key
        identity.append(nights.num_seeds)
    key = run_key(request.name, "pipeline", digest_of(identity), inputs, night)
    return PipelinePlan(key, request, tuple(sources), tuple(tasks), training, protocols, nights, night, note)


def _check_verdict(nights: NightSettings, protocols: Sequence[str]) -> None:
    """Refuses a verdict by a protocol that the request does not have."""
    if nights.verdict_protocol not in (None, *protocols):
        raise ValueError(
            f"nights.verdict_protocol={nights.verdict_protocol!r} is not among the protocols of the request; "
            f"{known_names_text(str(nights.verdict_protocol), protocols)}"
        )


def _check_growing(corpora: Corpora, source: CorpusChoice, name: str) -> None:
    """Refuses a corpus that cannot grow."""
    if not isinstance(source, str):
        raise ValueError(
            f"nights.ingest: {name!r} is a preset, whose images stay the same. Prepare a corpus of your own, or leave nights.ingest out."
        )
    manifest = corpora.at(source).manifest
    if manifest.view_of is not None or "request" not in manifest.provenance:
        raise ValueError(
            f"nights.ingest: {manifest.name}/{manifest.version} is a subset or has no source on record, so that nothing can be added to "
            "it. Give the whole corpus."
        )
    try:
        CorpusConfig.model_validate(manifest.provenance["request"])
    except ValidationError as error:
        raise ValueError(
            f"nights.ingest: {manifest.name}/{manifest.version} was prepared by another version of vitline, from a source of kind "
            f"{manifest.provenance['request'].get('source', {}).get('kind')!r} or with fields that this version does not know, so that "
            "it cannot look for new images there. Leave nights.ingest out; images can be added with `vitline data prepare --add-to`."
        ) from error


def _check_long_run(recipe: TrainRecipe, nights: NightSettings) -> None:
    """Refuses parts of a long run that are too short for its batch or its warmup."""
    batch, advance = recipe.input.global_batch_size, nights.advance_images or 0
    least = batch * (recipe.optim.steps_to_peak + 1)
    if advance < least:
        raise ValueError(
            f"nights.advance_images={advance:,} ends within the warmup, which no cooldown can follow. Set it to at least {least:,}, the "
            f"warmup of {recipe.optim.steps_to_peak:,} steps and one batch of {batch:,} images."
        )
    _check_cooldown(recipe, nights, None)


def _check_cooldown(recipe: TrainRecipe, nights: NightSettings, deadline_hours: float | None) -> None:
    """Refuses a cooldown that is too short, comes after the deadline, or is the second one of its recipe."""
    steps_of(nights.cooldown_images or 0, recipe, "nights.cooldown_images")
    at = nights.cooldown_at_hours
    if at is not None and deadline_hours is not None and at >= deadline_hours:
        raise ValueError(
            f"nights.cooldown_at_hours={at:g} is not before deadline_hours={deadline_hours:g}, by which cooldown and transfer are to be "
            "done. Set an earlier time."
        )
    if at is not None and recipe.optim.cooldown_steps:
        raise ValueError(
            f"nights.cooldown_at_hours is not supported with recipe.optim.cooldown_steps={recipe.optim.cooldown_steps}: the recipe has a "
            "cooldown of its own. Set that to 0."
        )


def _check_mixture(
    corpora: Corpora, training: TrainConfig, request: PipelineRequest, sources: Sequence[CorpusChoice]
) -> dict[str, Any]:
    """Weights and classes of a mixture, for the key. Refuses what does not fit together: classes and labels only where all corpora are
    prepared, else they are checked before the training starts."""
    names = [request.corpus, *(each.corpus for each in request.mix_with)]
    for i, source in enumerate(sources):
        if source in sources[:i]:
            raise ValueError(f"The mixture has {names[i]} twice. Name it once, with the sum of the weights.")
    batch, table = training.recipe.input.global_batch_size, class_table_of(request)
    weights = Mixture(weights_of(request), seed=request.seed, global_batch_size=batch).weights
    rows = [row[1:] for row in read_class_table(table).rows] if table else None  # without its place
    prepared = [source for source in sources if isinstance(source, str)]
    if len(prepared) == len(sources):
        config = on_corpora(training, request, [corpora.at(uri) for uri in prepared])
        open_corpora(config, corpora.opened)  # raises for what does not fit together
    return {"weights": weights.tolist(), "class_map": rows or request.class_map}
