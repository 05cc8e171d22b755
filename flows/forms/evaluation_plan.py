"""A form for an evaluation, or a batch prediction, -> what it will compute, or a refusal in one sentence (ValueError). Starts nothing."""

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.catalog.lists import find_model
from vitline.flows.forms.forms import EvaluateRequest, PredictRequest
from vitline.flows.forms.named_corpora import named_tasks
from vitline.flows.forms.requested_protocol import requested_protocols
from vitline.flows.forms.user_code import check_optimizer
from vitline.infra.config import FrozenConfig, digest_of
from vitline.infra.keys import run_key
from vitline.infra.names import known_names_text
from vitline.infra.storage import open_store
from vitline.vit.config import check_layers
from vitline.vit.evaluation.evaluate import TaskRef
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.features.prediction_plan import PredictionSpec
from vitline.vit.models.config import AnyNetworkConfig
from vitline.vit.published.model_record import published_network, published_record


class EvaluationPlan(FrozenConfig):
    """Models, tasks and protocol of one evaluation."""

    models: tuple[str | None, ...]
    """URIs; None is the control from scratch."""
    tasks: tuple[TaskRef, ...]
    architecture: AnyNetworkConfig
    protocol: Protocol | Probe
    seed: int
    num_seeds: int = 1
    rescore: bool = False
    keep_models: bool = False
    note: str | None = None
    """What the user should know of the tasks, as a sentence; None if there is nothing to say."""


def scored_models(model: str, protocol: Protocol | Probe, from_scratch: bool) -> tuple[str | None, ...]:
    """The models of an evaluation: the published one and, if it is wanted and the protocol trains networks, the control."""
    return (model, None) if from_scratch and isinstance(protocol, Protocol) else (model,)


def resolve_evaluate(root: str, request: EvaluateRequest) -> list[EvaluationPlan]:
    """The plans of the evaluations of a model by each protocol, in their order. Model and tasks exist."""
    uri = find_model(root, request.model)
    corpora = Corpora(open_store(root))
    tasks = named_tasks(root, corpora, request.tasks)
    refs = tuple(
        TaskRef(name=corpus.manifest.name, corpus=corpus.store.uri)
        for corpus in (corpora.named(task) for task in tasks.names)
    )
    protocols = requested_protocols(request.protocol, request.overrides, request.from_scratch).values()
    network = published_network(uri)
    for each in protocols:
        if isinstance(each, Protocol):
            check_layers(each.optim, network)
            check_optimizer(network, each.optim)
    if request.keep_models and (probes := [each.name for each in protocols if isinstance(each, Probe)]):
        raise ValueError(
            f"Protocol {probes[0]} trains no network, so there is none to keep: set keep_models to false, or leave the protocol out."
        )
    return [
        EvaluationPlan(
            models=scored_models(uri, protocol, request.from_scratch),
            tasks=refs,
            architecture=network,
            protocol=protocol,
            seed=request.seed,
            num_seeds=request.num_seeds,
            rescore=request.rescore,
            keep_models=request.keep_models,
            note=tasks.note,
        )
        for protocol in protocols
    ]


WHOLE = ("train", "val", "test")
"""The splits that contain every image once; others, such as `trainval`, are made of them."""


def resolve_predict(root: str, request: PredictRequest, corpora: Corpora | None = None) -> PredictionSpec:
    """The spec of a prediction whose model, corpus and splits exist. `corpora` are those of a request that it is a part of."""
    uri = find_model(root, request.model)
    corpus, manifest = (corpora or Corpora(open_store(root))).named(request.corpus)
    record = published_record(open_store(uri))
    for split in request.splits:
        if split not in manifest.splits:
            raise ValueError(
                f"splits has {split!r}, which is no split of {manifest.name}; {known_names_text(split, manifest.splits)}"
            )
    splits = tuple(dict.fromkeys(request.splits)) or tuple(split for split in WHOLE if split in manifest.splits)
    top_k, decode = min(request.top_k, record["num_classes"]), digest_of(manifest.decode_policy)
    inputs = {"corpus": manifest.digest, "decode": decode, "model": record["digest"]}
    key = run_key(f"{manifest.name}-predictions", "predict", digest_of([splits, top_k]), inputs)
    return PredictionSpec(
        run_key=key,
        model=uri,
        model_digest=record["digest"],
        corpus=corpus.uri,
        corpus_digest=manifest.digest,
        decode_digest=decode,
        splits=splits,
        top_k=top_k,
        root=open_store(root).uri,
    )
