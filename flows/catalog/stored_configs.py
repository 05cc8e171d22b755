"""The fields of `config.json` of a run that lists and run snapshots read. Files of other versions of vitline are read, too, so
they are not validated as the specs that jobs read."""

from typing import Any, NotRequired, TypedDict, final

JSON = dict[str, Any]


class StoredMixedCorpus(TypedDict):
    """A corpus of a mixture."""

    corpus: str
    weight: float


class StoredMixture(TypedDict):
    """`vitline.vit.config.MixtureConfig` as JSON."""

    corpora: list[StoredMixedCorpus]
    class_map: str


class StoredParent(TypedDict):
    """`vitline.vit.config.ParentCheckpoint` as JSON."""

    run: str
    step: int


class StoredTraining(TypedDict):
    """The config of a training, `vitline.vit.config.TrainConfig` as JSON."""

    stage: str
    """pretrain or finetune."""
    corpus: str
    mixture: NotRequired[StoredMixture | None]
    split: str
    val_split: str | None
    init_model: str | None
    parent: NotRequired[StoredParent]
    recipe: JSON
    execution: JSON


@final
class TrainingFile(TypedDict):
    """`vitline.vit.run.run_spec.RunSpec` as JSON."""

    run_key: str
    config: StoredTraining
    inputs: dict[str, str]
    night: NotRequired[str | None]


class StoredSource(TypedDict):
    """Where the images of a corpus come from."""

    kind: str


class StoredRequest(TypedDict):
    """The request for a corpus, `vitline.data_prep.config.CorpusConfig` as JSON."""

    name: str
    source: StoredSource
    recipe: NotRequired[JSON]


@final
class PreparationFile(TypedDict):
    """`vitline.data_prep.prepare.job.PrepareSpec` as JSON."""

    run_key: str
    requests: list[StoredRequest]


class StoredTask(TypedDict):
    """A task of an evaluation."""

    name: str
    corpus: str


@final
class EvaluationFile(TypedDict):
    """`vitline.vit.evaluation.evaluate.EvaluationSpec` as JSON."""

    run_key: str
    tasks: list[StoredTask]
    models: list[str | None]
    architecture: JSON
    protocol: JSON
    seed: int
    num_seeds: NotRequired[int]


@final
class PredictionFile(TypedDict):
    """`vitline.vit.features.prediction_plan.PredictionSpec` as JSON."""

    run_key: str
    model: str
    corpus: str
    splits: list[str]
    top_k: int


RunFile = TrainingFile | PreparationFile | EvaluationFile | PredictionFile


def stage_of(config: RunFile) -> str:
    """prepare, pretrain, finetune, evaluate or predict."""
    if "config" in config:
        return config["config"]["stage"]
    if "top_k" in config:
        return "predict"
    return "prepare" if "requests" in config else "evaluate"
