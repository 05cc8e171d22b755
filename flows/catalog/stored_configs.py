"""The fields of `config.json` of a run that lists and run snapshots read. Files of other versions of vitline are read, too, so
they are not validated as the specs that jobs read."""

from typing import Any, NotRequired, TypedDict, final

JSON = dict[str, Any]


class StoredTraining(TypedDict):
    """The config of a training, `vitline.vit.config.TrainConfig` as JSON."""

    stage: str
    """pretrain or finetune."""
    corpus: str
    mixture: NotRequired[JSON | None]
    split: str
    val_split: str | None
    init_model: str | None
    parent: NotRequired[JSON]
    recipe: JSON
    execution: JSON


@final
class TrainingFile(TypedDict):
    """`vitline.vit.run.run_spec.RunSpec` as JSON."""

    run_key: str
    config: StoredTraining
    inputs: dict[str, str]
    night: NotRequired[str | None]


@final
class PreparationFile(TypedDict):
    """`vitline.data_prep.prepare.job.PrepareSpec` as JSON."""

    run_key: str
    requests: list[JSON]


@final
class EvaluationFile(TypedDict):
    """`vitline.vit.evaluation.evaluate.EvaluationSpec` as JSON."""

    run_key: str
    tasks: list[JSON]
    models: list[str | None]
    architecture: JSON
    protocol: JSON
    seed: int
    num_seeds: NotRequired[int]
    keep_models: NotRequired[bool]


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
