"""The forms: what a person fills in to start a flow, in the Prefect UI, by its API or by `vitline flows trigger` (DESIGN 3.9).

One model a flow, at most 12 fields, a docstring on each (the form's help text). What a JSON schema can say is refused by the
Prefect API; what it cannot say is checked by `flows/requests/resolve.py` before anything is spent. Imports no engine.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, PositiveFloat

from flows.requests.choices import SourceKind
from infra.config import FrozenConfig
from infra.redact import holds_credentials

# Kept equal to what is there by tests/flows/requests/test_forms.py: a form must show choices without importing the rooms.
PresetName = Literal["noto-emoji", "twitter-emoji", "digits", "digits-0-to-4", "digits-5-to-9"]
RecipeName = Literal[
    "emoji", "digits",
    "vit-s16-i21k", "vit-b32-i21k", "vit-b16-i21k", "vit-l32-i21k", "vit-l16-i21k", "vit-b16-imagenet",
    "vit-b32-jft", "vit-b16-jft", "vit-l32-jft", "vit-l16-jft", "vit-h14-jft",
    "r50-b32-jft", "r50-b16-jft", "r50-l32-jft", "r50-l16-jft",
    "bit-r50x1-jft", "bit-r50x2-jft", "bit-r101x1-jft", "bit-r152x1-jft", "bit-r152x2-jft",
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
"""Patterns in words: Prefect's API shows them as they are, so that the help of the fields says the same."""
Name = Annotated[str, Field(pattern=NAME, max_length=40)]
# Not pydantic's PositiveInt: "more than 0" is not how people say it, and a form's number field counts from its minimum.
Count = Annotated[int, Field(ge=1)]


def without_credentials(uri: str) -> str:
    if holds_credentials(uri):
        raise ValueError("a URI without user, password or signature is wanted: forms are kept where many can read them")
    return uri


Reference = Annotated[
    str,
    Field(min_length=1, max_length=500, json_schema_extra={"pattern": "^(?![^/?#]*://[^/]*@)[^?]*$"}),
    AfterValidator(without_credentials),
]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Overrides = dict[str, JsonValue]


class PrepareRequest(FrozenConfig):
    """Labelled images to a corpus of verified Parquet shards."""

    preset: PresetName | None = None
    """A corpus that vitline can fetch by itself. Leave empty to prepare a source of your own."""
    source: Reference | None = None
    """Folder, archive, table or dataset of labelled images: a path that every worker sees, or an s3:// URI."""
    kind: SourceKind = "class_folders"
    """What lies there. Class folders: the folder of an image is its class; an archive of such folders will do, too."""
    name: str | None = Field(None, pattern=CORPUS_NAME, max_length=80)
    """Name of the corpus, needed for a source: lower case letters, digits, and '-', '_', '.', a letter or digit first; at most 80."""
    val_fraction: Fraction = 0.1
    """Share of the images held out for validation, where the source names no such split."""
    test_fraction: Fraction = 0.1
    """Share of the images held out for the test, where the source names no such split."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Images with the same pixels: keep one, or all of one split. Two splits never share an image."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Images that look alike (scaled, recompressed, mirrored): keep all, or one of each. With `add_to` only among new ones."""
    min_images_per_class: Count = 1
    """Classes with fewer images are left out."""
    decontaminate: tuple[Reference, ...] = Field((), max_length=100)
    """Prepared corpora, NAME or NAME/VERSION, whose test and validation images, and what looks like them, are left out."""
    add_to: Reference | None = None
    """Prepared corpus, NAME/VERSION, that gets these images as a further segment. Empty: a corpus of its own."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"source.labels_column": "tags", "recipe.class_map": "imagenet21k-p",
    "recipe.val_per_class": 50, "execution.examples_per_chunk": 1024}. The deployment's description lists them."""


class PretrainRequest(FrozenConfig):
    """A prepared corpus to a pre-trained network. The same request finds the same run: it resumes, or is reused."""

    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    recipe: RecipeName = "emoji"
    """What to train and how; `vitline pretrain recipes` describes them."""
    name: Name | None = None
    """First part of the run's name: lower case letters, digits and '-', a letter or digit first; at most 40. Empty: corpus and recipe."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, order, augmentation and dropout."""
    train_images: Count | None = None
    """Budget in images, counting repeats. Empty: the recipe's own. Warmup shrinks with it."""
    peak_lr: PositiveFloat | None = None
    """Learning rate at the end of warmup. Empty: the recipe's own."""
    num_workers: Count | None = None
    """Ray Train workers, one GPU each where the cluster has GPUs or can get some (`execution.device`). Empty: the recipe's
    own. Results do not depend on it."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.weight_decay": 0.1, "execution.save_every_steps": 500}. A
    cancel writes a checkpoint first; {"execution.on_cancel": "discard"} leaves that out. The
    deployment's description lists the fields."""


class FinetuneRequest(FrozenConfig):
    """A published model to one fine-tuned on a whole corpus, by the paper's rules (SGD, cosine, new zero head)."""

    model: Reference
    """Published model to start from: NAME, NAME/VERSION or URI."""
    corpus: Reference
    """Prepared corpus to train on: NAME, NAME/VERSION or URI."""
    protocol: FinetuningName | None = None
    """Steps, batch, resolution, crop and schedule as this protocol has them for a corpus of this size."""
    steps: Count | None = None
    """Optimizer steps. Empty: the protocol's, or 500. Warmup shrinks with them."""
    peak_lr: PositiveFloat | None = None
    """Learning rate at the end of warmup; the paper tries 0.003, 0.01, 0.03 and 0.06. Empty: the protocol's, or 0.03."""
    global_batch_size: Count | None = None
    """Examples per step, over all workers. Empty: the protocol's, or 512."""
    image_size_px: Count | None = None
    """Side of the input; position embeddings are resampled. Empty: the protocol's, or the model's own."""
    seed: NonNegativeInt = 0
    """Seed of order and augmentation."""
    num_workers: Count | None = None
    """Ray Train workers. Empty: one."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.clip_norm": null}. A cancel writes a checkpoint first;
    {"execution.on_cancel": "discard"} leaves that out. The
    deployment's description lists the fields."""


class EvaluateRequest(FrozenConfig):
    """A published model to scores on tasks: select on validation, train once more, read test once; or its features as they
    are, for the protocols fewshot, linear, knn and head."""

    model: Reference
    """Published model to score: NAME, NAME/VERSION or URI."""
    tasks: tuple[Reference, ...] = Field(("digits",), min_length=1, max_length=40)
    """Task corpora with train, val and test splits: names or URIs; the 19 of VTAB are named vtab-<task>, and `vtab` means
    all of them that are prepared."""
    protocol: ProtocolName = "small-images"
    """How the model is fine-tuned, or what reads its features; fixes resolution, settings and selection."""
    seed: NonNegativeInt = 0
    """Seed of order, augmentation and draws; the first one where there are several."""
    num_seeds: int = Field(1, ge=1, le=20)
    """How many seeds, each a run of its own. The paper gives mean and deviation of three."""
    from_scratch: bool = False
    """Also train the same network from scratch, with the same steps and choices, as a control."""
    rescore: bool = False
    """Train and score again what has a record, in spite of it; the new records name the old ones."""
    overrides: Overrides = Field(default={})
    """Fields of the protocol by their dotted name, as in {"protocol.precision": "bfloat16"}; it is another protocol then,
    and its scores stand apart. It holds for tasks of every size, and no other field follows: with shorter total_steps set
    warmup_steps, too. The deployment's description lists the fields."""


class PipelineRequest(FrozenConfig):
    """Prepare, pre-train, fine-tune and score: one line in the comparison of every night."""

    name: Name = "emoji"
    """First part of the names of its runs and of its model: lower case letters, digits and '-', a letter or digit first; at most 40."""
    corpus: Reference = "noto-emoji"
    """Corpus to pre-train on: a preset that is prepared if need be (noto-emoji, digits-0-to-4), or a prepared corpus."""
    recipe: RecipeName = "emoji"
    """What to pre-train and how; `vitline pretrain recipes` describes them."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, order, augmentation and dropout."""
    train_images: Count | None = None
    """Budget of pre-training in images, counting repeats. Empty: the recipe's own. Warmup shrinks with it."""
    num_workers: Count | None = None
    """Ray Train workers of pre-training. Empty: the recipe's own. Results do not depend on it."""
    tasks: tuple[Reference, ...] = Field(("twitter-emoji", "digits"), min_length=1, max_length=40)
    """Tasks to score the model on: presets (twitter-emoji, digits, digits-5-to-9) or prepared corpora; `vtab` means all tasks
    of VTAB that are prepared."""
    protocol: ProtocolName = "small-images"
    """How the model is fine-tuned on each task."""
    from_scratch: bool = True
    """Also train the same network from scratch on every task, as a control."""
    deadline_hours: PositiveFloat | None = None
    """Longest run. A plan that does not fit is refused; a run that reaches it keeps a checkpoint and ends as OutOfTime."""
    max_late_hours: PositiveFloat | None = None
    """A scheduled run that starts later than this is dropped with the reason. Empty: it runs however late."""
    overrides: Overrides = Field(default={})
    """Any other field by its dotted name, as in {"recipe.optim.peak_lr": 0.001, "protocol.total_steps": 300}. A cancel
    writes a checkpoint first; {"execution.on_cancel": "discard"} leaves that out. The
    deployment's description lists the fields."""


class CompareRequest(FrozenConfig):
    """Pipelines or runs side by side, with the published rows."""

    runs: tuple[Reference, ...] = Field((), max_length=20)
    """Keys of pipelines or runs, or the beginnings of keys. Empty: the newest pipelines."""
    newest: int = Field(7, ge=2, le=50)
    """How many of the newest pipelines, where no keys are given."""


class ReconcileRequest(FrozenConfig):
    """Ends what nobody follows any more: flow runs, Ray jobs and runs that disagree; sends what MLflow lacks."""

    dry_run: bool = False
    """Only say what would be done."""
    quiet_minutes: float = Field(5.0, ge=0.0, le=10_000)
    """Leave alone what showed a sign of life in this time."""


class CollectGarbageRequest(FrozenConfig):
    """Deletes what no reader can see or wants: leftovers of killed writers, checkpoints of finished runs."""

    dry_run: bool = True
    """Only list what would be deleted."""
    older_than_days: float = Field(7.0, ge=0.0, le=10_000)
    """Touch nothing that is younger."""
    keep_checkpoints: int = Field(1, ge=0, le=1000)
    """Newest checkpoints to keep of every finished run."""
