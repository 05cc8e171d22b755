"""Resolves filled-in forms to configs and plans, and refuses what a JSON schema cannot. Starts nothing.

Each function raises ValueError with one sentence: for a corpus, model or field that does not exist, or a rule between fields.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from data_prep.config import CorpusConfig, CorpusRecipe, Source
from data_prep.corpora.presets import PRESETS
from data_prep.find_corpus import corpus_version, prepared_corpus
from data_prep.shard_format import Manifest, load_manifest
from flows.catalog import find_corpus, find_model, list_corpora
from flows.requests.forms import EvaluateRequest, FinetuneRequest, PipelineRequest, PrepareRequest, PretrainRequest
from flows.requests.refusals import told
from infra.config import FrozenConfig, digest_of, replace
from infra.keys import run_key
from infra.names import did_you_mean, there_are
from infra.storage import Store, open_store
from vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe
from vit.input.config import AugmentConfig, InputConfig
from vit.input.plan import propose_num_lanes
from vit.model_names import is_location
from vit.models.config import AnyNetworkConfig, NetworkConfig, network_config
from vit.recipes import recipe_named
from vit.vtab.evaluate import TaskRef, task_facts
from vit.vtab.probes import Probe
from vit.vtab.protocols import LargerTask, Protocol, protocol_named
from vit.vtab.tasks import VTAB_TASKS, TaskSplits

CorpusChoice = CorpusConfig | str
"""A corpus to prepare, or the URI of a prepared one."""
VTAB = "vtab"
"""In a form's list of tasks: all tasks of VTAB that are prepared."""
SOURCES = get_args(get_args(Source)[0])
"""The config classes of all kinds of sources."""


def resolve_prepare(root: str, request: PrepareRequest) -> CorpusConfig:
    """The config of a corpus whose source and other corpora exist. Of a preset only `overrides` can change fields."""
    if (request.preset is None) == (request.source is None):
        raise ValueError(
            f"Both a preset, {request.preset}, and a source, {request.source}, were given: empty one of the two fields."
            if request.preset
            else "Neither a preset nor a source was given: choose a preset, or set source to the place of your images."
        )
    from data_prep.plan.leakage import splits_to_keep_out
    from data_prep.plan.plan_shards import Base

    config = _preset(request) if request.preset else _of_source(request)
    store = open_store(root)
    corpus_version(store, config)  # raises if the source, the class map or a named corpus does not exist
    for name in config.recipe.decontaminate:
        splits_to_keep_out(name, load_manifest(prepared_corpus(store, name)))  # raises if it has no such splits
    if config.add_to:
        corpus = prepared_corpus(store, config.add_to)
        Base(corpus, load_manifest(corpus)).check(config)
    return config


def _preset(request: PrepareRequest) -> CorpusConfig:
    fixed = {name: getattr(request, name) for name in PrepareRequest.model_fields}
    for name in fixed.keys() - {"preset", "source", "overrides"}:
        if fixed[name] != PrepareRequest.model_fields[name].default:
            raise ValueError(
                f"{name} is a field for a source of your own, but preset {request.preset!r} was given. Change the preset by "
                'overrides, as in {"recipe.decontaminate": ["digits"]}.'
            )
    assert request.preset
    return replace(PRESETS[request.preset](), **request.overrides)


def _of_source(request: PrepareRequest) -> CorpusConfig:
    name = request.name or (request.add_to or "").partition("/")[0]
    if not name:
        raise ValueError(
            f"name is empty; a corpus made from {request.source} needs one, as in 'birds-2026' (`--name birds-2026`)."
        )
    if request.add_to and "/" not in request.add_to:
        raise ValueError(
            f"add_to {request.add_to!r} names no version; give NAME/VERSION, so that the same request finds the same "
            "corpus. `vitline data ls` lists them."
        )
    _refuse_form_fields({"name", "add_to", "source.kind", "source.path"} & request.overrides.keys())
    path = str(request.source)
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
        if not Path(path).exists():
            raise ValueError(
                f"The source {path} does not exist. Give the path of a folder, archive, table or dataset that exists, or an "
                "s3:// URI."
            )
        if Path(path).is_dir() and _is_empty(path):
            raise ValueError(
                f"The folder {path} holds no file. Give a folder that holds a sub-folder of images per class."
            )
    config = CorpusConfig(
        name=name,
        source=_source(request.kind, path, request.overrides),
        recipe=CorpusRecipe(
            val_fraction=request.val_fraction,
            test_fraction=request.test_fraction,
            duplicates=request.duplicates,
            near_duplicates=request.near_duplicates,
            min_images_per_class=request.min_images_per_class,
            decontaminate=request.decontaminate,
        ),
        add_to=request.add_to or "",
    )
    return replace(config, **request.overrides)


def _refuse_form_fields(paths: Collection[str]) -> None:
    """Raises ValueError if overrides name fields that the form itself has."""
    if paths:
        raise ValueError(f"{min(paths)!r} cannot be overridden: the form's own fields determine it.")


def _is_empty(folder: str) -> bool:
    """Whether a folder holds nothing but folders, at any depth; a link counts as content."""
    return not any(
        files or any(os.path.islink(os.path.join(at, name)) for name in folders)
        for at, folders, files in os.walk(folder)
    )


def _source(kind: str, path: str, overrides: Mapping[str, Any]) -> Source:
    """The source with its required fields. The other overrides are applied later, together with those of the recipe."""
    form = next(form for form in SOURCES if form.model_fields["kind"].default == kind)
    given = {"path": path}
    for name, field in form.model_fields.items():
        if field.is_required() and name not in given:
            if f"source.{name}" not in overrides:
                choices = ", ".join(map(str, get_args(field.annotation)))
                raise ValueError(
                    f"A source of kind {kind} needs source.{name}{f', one of {choices}' if choices else ''}; set it as an "
                    f"override (`--set source.{name}=VALUE`)."
                )
            given[name] = overrides[f"source.{name}"]
    source: Source = form.model_validate(given)
    return source


def resolve_pretrain(root: str, request: PretrainRequest) -> TrainConfig:
    """The config of a pre-training on a prepared corpus."""
    store = find_corpus(root, request.corpus)
    manifest = load_manifest(store)
    name = request.name or training_name(manifest.name, request.recipe)
    return on_corpus(draft_training(name, request), store.uri, manifest)


def draft_training(name: str, request: PretrainRequest | PipelineRequest) -> TrainConfig:
    """The config of a pre-training whose corpus is not known yet; refuses what would be wrong with any corpus."""
    recipe, execution = recipe_named(request.recipe).make()
    if request.num_workers is not None:
        execution = replace(execution, num_workers=request.num_workers)
    changes: dict[str, Any] = {"seed": request.seed}
    if request.train_images is not None:
        steps = request.train_images // recipe.input.global_batch_size
        if steps < 1:
            raise ValueError(
                f"train_images={request.train_images:,} is less than one batch of {recipe.input.global_batch_size:,} images. "
                "Set it to at least that number."
            )
        changes |= _with_steps(recipe, steps)
    config = TrainConfig(name=name, corpus="not prepared yet", recipe=replace(recipe, **changes), execution=execution)
    overrides: dict[str, Any] = dict(request.overrides)
    if isinstance(request, PipelineRequest):
        overrides = {k: v for k, v in overrides.items() if not k.startswith("protocol.")}
    elif request.peak_lr is not None:
        overrides = {"recipe.optim.peak_lr": request.peak_lr, **overrides}
    _refuse_form_fields({"corpus", "name", "stage"} & overrides.keys())
    return replace(config, **overrides)


def _with_steps(recipe: TrainRecipe, steps: int) -> dict[str, Any]:
    """The changes for another number of steps: warmup is shortened in proportion, and never lengthened."""
    warmup = min(recipe.optim.warmup_steps, recipe.optim.warmup_steps * steps // recipe.total_steps)
    return {"total_steps": steps, "optim.warmup_steps": warmup}


def on_corpus(config: TrainConfig, uri: str, manifest: Manifest) -> TrainConfig:
    """The config with its corpus; refuses a loss that does not suit the labels."""
    if config.recipe.loss == "softmax" and not manifest.single_label:
        raise ValueError(
            f"{uri} has several labels per image, but the training {config.name!r} uses a softmax loss. "
            'Set the override {"recipe.loss": "sigmoid"} (`--set recipe.loss=sigmoid`).'
        )
    val = config.val_split if config.val_split in manifest.splits else None
    return replace(config, corpus=uri, val_split=val)


def resolve_finetune(root: str, request: FinetuneRequest) -> TrainConfig:
    """The config of a fine-tuning by the paper's rules (arXiv:2010.11929, B.1.1)."""
    from vit.input.image_contract import ImageContract

    model = find_model(root, request.model)
    published = open_store(model).read_json("config.json")
    contract = ImageContract.model_validate(open_store(model).read_json("image_contract.json"))
    architecture = network_config(published["model"])
    store = find_corpus(root, request.corpus)
    manifest = load_manifest(store)
    if request.protocol is None:
        recipe = _finetune_recipe(request, architecture, contract.evaluation, manifest)
    else:
        recipe = _protocol_recipe(request, architecture, store, manifest)
    config = TrainConfig(
        name=training_name(manifest.name, "finetune"),
        stage="finetune",
        corpus=store.uri,
        val_split="val" if "val" in manifest.splits else None,
        init_model=model,
        recipe=recipe,
        execution=ExecutionConfig(
            num_workers=request.num_workers or 1, save_every_steps=max(1, recipe.total_steps // 4)
        ),
    )
    return replace(config, **request.overrides)


def _finetune_recipe(
    request: FinetuneRequest, architecture: NetworkConfig, evaluation: AugmentConfig, manifest: Manifest
) -> TrainRecipe:
    """The recipe without a protocol: steps as requested, images as in the model's own evaluation."""
    size, batch, steps = request.image_size_px, request.global_batch_size or 512, request.steps or 500
    network = network_config(architecture.for_transfer(size))
    lanes = propose_num_lanes(
        manifest.split("train"),
        global_batch_size=batch,
        shuffle_window=4,
        mean_row_group_bytes=mean_row_group_bytes(manifest),
    )
    augment = replace(evaluation, image_size_px=network.image_size_px)
    return TrainRecipe(
        model=network,
        input=InputConfig(global_batch_size=batch, num_lanes=lanes, augment=augment),
        optim=OptimConfig(optimizer="sgd", peak_lr=request.peak_lr or 0.03, warmup_steps=min(500, steps // 5)),
        total_steps=steps,
        seed=request.seed,
    )


def _protocol_recipe(
    request: FinetuneRequest, architecture: NetworkConfig, store: Store, manifest: Manifest
) -> TrainRecipe:
    """The recipe of a protocol for a corpus of this size; fields of the request replace those of the protocol."""
    protocol = protocol_named(str(request.protocol))
    assert isinstance(protocol, Protocol)
    fields = ("image_size_px", "global_batch_size")
    given = {field: value for field in fields if (value := getattr(request, field)) is not None}
    whole = TaskSplits(train="train", val="val", joined="train")
    settings = replace(protocol, **given).settings(architecture, task_facts(store, manifest, whole), request.seed)
    rates = list(dict.fromkeys(setting.optim.peak_lr for setting in settings))
    if len(rates) > 1 and request.peak_lr is None:
        raise ValueError(
            f"{protocol.name} chooses among the learning rates {', '.join(map(str, rates))}: set peak_lr to one of them, "
            "or try all of them with an evaluation (`vitline vtab run`)."
        )
    lengths = list(dict.fromkeys(setting.total_steps for setting in settings))
    if len(lengths) > 1 and request.steps is None:
        raise ValueError(
            f"{protocol.name} chooses among {', '.join(f'{steps:,}' for steps in lengths)} steps: set steps to one of "
            "them, or try all of them with an evaluation (`vitline vtab run`)."
        )
    changes: dict[str, Any] = {} if request.peak_lr is None else {"optim.peak_lr": request.peak_lr}
    if request.steps is not None:
        changes |= _with_steps(settings[0], request.steps)
    return replace(settings[0], **changes)


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


def resolve_evaluate(root: str, request: EvaluateRequest) -> EvaluationPlan:
    """The plan of an evaluation whose model and tasks exist."""
    uri = find_model(root, request.model)
    return EvaluationPlan(
        models=(uri, None) if request.from_scratch else (uri,),
        tasks=tuple(
            TaskRef(name=load_manifest(corpus).name, corpus=corpus.uri)
            for corpus in (find_corpus(root, task) for task in named_tasks(root, request.tasks))
        ),
        architecture=network_config(open_store(uri).read_json("config.json")["model"]),
        protocol=_requested_protocol(request.protocol, request.overrides, request.from_scratch),
        seed=request.seed,
        num_seeds=request.num_seeds,
        rescore=request.rescore,
    )


def named_tasks(root: str, tasks: Sequence[str]) -> list[str]:
    """Each requested task once; `vtab` stands for its tasks that are prepared.

    Raises ValueError if none of them is prepared."""
    if VTAB not in tasks:
        return list(dict.fromkeys(tasks))
    of_vtab = _prepared_of_vtab(root)
    if not of_vtab:
        raise ValueError(f"No task of VTAB is prepared below {root}; `vitline vtab prepare` prepares them.")
    return list(dict.fromkeys(name for task in tasks for name in (of_vtab if task == VTAB else [task])))


def tasks_text(root: str, tasks: Sequence[str]) -> str | None:
    """A sentence about the tasks of `vtab` that are not prepared; None if `vtab` is not requested or all are prepared."""
    of_vtab = _prepared_of_vtab(root) if VTAB in tasks else []
    missing = [task.corpus_name for task in VTAB_TASKS if task.corpus_name not in of_vtab]
    if VTAB not in tasks or not missing:
        return None
    return (
        f"vtab means {len(of_vtab)} of its {len(VTAB_TASKS)} tasks here; not prepared: {', '.join(missing)}. "
        "`vitline vtab prepare` prepares them."
    )


def _prepared_of_vtab(root: str) -> list[str]:
    prepared = {row["name"] for row in list_corpora(root) if row["view_of"] is None}
    return [task.corpus_name for task in VTAB_TASKS if task.corpus_name in prepared]


def _requested_protocol(name: str, overrides: Mapping[str, Any], from_scratch: bool) -> Protocol | Probe:
    """A protocol, changed by the overrides that begin with `protocol.`; all other overrides are refused."""
    protocol = protocol_named(name)
    if from_scratch and isinstance(protocol, Probe):
        raise ValueError(
            f"Protocol {name} trains no network, so there is none to train from scratch: set from_scratch to false."
        )
    changes = {path.removeprefix("protocol."): value for path, value in overrides.items()}
    if others := [path for path in overrides if not path.startswith("protocol.")]:
        raise ValueError(f"{others[0]!r} cannot be overridden in an evaluation: overrides begin with 'protocol.'.")
    _refuse_form_fields({"protocol.name", "protocol.kind"} & overrides.keys())
    if not changes:
        return protocol
    fields = type(protocol).model_fields.keys() - {"name", "kind"}
    if unknown := next((path for path in changes if path.partition(".")[0] not in fields), None):
        hint = did_you_mean(f"protocol.{unknown}", (f"protocol.{field}" for field in fields))
        raise ValueError(
            f"Protocol {name} has no field 'protocol.{unknown}'; its fields are: {', '.join(sorted(fields))}.{hint}"
        )
    # A changed protocol gets a name of its own, so that its scores cannot be taken for those of the named protocol.
    changed_name = f"{name}-{digest_of(changes)[:6]}"
    if isinstance(protocol, Protocol) and "larger" not in changes:
        # The settings for larger tasks repeat some of these fields; the changes apply to them, too.
        shared = {field: value for field, value in changes.items() if field in LargerTask.model_fields}
        changes["larger"] = [task.model_dump() | shared for task in protocol.larger]
    try:
        return replace(protocol, name=changed_name, **changes)
    except ValidationError as error:
        problems = [told({**problem, "loc": ("protocol", *problem["loc"])}) for problem in error.errors()]
        raise ValueError("; ".join(problems) + ".") from error


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
    night: date | None = None


def resolve_pipeline(root: str, request: PipelineRequest, night: date | None = None) -> PipelinePlan:
    """The plan of a pipeline whose names exist and whose overrides fit. The same request and night give the same key."""
    training = draft_training(request.name, request)
    changes = {k: v for k, v in request.overrides.items() if k.startswith("protocol.")}
    protocol = _requested_protocol(request.protocol, changes, request.from_scratch)
    source, *tasks = (choose_corpus(root, name) for name in (request.corpus, *named_tasks(root, request.tasks)))
    identity = [training.recipe, training.val_split, protocol, request.seed, request.from_scratch]
    inputs = {f"{i}": corpus_identity(open_store(root), choice) for i, choice in enumerate((source, *tasks))}
    key = run_key(request.name, "pipeline", digest_of(identity), inputs, night)
    return PipelinePlan(key, request, source, tuple(tasks), training, protocol, night)


def choose_corpus(root: str, name: str) -> CorpusChoice:
    """The preset of this name, else the prepared corpus."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return find_corpus(root, name).uri
    except ValueError as error:
        if is_location(name):
            raise
        known = there_are(name, {*PRESETS, *(row["name"] for row in list_corpora(root))})
        raise ValueError(
            f"There is no corpus {name!r} below {root}; {known} `vitline data prep` prepares one."
        ) from error


def corpus_identity(root: Store, choice: CorpusChoice) -> str:
    """What identifies a corpus in a pipeline's key: the version that will be made, or the digest of a prepared one."""
    if isinstance(choice, CorpusConfig):
        return f"{choice.name}/{corpus_version(root, choice)}"
    return load_manifest(open_store(choice)).digest


def training_name(corpus: str, what: str) -> str:
    """A valid name for a training: names of corpora may also hold dots and underscores."""
    return f"{re.sub('[._]', '-', corpus)}-{what}"[:63]


def mean_row_group_bytes(manifest: Manifest) -> int:
    counts, rows = manifest.counts, manifest.split("train").rows_per_row_group
    return -(-counts.num_bytes * rows // counts.num_accepted)
