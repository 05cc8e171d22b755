"""A form for a pipeline -> its plan and key, or a refusal in one sentence (ValueError). Starts nothing."""

from dataclasses import dataclass
from datetime import date

from flows.nights.settings import NightSettings, night_settings
from flows.requests.forms import PipelineRequest
from flows.requests.named_corpora import CorpusChoice, choose_corpus, corpus_identity, named_tasks
from flows.requests.requested_protocol import requested_protocol
from flows.requests.training_draft import draft_training
from infra.config import digest_of
from infra.keys import run_key
from infra.storage import open_store
from vit.config import TrainConfig
from vit.vtab.probes import Probe
from vit.vtab.protocols import Protocol


@dataclass(frozen=True)
class PipelinePlan:
    """The resolved request of a pretrain-then-transfer run."""

    key: str
    request: PipelineRequest
    source: CorpusChoice
    tasks: tuple[CorpusChoice, ...]
    training: TrainConfig
    """The pre-training without its corpus, which may not be prepared yet."""
    protocol: Protocol | Probe
    nights: NightSettings
    night: date | None = None
    note: str | None = None
    """What the user should know of the tasks, as a sentence; None if there is nothing to say."""


def resolve_pipeline(root: str, request: PipelineRequest, night: date | None = None) -> PipelinePlan:
    """The plan of a pipeline whose names exist and whose overrides fit. The same request and night give the same key."""
    training = draft_training(request.name, request)
    changes = {k: v for k, v in request.overrides.items() if k.startswith("protocol.")}
    protocol = requested_protocol(request.protocol, changes, request.from_scratch)
    names, note = named_tasks(root, request.tasks)
    source, *tasks = (choose_corpus(root, name) for name in (request.corpus, *names))
    nights = night_settings(request.overrides)
    identity = [training.recipe, training.val_split, protocol, request.seed, request.from_scratch]
    if nights.num_seeds > 1:  # with one seed, keys are those of versions that knew no more
        identity.append(nights.num_seeds)
    inputs = {f"{i}": corpus_identity(open_store(root), choice) for i, choice in enumerate((source, *tasks))}
    key = run_key(request.name, "pipeline", digest_of(identity), inputs, night)
    return PipelinePlan(key, request, source, tuple(tasks), training, protocol, nights, night, note)
