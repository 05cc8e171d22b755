"""A form for an evaluation -> models, tasks and protocol, or a refusal in one sentence (ValueError). Starts nothing."""

from data_prep.shard_format import load_manifest
from flows.catalog import find_corpus, find_model
from flows.requests.forms import EvaluateRequest
from flows.requests.named_corpora import named_tasks
from flows.requests.requested_protocol import requested_protocol
from infra.config import FrozenConfig
from infra.storage import open_store
from vit.model_record import published_record
from vit.models.config import AnyNetworkConfig, network_config
from vit.vtab.evaluate import TaskRef
from vit.vtab.probes import Probe
from vit.vtab.protocols import Protocol


class EvaluationPlan(FrozenConfig):
    """Models, tasks and protocol of an evaluation."""

    models: tuple[str | None, ...]
    """URIs; None is the control from scratch."""
    tasks: tuple[TaskRef, ...]
    architecture: AnyNetworkConfig
    protocol: Protocol | Probe
    seed: int
    num_seeds: int = 1
    rescore: bool = False
    note: str | None = None
    """What the user should know of the tasks, as a sentence; None if there is nothing to say."""


def resolve_evaluate(root: str, request: EvaluateRequest) -> EvaluationPlan:
    """The plan of an evaluation whose model and tasks exist."""
    uri = find_model(root, request.model)
    tasks = named_tasks(root, request.tasks)
    return EvaluationPlan(
        models=(uri, None) if request.from_scratch else (uri,),
        tasks=tuple(
            TaskRef(name=load_manifest(corpus).name, corpus=corpus.uri)
            for corpus in (find_corpus(root, task) for task in tasks.names)
        ),
        architecture=network_config(published_record(open_store(uri))["model"]),
        protocol=requested_protocol(request.protocol, request.overrides, request.from_scratch),
        seed=request.seed,
        num_seeds=request.num_seeds,
        rescore=request.rescore,
        note=tasks.note,
    )
