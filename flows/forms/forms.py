"""The forms that start flows, from the Prefect UI, its API or `vitline flows trigger`.

Each flow has one model with at most 15 fields, and the docstring of a field is its help text. The Prefect API checks what a
JSON schema can express; the `resolve_*` function of each form checks the rest before anything is started. Imports no engine.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveFloat

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
    "bit-hyperrule", "vtab-sweep",
    "fewshot", "linear", "knn", "head",
]  # fmt: skip
FinetuningName = Literal[
    "vit-paper", "vit-paper-v1", "vit-paper-transfer", "vit-paper-transfer-v1", "vit-paper-imagenet-512",
    "bit-hyperrule", "vtab-sweep",
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
Fraction = Annotated[float, Field(ge=0, lt=1)]
Overrides = dict[str, JsonValue]


class PrepareRequest(FrozenConfig):
    """Prepares a corpus of verified Parquet shards from labelled images."""

    preset: PresetName | None = None
    """A corpus that vitline downloads by itself. Leave empty to prepare a source of your own."""
    source: Reference | None = None
    """Folder, archive, table or dataset of labelled images: a path that every worker can read, or an s3:// URI."""
    kind: SourceKind = "class_folders"
    """Kind of the source. Class folders: the folder of an image is its class; an archive of such folders works, too."""
    name: str | None = Field(None, pattern=CORPUS_NAME, max_length=80)
    """Name of the corpus, needed for a source: lower case letters, digits, and '-', '_', '.', a letter or digit first; at most 80."""
    val_fraction: Fraction = 0.1
    """Fraction of the images held out for validation, if the source names no such split."""
    test_fraction: Fraction = 0.1
    """Fraction of the images held out for the test, if the source names no such split."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Images with the same pixels: keep one, or all of one split. Two splits never share an image."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Near duplicates (scaled, recompressed, mirrored): keep all, or one of each. With `add_to`, only among the new images."""
    min_images_per_class: Count = 1
    """Classes with fewer images are left out."""
    decontaminate: tuple[Reference, ...] = Field((), max_length=100)
    """Prepared corpora, NAME or NAME/VERSION, whose test and validation images are left out, with their near duplicates."""
    add_to: Reference | None = None
    """Prepared corpus, NAME/VERSION, to which these images are added as a further segment. Empty: make a new corpus."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"source.labels_column": "tags", "recipe.class_map": "imagenet21k-p",
    "recipe.val_per_class": 50, "execution.examples_per_chunk": 1024}. The deployment's description lists them."""


class FurtherCorpus(FrozenConfig):
    """A corpus that is trained on together with others."""

    corpus: Reference
    """Prepared corpus: NAME, NAME/VERSION or URI. In a pipeline also a preset, which is prepared if it is missing."""
    weight: PositiveFloat = 1.0
    """Its share of the examples is its weight divided by the sum of all weights, exactly."""


# The fields of a mixture, with one text for every form that pre-trains.
MixWith = Annotated[
    tuple[FurtherCorpus, ...],
    Field(
        max_length=20,
        description="For a mixture: further corpora to train on at the same time, each with its weight, as in "
        '[{"corpus": "city", "weight": 0.5}]. Empty: only `corpus`.',
    ),
]
CorpusWeight = Annotated[PositiveFloat, Field(description="Weight of `corpus` in a mixture.")]
ClassMap = Annotated[
    Reference,
    Field(
        description="Classes of a mixture. `names`: classes of one name are one class. `prefixed`: all classes are kept apart, as "
        "CORPUS/CLASS. Else the path or URI of a table (CSV or JSON) with the columns corpus, class, mixture_class; an empty "
        "mixture_class drops a class."
    ),
]


class PretrainRequest(FrozenConfig):
    """Pre-trains a network on a prepared corpus or a mixture. The same request finds the same run: it resumes, or is reused."""

    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    mix_with: MixWith = ()
    corpus_weight: CorpusWeight = 1.0
    class_map: ClassMap = "names"
    recipe: RecipeName = "icons"
    """What to train and how; `vitline pretrain recipes` describes them. One of your own: the override {"recipe": "s3://lab/birds.yaml"}."""
    name: Name | None = None
    """First part of the run's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: corpus and recipe."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, reading order, augmentation and dropout."""
    train_images: Count | None = None
    """Budget in images, counting repeats. Empty: the recipe's own. Warmup is shortened in proportion."""
    peak_lr: PositiveFloat | None = None
    """Learning rate at the end of warmup. Empty: the recipe's own."""
    init_from: Reference | None = None
    """Weights to start from: a published model (NAME, NAME/VERSION, URI) or the key of a finished run. The head is kept for the
    same classes and new for others; the optimizer starts anew. Empty: random weights."""
    num_workers: Count | None = None
    """Ray Train workers, with one GPU each if the cluster has GPUs or can add some (`execution.device`). Empty: the recipe's
    own. Results do not depend on it."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.weight_decay": 0.1, "execution.save_every_steps": 500}. A
    cancelled run writes a checkpoint, unless {"execution.on_cancel": "discard"} is set. The deployment's description lists the
    fields."""


class SelfTrainRequest(FrozenConfig):
    """Trains a student on labelled images and on others that a teacher labels (noisy student): predicts the classes of the others,
    makes a corpus of those that it is sure of, and pre-trains on both. The same request finds the same runs."""

    teacher: Reference
    """Published model that labels: NAME, NAME/VERSION or URI. Its classes are those of `corpus`, by name."""
    corpus: Reference
    """Prepared corpus of labelled images: NAME, NAME/VERSION or URI."""
    unlabelled: Reference
    """Prepared corpus of the images to label: NAME, NAME/VERSION or URI. Its own labels are not used."""
    splits: tuple[Annotated[str, Field(max_length=80)], ...] = Field(("train",), min_length=1, max_length=20)
    """Splits of `unlabelled` whose images are labelled."""
    labels: Literal["soft", "hard"] = "soft"
    """soft: the `top_k` most probable classes with their probabilities, scaled to sum to 1. hard: the most probable class."""
    top_k: Count = 10
    """Classes that are stored for each image."""
    min_score: Fraction = 0.3
    """Images whose most probable class has a lower probability are left out; 0.3 as in the paper."""
    max_per_class: Count | None = None
    """Images that are used of each most probable class, those of the highest probability. Empty: all."""
    predicted_weight: PositiveFloat = 1.0
    """Weight of the images that the teacher labels; that of `corpus` is 1. A weight of 3 makes them three quarters of each batch."""
    recipe: RecipeName = "icons"
    """What to train and how. A student should be as large as its teacher or larger, and be trained with noise (RandAugment, dropout,
    stochastic depth), as the recipes medium and strong do."""
    name: Name | None = None
    """First part of the student's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: CORPUS-student."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, reading order, augmentation and dropout."""
    train_images: Count | None = None
    """Budget in images, counting repeats. Empty: the recipe's own. Warmup is shortened in proportion."""
    num_workers: Count | None = None
    """Ray Train workers of the student. Empty: the recipe's own. Results do not depend on it."""
    overrides: Overrides = Field(default={})
    """Any other field of the training by its dotted name, as in {"recipe.input.augment.randaugment_layers": 2}. The deployment's
    description lists the fields."""


class BranchRequest(FrozenConfig):
    """Starts a new run from a kept checkpoint of another training: with its network, optimizer, averages and position in the reading
    order, and its config but for what is named here. The parent may go on meanwhile."""

    parent: Reference
    """Key of the parent run, or its first characters."""
    step: Count
    """Step of the checkpoint; `vitline runs show` lists those that are kept."""
    cooldown_images: Count | None = None
    """Train on so many images more, in which the learning rate falls linearly to zero. Empty: to the end of the parent's schedule."""
    name: Name | None = None
    """First part of the run's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: the parent's name
    and `-branch`."""
    num_workers: Count | None = None
    """Ray Train workers. Empty: as the parent. Results do not depend on it."""
    overrides: Overrides = Field(default={})
    """Fields in which the branch differs from the parent by their dotted names, as in {"recipe.optim.peak_lr": 0.0003,
    "recipe.total_steps": 90000}. Network, batch, lanes, seed and kind of optimizer stay. The deployment's description lists the
    fields."""


class FinetuneRequest(FrozenConfig):
    """Fine-tunes a published model on a whole corpus by the paper's rules (SGD, cosine, new zero head)."""

    model: Reference
    """Published model to start from: NAME, NAME/VERSION or URI."""
    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    protocol: FinetuningName | None = None
    """Take steps, batch, resolution, crop and schedule from this protocol, for a corpus of this size."""
    steps: Count | None = None
    """Optimizer steps. Empty: the protocol's, or 500. A shorter training gets a shorter warmup."""
    peak_lr: PositiveFloat | None = None
    """Learning rate at the end of warmup; the paper tries 0.003, 0.01, 0.03 and 0.06. Empty: the protocol's, or 0.03."""
    global_batch_size: Count | None = None
    """Examples per step, over all workers. Empty: the protocol's, or 512."""
    image_size_px: Count | None = None
    """Side of the input in px; position embeddings are resampled. Empty: the protocol's, or the model's own."""
    seed: NonNegativeInt = 0
    """Seed of reading order and augmentation."""
    num_workers: Count | None = None
    """Ray Train workers. Empty: one."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.clip_norm": null}. A cancelled run writes a checkpoint, unless
    {"execution.on_cancel": "discard"} is set. The deployment's description lists the fields."""


class EvaluateRequest(FrozenConfig):
    """Evaluates a published model on tasks. Fine-tuning protocols choose settings on validation, train once more and read test
    once; fewshot, linear, knn and head are probes of its frozen features."""

    model: Reference
    """Published model to evaluate: NAME, NAME/VERSION or URI."""
    tasks: tuple[Reference, ...] = Field(("digits",), min_length=1, max_length=40)
    """Task corpora with train, val and test splits: names or URIs. The 19 of VTAB are named vtab-<task>, and `vtab` means
    all of them that are prepared."""
    protocol: ProtocolName = "small-images"
    """How the model is evaluated: fine-tuning or a probe, with its resolution, settings and selection."""
    seed: NonNegativeInt = 0
    """Seed of reading order, augmentation and random draws; of several seeds the first."""
    num_seeds: int = Field(1, ge=1, le=20)
    """Number of seeds; each gives scores of its own. The paper reports mean and deviation of three."""
    from_scratch: bool = False
    """Also train the same network from scratch, with the same steps and choices of settings, as a control."""
    rescore: bool = False
    """Evaluate again although there are score records; the new records name the old ones."""
    overrides: Overrides = Field(default={})
    """Fields of the protocol by their dotted name, as in {"protocol.precision": "bfloat16"}. The result is another protocol
    with scores of its own. A changed field holds for tasks of every size, and no other field changes with it: with shorter
    total_steps, set warmup_steps, too. The deployment's description lists the fields."""


class PredictRequest(FrozenConfig):
    """Predicts the classes of all images of a corpus with a published model, and stores them as Parquet files. The same request finds
    the same run: it resumes, or is reused."""

    model: Reference
    """Published model: NAME, NAME/VERSION or URI."""
    corpus: Reference
    """Prepared corpus: NAME, NAME/VERSION or URI. Its labels are stored beside the predictions; they need not be classes of the model."""
    splits: tuple[Annotated[str, Field(max_length=80)], ...] = Field((), max_length=20)
    """Splits of the corpus. Empty: train, val and test, those that it has."""
    top_k: Count = 5
    """How many classes are stored for each image, the most probable first; as many as the model has gives all probabilities."""


class PipelineRequest(FrozenConfig):
    """Prepares corpora, pre-trains a model and evaluates it on tasks, as one pipeline whose runs can be compared."""

    name: Name = "icons"
    """First part of the names of its runs and of its model: lower case letters, digits and '-', a letter or digit first; at most 40."""
    corpus: Reference = "icons"
    """Corpus to pre-train on: a preset, which is prepared if it is missing (icons, digits-0-to-4), or a prepared corpus."""
    mix_with: MixWith = ()
    corpus_weight: CorpusWeight = 1.0
    class_map: ClassMap = "names"
    recipe: RecipeName = "icons"
    """What to pre-train and how; `vitline pretrain recipes` describes them. One of your own: the override
    {"recipe": "s3://lab/birds.yaml"}."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, reading order, augmentation and dropout."""
    train_images: Count | None = None
    """Budget of pre-training in images, counting repeats. Empty: the recipe's own. Warmup is shortened in proportion."""
    num_workers: Count | None = None
    """Ray Train workers of pre-training. Empty: the recipe's own. Results do not depend on it."""
    tasks: tuple[Reference, ...] = Field(("new-icons", "letters"), min_length=1, max_length=40)
    """Tasks to evaluate the model on: presets (new-icons, letters, digits, digits-5-to-9) or prepared corpora; `vtab` means all
    tasks of VTAB that are prepared."""
    protocol: ProtocolName = "small-images"
    """How the model is evaluated on each task."""
    from_scratch: bool = True
    """Also train the same network from scratch on every task, as a control."""
    deadline_hours: PositiveFloat | None = None
    """Maximum duration. A plan that does not fit is refused; a run that reaches it keeps a checkpoint and ends as OutOfTime."""
    max_late_hours: PositiveFloat | None = None
    """A scheduled run that starts later than this is skipped. Empty: it runs however late it starts."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.peak_lr": 0.001, "protocol.total_steps": 300}. A cancelled run
    writes a checkpoint, unless {"execution.on_cancel": "discard"} is set. The deployment's description lists the fields."""


class ReconcileRequest(FrozenConfig):
    """Brings flow runs, Ray jobs, runs and pipelines left by killed processes to an end state; sends MLflow what it lacks."""

    dry_run: bool = False
    """Only report what would be done."""
    quiet_minutes: float = Field(5.0, ge=0.0, le=10_000)
    """Leave alone what had a heartbeat within this time."""
    stalled_minutes: float = Field(60.0, ge=0.0, le=10_000)
    """Send an alert for a training or preparation at work that makes no step for this long."""
    min_free_gb: float = Field(20.0, ge=0.0, le=1e6)
    """Send an alert if less is left on the disk of the machine where this runs."""


class CollectGarbageRequest(FrozenConfig):
    """Deletes what is no longer needed: leftovers of killed writers, old checkpoints, work files of corpora, trials of finished
    evaluations, old flow runs."""

    dry_run: bool = True
    """Only list what would be deleted."""
    notice_days: float = Field(0.0, ge=0.0, le=10_000)
    """Delete only what a collection has listed this long ago and what has not changed since; list the rest. 0: delete at once."""
    older_than_days: float = Field(7.0, ge=0.0, le=10_000)
    """Keep everything younger than this."""
    keep_checkpoints: int = Field(1, ge=0, le=1000)
    """Number of newest checkpoints to keep of every finished run."""
    unfinished_days: float = Field(90.0, ge=1.0, le=10_000)
    """Keep the checkpoints of runs that did not finish, and corpora whose preparation did not finish, until they have been
    silent for this long."""
    flow_runs_days: float = Field(90.0, ge=1.0, le=10_000)
    """Keep vitline's flow runs in Prefect for this long after their end; those of reconcile and collect-garbage that had nothing
    to do for 2 days."""
    keep: tuple[Reference, ...] = Field((), max_length=100)
    """Keys of runs and names of corpora of which nothing is deleted, or their first characters."""
