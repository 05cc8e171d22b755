"""The forms that start flows, from the Prefect UI, its API or `vitline flows trigger`.

Each flow has one model with at most 15 fields, and the docstring of a field is its help text. The Prefect API checks what a
JSON schema can express; the `resolve_*` function of each form checks the rest before anything is started. Imports no engine.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, NonNegativeInt, PlainSerializer, PositiveFloat

from vitline.data_prep.source_kinds import SourceKind
from vitline.infra.config import FrozenConfig
from vitline.infra.redact import holds_credentials

# Forms show these choices without importing the other packages; tests/flows/forms/test_forms.py checks that they are complete.
PresetName = Literal["icons", "new-icons", "letters", "digits", "digits-0-to-4", "digits-5-to-9"]
RecipeName = Literal[
    "icons", "digits",
    "vit-s16-i21k", "vit-b32-i21k", "vit-b16-i21k", "vit-l32-i21k", "vit-l16-i21k", 
    "vit-b32-imagenet", "vit-b16-imagenet", "vit-l32-imagenet", "vit-l16-imagenet",
    "vit-b16-i21k-light1", "vit-b16-i21k-light2", "vit-b16-i21k-medium1", "vit-b16-i21k-medium2",
    "vit-b16-i21k-strong1", "vit-b16-i21k-strong2",
    "vit-s16-plain-imagenet", "vit-b16-masked-patches-jft",
    "vit-b32-jft", "vit-b16-jft", "vit-l32-jft", "vit-l16-jft", "vit-h14-jft",
    "r50-b32-jft", "r50-b16-jft", "r50-l32-jft", "r50-l16-jft",
    "bit-r50x1-jft", "bit-r50x2-jft", "bit-r101x1-jft", "bit-r152x1-jft", "bit-r152x2-jft", "bit-r152x4-jft",
]  # fmt: skip
ProtocolName = Literal[
    "small-images",
    "vit-paper", "vit-paper-v1", "vit-paper-transfer", "vit-paper-transfer-v1", "vit-paper-imagenet-512",
    "bit-hyperrule", "four-settings",
    "fewshot", "linear", "knn", "head",
]  # fmt: skip
FinetuningName = Literal[
    "vit-paper", "vit-paper-v1", "vit-paper-transfer", "vit-paper-transfer-v1", "vit-paper-imagenet-512",
    "bit-hyperrule", "four-settings",
]  # fmt: skip

NAME = r"^[a-z0-9][a-z0-9-]*$"
CORPUS_NAME = r"^[a-z0-9][a-z0-9._-]*$"
NAME_PATTERNS = {
    NAME: "lower case letters, digits and '-', a letter or digit first",
    CORPUS_NAME: "lower case letters, digits, and '-', '_', '.', a letter or digit first",
}
"""The patterns in words. Prefect's API shows a pattern as code, so the help of the fields says the same in words."""
Name = Annotated[str, Field(pattern=NAME, max_length=40)]
# Not pydantic's PositiveInt: "at least 1" reads better than "more than 0", and a form's number field counts from its minimum.
Count = Annotated[int, Field(ge=1)]


def without_credentials(uri: str) -> str:
    if holds_credentials(uri):
        raise ValueError("must be a URI without user, password or signature (many users can read forms)")
    return uri


Reference = Annotated[
    str,
    Field(min_length=1, max_length=500, json_schema_extra={"pattern": "^(?![^/?#]*://[^/]*@)[^?]*$"}),
    AfterValidator(without_credentials),
]


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError("must not be left empty")
    if repeated := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ValueError(f"must name {repeated} once")
    return names


Protocols = Annotated[
    tuple[ProtocolName, ...],
    BeforeValidator(
        lambda given: (given,) if isinstance(given, str) else given,
        json_schema_input_type=Annotated[tuple[ProtocolName, ...], Field(min_length=1)] | ProtocolName,
    ),
    AfterValidator(each_once),
    PlainSerializer(lambda names: names[0] if len(names) == 1 else list(names)),
]
"""Protocols in the order in which they run. A single one may be given, and is stored, as its name alone."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
Overrides = dict[str, JsonValue]


class PrepareRequest(FrozenConfig):
    """Prepares a corpus of verified Parquet shards from labelled images."""

    preset: PresetName | None = None
    """A small corpus that vitline downloads itself. Leave empty to prepare your own images."""
    source: Reference | None = None
    """Folder, archive, table or dataset of labelled images: a path that every worker can read, or the URI of a bucket."""
    kind: SourceKind = "class_folders"
    """Format of the source. class_folders: each image is in a folder named after its class; an archive of such folders works, too."""
    name: str | None = Field(None, pattern=CORPUS_NAME, max_length=80)
    """Name of the corpus, needed for a source: lower case letters, digits, and '-', '_', '.', a letter or digit first; at most 80."""
    val_fraction: Fraction = 0.1
    """Fraction of the images held out for validation if the source has no such split."""
    test_fraction: Fraction = 0.1
    """Fraction of the images held out for testing if the source has no such split."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Images with identical pixels: keep one of them, or all that are in the same split. No image is ever in two splits."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Near duplicates (rescaled, recompressed or mirrored): keep all, or only one of each. With `add_to`, only new images are compared."""
    min_images_per_class: Count = 1
    """Leave out classes with fewer images."""
    decontaminate: tuple[Reference, ...] = Field((), max_length=100)
    """Prepared corpora (NAME or NAME/VERSION): leave out images that match their test or validation images, exactly or nearly."""
    add_to: Reference | None = None
    """Add the images to this prepared corpus, NAME/VERSION, as a further segment. Empty: make a new corpus."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"source.labels_column": "tags", "recipe.class_map": "imagenet21k-p",
    "recipe.val_per_class": 50, "execution.examples_per_chunk": 1024}. The deployment's description lists them."""


class FurtherCorpus(FrozenConfig):
    """Another corpus of a mixture."""

    corpus: Reference
    """Prepared corpus: NAME, NAME/VERSION or URI. In a pipeline also a preset, which is prepared if it is missing."""
    weight: PositiveFloat = 1.0
    """Sampling weight. The share of examples from this corpus is exactly its weight divided by the sum of all weights."""


# The fields of a mixture, with one text for every form that pre-trains.
MixWith = Annotated[
    tuple[FurtherCorpus, ...],
    Field(
        max_length=20,
        description="Further corpora to mix in, each with its sampling weight, as in "
        '[{"corpus": "city", "weight": 0.5}]. Empty: train on `corpus` alone.',
    ),
]
CorpusWeight = Annotated[PositiveFloat, Field(description="Sampling weight of `corpus` in a mixture.")]
ClassMap = Annotated[
    Reference,
    Field(
        description="How to combine the classes of a mixture. `names`: classes with the same name become one. `prefixed`: each corpus "
        "keeps its own, named CORPUS/CLASS. Otherwise the path or URI of a table (CSV or JSON) with the columns corpus, class and "
        "mixture_class; an empty mixture_class drops the class."
    ),
]


class PretrainRequest(FrozenConfig):
    """Pre-trains a network on a prepared corpus or a mixture. Repeating a request resumes its run, or reuses the result."""

    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    mix_with: MixWith = ()
    corpus_weight: CorpusWeight = 1.0
    class_map: ClassMap = "names"
    recipe: RecipeName = "icons"
    """Model and training settings; `vitline pretrain recipes` describes them. Or set the override {"recipe": "s3://lab/birds.yaml"}."""
    name: Name | None = None
    """Prefix of the run's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: corpus and recipe."""
    seed: NonNegativeInt = 0
    """Random seed for initialisation, data order, augmentation and dropout."""
    train_images: Count | None = None
    """Number of images to train on, counting repeats. Fewer than in the recipe also shorten the warmup. Empty: as in the recipe."""
    peak_lr: PositiveFloat | None = None
    """Peak learning rate, reached at the end of warmup. Empty: as in the recipe."""
    init_from: Reference | None = None
    """Initial weights: a published model (NAME, NAME/VERSION, URI) or the key of a finished run. The head is kept if the classes are
    the same, else it is new; the optimizer state is not loaded. Empty: random initialisation."""
    num_workers: Count | None = None
    """Number of Ray Train workers, with one GPU each if the cluster has GPUs or can add some (`execution.device`). Results do not
    depend on it. Empty: as in the recipe."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.weight_decay": 0.1, "execution.save_every_steps": 500}. A
    cancelled run writes a checkpoint, unless {"execution.on_cancel": "discard"} is set. The deployment's description lists the
    fields."""


class SelfTrainRequest(FrozenConfig):
    """Trains a noisy student: a teacher labels an unlabelled corpus, its confident labels become a corpus, and the student trains on
    that and on the labelled corpus. Repeating a request resumes its runs, or reuses their results."""

    teacher: Reference
    """Published model that predicts the labels: NAME, NAME/VERSION or URI. Classes are matched with those of `corpus` by name."""
    corpus: Reference
    """Prepared corpus of labelled images: NAME, NAME/VERSION or URI."""
    unlabelled: Reference
    """Prepared corpus of the images to label: NAME, NAME/VERSION or URI. Its own labels are not used."""
    splits: tuple[Annotated[str, Field(max_length=80)], ...] = Field(("train",), min_length=1, max_length=20)
    """Splits of `unlabelled` to label."""
    labels: Literal["soft", "hard"] = "soft"
    """soft: the `top_k` most probable classes, with probabilities rescaled to sum to 1. hard: only the most probable class."""
    top_k: Count = 10
    """Number of classes to store per image."""
    min_score: Fraction = 0.3
    """Leave out images whose most probable class has a lower probability; 0.3 as in the paper."""
    max_per_class: Count | None = None
    """Maximum number of images per predicted class, those with the highest probability. Empty: no limit."""
    predicted_weight: PositiveFloat = 1.0
    """Sampling weight of the images that the teacher labels; that of `corpus` is 1. With 3 they are three quarters of each batch."""
    recipe: RecipeName = "icons"
    """Model and training settings of the student. It should be at least as large as its teacher and be trained with noise (RandAugment,
    dropout, stochastic depth), as in the medium and strong recipes."""
    name: Name | None = None
    """Prefix of the student's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: CORPUS-student."""
    seed: NonNegativeInt = 0
    """Random seed for initialisation, data order, augmentation and dropout."""
    train_images: Count | None = None
    """Number of images to train on, counting repeats. Fewer than in the recipe also shorten the warmup. Empty: as in the recipe."""
    num_workers: Count | None = None
    """Number of Ray Train workers of the student. Results do not depend on it. Empty: as in the recipe."""
    overrides: Overrides = Field(default={})
    """Any other field of the training by its dotted name, as in {"recipe.input.augment.randaugment_layers": 2}. The deployment's
    description lists the fields."""


class BranchRequest(FrozenConfig):
    """Starts a new run from a checkpoint of another training, with its network, optimizer state, weight averages, position in the data
    and config, except for the fields set here. The parent run is not affected."""

    parent: Reference
    """Key of the parent run, or its first characters."""
    step: Count
    """Step of the checkpoint; `vitline runs show` lists the available ones."""
    cooldown_images: Count | None = None
    """Train on this many more images while the learning rate decays linearly to zero. Empty: follow the parent's schedule to its end."""
    name: Name | None = None
    """Prefix of the run's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: the parent's name
    and `-branch`."""
    num_workers: Count | None = None
    """Number of Ray Train workers. Results do not depend on it. Empty: as in the parent run."""
    overrides: Overrides = Field(default={})
    """Fields to change, by their dotted names, as in {"recipe.optim.peak_lr": 0.0003, "recipe.total_steps": 90000}. Network, batch
    size, lanes, seed and type of optimizer cannot change. The deployment's description lists the
    fields."""


class FinetuneRequest(FrozenConfig):
    """Fine-tunes a published model on a full corpus as in the paper (SGD, cosine schedule, zero-initialised head)."""

    model: Reference
    """Published model to start from: NAME, NAME/VERSION or URI."""
    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    protocol: FinetuningName | None = None
    """Use the steps, batch size, resolution, crop and schedule that this protocol has for a corpus of this size. Or set the override
    {"protocol": "s3://lab/mine.yaml"}."""
    steps: Count | None = None
    """Number of optimizer steps; fewer steps shorten the warmup. Empty: as in the protocol, or 500."""
    peak_lr: PositiveFloat | None = None
    """Peak learning rate, reached at the end of warmup; the paper tries 0.003, 0.01, 0.03 and 0.06. Empty: as in the protocol, or 0.03."""
    global_batch_size: Count | None = None
    """Examples per step, over all workers. Empty: as in the protocol, or 512."""
    image_size_px: Count | None = None
    """Side of the input in pixels; position embeddings are resampled. Empty: as in the protocol, or as in the model."""
    seed: NonNegativeInt = 0
    """Random seed for data order and augmentation."""
    num_workers: Count | None = None
    """Number of Ray Train workers. Empty: one."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.clip_norm": null}. A cancelled run writes a checkpoint, unless
    {"execution.on_cancel": "discard"} is set. The deployment's description lists the fields."""


class EvaluateRequest(FrozenConfig):
    """Evaluates a published model on tasks. Fine-tuning protocols select settings on validation, retrain once and read the test
    split once; fewshot, linear, knn and head probe its frozen features."""

    model: Reference
    """Published model to evaluate: NAME, NAME/VERSION or URI."""
    tasks: tuple[Reference, ...] = Field(("digits",), min_length=1, max_length=40)
    """Tasks: corpora with train, val and test splits, by name or URI. The 19 of VTAB are named vtab-TASK; `vtab` stands for all of
    them that are prepared, `robustness` for ImageNet-A, -R, -Sketch, -C and ObjectNet, which protocol head scores."""
    protocol: Protocols = ("small-images",)
    """How to evaluate: fine-tuning or a probe, with its resolution and settings; `vitline evaluate protocols` describes them. Several
    run in this order, each with scores of its own: the cheap ones first. Or set the override {"protocol": "s3://lab/mine.yaml"}."""
    seed: NonNegativeInt = 0
    """Random seed for data order, augmentation and sampling; the first one if there are several."""
    num_seeds: int = Field(1, ge=1, le=20)
    """Number of seeds, each with its own scores. The paper reports mean and standard deviation over three."""
    from_scratch: bool = False
    """Also train the same network from random initialisation, with the same steps and search, as a control; probes have none."""
    rescore: bool = False
    """Evaluate again even if there are scores; the new records refer to the old ones."""
    keep_models: bool = False
    """Publish the network that is scored on each test set as a model of its own, MODEL-TASK. Protocol `head` then scores it on other test
    sets with the same classes, such as imagenet-real. No score depends on this."""
    overrides: Overrides = Field(default={})
    """Fields of the protocol by their dotted name, as in {"protocol.precision": "bfloat16"}; of several protocols with the name of
    one, as in {"protocol.vit-paper.precision": "float32"}. The result is another protocol with its own scores. A changed field
    applies to tasks of every size and changes no other field: with fewer total_steps, set warmup_steps, too. The deployment's
    description lists the fields."""


class PredictRequest(FrozenConfig):
    """Predicts the classes of all images of a corpus with a published model, and stores them as Parquet files. Repeating a
    request resumes its run, or reuses the result."""

    model: Reference
    """Published model: NAME, NAME/VERSION or URI."""
    corpus: Reference
    """Prepared corpus: NAME, NAME/VERSION or URI. Its labels are stored with the predictions; they need not be classes of the model."""
    splits: tuple[Annotated[str, Field(max_length=80)], ...] = Field((), max_length=20)
    """Splits of the corpus. Empty: those of train, val and test that exist."""
    top_k: Count = 5
    """Number of classes to store per image, most probable first; with the number of classes of the model, all probabilities are stored."""


class PipelineRequest(FrozenConfig):
    """Prepares corpora, pre-trains a model and evaluates it on tasks, as one pipeline whose runs can be compared."""

    name: Name = "icons"
    """Prefix of the names of its runs and of its model: lower case letters, digits and '-', a letter or digit first; at most 40."""
    corpus: Reference = "icons"
    """Corpus to pre-train on: a preset, which is prepared if it is missing (icons, digits-0-to-4), or a prepared corpus."""
    mix_with: MixWith = ()
    corpus_weight: CorpusWeight = 1.0
    class_map: ClassMap = "names"
    recipe: RecipeName = "icons"
    """Model and pre-training settings; `vitline pretrain recipes` describes them. Or set the override
    {"recipe": "s3://lab/birds.yaml"}."""
    seed: NonNegativeInt = 0
    """Random seed for initialisation, data order, augmentation and dropout."""
    train_images: Count | None = None
    """Number of images to pre-train on, counting repeats. Fewer than in the recipe also shorten the warmup. Empty: as in the recipe."""
    num_workers: Count | None = None
    """Number of Ray Train workers of pre-training. Results do not depend on it. Empty: as in the recipe."""
    tasks: tuple[Reference, ...] = Field(("new-icons", "letters"), min_length=1, max_length=40)
    """Tasks to evaluate the model on: presets (new-icons, letters, digits, digits-5-to-9) or prepared corpora; `vtab` stands for
    all tasks of VTAB that are prepared."""
    protocol: Protocols = ("small-images",)
    """How to evaluate the model on each task; `vitline evaluate protocols` describes them. Several run in this order, the cheap ones
    first; nights are judged by the last one, or by `nights.verdict_protocol` in `overrides`. Or set the override
    {"protocol": "s3://lab/mine.yaml"}."""
    from_scratch: bool = True
    """Also train the same network from random initialisation on every task, as a control; probes have none."""
    deadline_hours: PositiveFloat | None = None
    """Maximum duration. A plan that does not fit is refused; a run that reaches it keeps a checkpoint and ends as OutOfTime."""
    max_late_hours: PositiveFloat | None = None
    """Skip a scheduled run that starts more than this many hours late. Empty: never skip."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.peak_lr": 0.001, "protocol.total_steps": 300}. A cancelled run
    writes a checkpoint, unless {"execution.on_cancel": "discard"} is set. The deployment's description lists the fields."""


class ReconcileRequest(FrozenConfig):
    """Ends flow runs, Ray jobs, runs and pipelines that killed processes left unfinished; sends MLflow what it is missing."""

    dry_run: bool = False
    """Only report what would be done."""
    quiet_minutes: float = Field(5.0, ge=0.0, le=10_000)
    """Leave alone whatever had a heartbeat within this time."""
    stalled_minutes: float = Field(60.0, ge=0.0, le=10_000)
    """Send an alert for a running training or preparation without progress for this long."""
    min_free_gb: float = Field(20.0, ge=0.0, le=1e6)
    """Send an alert if less disk space is free on the machine where this runs."""


class CollectGarbageRequest(FrozenConfig):
    """Deletes what is no longer needed: leftovers of killed processes, old checkpoints, work files of corpora, trials of finished
    evaluations, old flow runs; if requested, old models of evaluations."""

    dry_run: bool = True
    """Only list what would be deleted."""
    notice_days: float = Field(0.0, ge=0.0, le=10_000)
    """Delete only what was listed at least this long ago and has not changed since; list the rest. 0: delete at once."""
    older_than_days: float = Field(7.0, ge=0.0, le=10_000)
    """Keep everything younger than this."""
    keep_checkpoints: int = Field(1, ge=0, le=1000)
    """Number of newest checkpoints to keep of every finished run."""
    unfinished_days: float = Field(90.0, ge=1.0, le=10_000)
    """Keep checkpoints of unfinished runs, and unfinished corpora, until nothing was written to them for this long."""
    flow_runs_days: float = Field(90.0, ge=1.0, le=10_000)
    """Keep vitline's flow runs in Prefect for this long after their end; those of reconcile and collect-garbage that found nothing
    for 2 days."""
    kept_models_days: float | None = Field(None, ge=0.0, le=10_000)
    """Keep the models that evaluations have published (`keep_models`) for this long. Empty: they are never deleted."""
    keep: tuple[Reference, ...] = Field((), max_length=100)
    """Keep everything of these runs (by key), corpora and models (by name); the first characters are enough."""


FORMS: Mapping[str, type[FrozenConfig]] = {
    "prepare-corpus": PrepareRequest,
    "pretrain": PretrainRequest,
    "self-train": SelfTrainRequest,
    "branch": BranchRequest,
    "finetune": FinetuneRequest,
    "evaluate": EvaluateRequest,
    "predict": PredictRequest,
    "pretrain-then-transfer": PipelineRequest,
    "reconcile": ReconcileRequest,
    "collect-garbage": CollectGarbageRequest,
}
"""The form of each flow, by its name; its subflows have the same names."""
