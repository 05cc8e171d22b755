"""Trials: one fine-tuning run each. The result of a trial depends only on its spec and is stored under its key.

Imports no torch.
"""

import math
from typing import Literal, Self

from pydantic import ConfigDict, model_validator

from vitline.infra.config import FrozenConfig, digest_of
from vitline.infra.keys import run_key
from vitline.infra.records import StoredRecord
from vitline.infra.storage import Store
from vitline.vit.config import TrainRecipe
from vitline.vit.evaluation.calibration import Calibration


class Keep(FrozenConfig):
    """Where a final trial publishes its network, and what the record of the model says of the score."""

    models: str
    """URI of the folder of models."""
    score: str
    """Key of the score record."""
    protocol: str


class Trial(FrozenConfig):
    """One fine-tuning run: train on one split, score another one once."""

    task: str
    """Name of the task."""
    corpus: str
    """URI of the corpus."""
    corpus_digest: str
    decode_digest: str
    """Digest of the decode policy, which determines the pixels and is not part of the corpus digest."""
    model: str | None
    """URI of the published model to start from; None trains from scratch."""
    model_digest: str | None
    phase: Literal["select", "final"]
    """`select` is scored on validation, to choose a setting. `final` is scored on test."""
    train_split: str
    score_split: str
    recipe: TrainRecipe
    repetition: int = 0
    """More than 0 if the task is scored again although there is a result."""
    keep: Keep | None = None
    """Of a final trial whose network is published. Not part of the key, as no score depends on it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) != (self.model_digest is None):
            raise ValueError("Give both model and model_digest, or neither to train from scratch.")
        return self

    @property
    def title(self) -> str:
        """Title for pages and figures: `digits: emoji/1`, or `digits from scratch`."""
        return f"{self.task}: {model_label(self.model)}" if self.model else f"{self.task} from scratch"

    @property
    def key(self) -> str:
        """`<task>-<phase>-<12 hex>`: equal trials have equal keys, wherever their inputs are stored."""
        inputs = {
            "corpus": self.corpus_digest,
            "decode": self.decode_digest,
            "splits": f"{self.train_split}>{self.score_split}",
        }
        if self.model_digest is not None:
            inputs["model"] = self.model_digest
        if self.repetition:
            inputs["repetition"] = str(self.repetition)
        return run_key(f"{self.task}-{self.phase}", "finetune", digest_of(self.recipe), inputs)

    @property
    def kept_name(self) -> str:
        """As what its network is published, if it is."""
        return kept_name(self.model, self.task, self.key)


PROGRESS = "progress.json"
"""Below `trials/<trial key>/`, beside the checkpoints of a trial that has not ended."""


class TrialProgress(StoredRecord):
    """What a trial has noted until a checkpoint, or until a moment after it. A loss that is not finite is stored as text."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")

    saved_at: float = 0.0
    """Unix seconds."""
    train_losses: tuple[tuple[int, float], ...] = ()
    wall_s: float = 0.0
    cpu_s: float = 0.0


def task_of(trial_key: str) -> str:
    """The name of the task of a trial."""
    return trial_key.rsplit("-", 2)[0]


class TrialResult(StoredRecord):
    """The scores of a trial on its whole `score_split`; see `Evaluation`. A loss that is not finite is stored as text."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")

    schema_version: int = 1
    key: str
    top1: float
    loss: float
    num_examples: int
    majority_fraction: float
    train_losses: tuple[tuple[int, float], ...]
    """(step, loss of its batch), for curves."""
    wall_s: float
    cpu_s: float
    diverged: bool
    """True if the training ended as diverged; the score is then that of the last finite weights. A diverged final trial is
    not scored: no image of the test split is read."""
    calibration: Calibration | None = None
    """Of a final trial; None of records before there was one, and where a probability is not finite."""
    files: tuple[str, ...] = ()
    """Keys, below `trials`, of the files of a final trial: its predictions first; see `trial_files.py`."""

    @property
    def failure(self) -> str | None:
        """Why the setting of this trial has failed; None if it can be chosen."""
        if self.diverged:
            finite = [step for step, loss in self.train_losses if math.isfinite(loss)]
            last = f"the last finite loss is that of step {finite[-1]:,}" if finite else "no loss was finite"
            return f"the training diverged ({last})"
        return None if math.isfinite(self.loss) else f"the loss of the trained network is {self.loss}"


def kept_name(model: str | None, task: str, final_trial: str) -> str:
    """`<model>-<task>/<12 hex>`: the network that a final trial, by its key, has fine-tuned from the model at a URI; of one that was
    trained from scratch `scratch-<task>/<12 hex>`. The hex digits are those of the trial, so seeds, protocols, versions of the model
    and repetitions have each a version of their own."""
    name = model_label(model).partition("/")[0] if model else "scratch"
    return f"{name}-{task}/{final_trial.rpartition('-')[2]}"


def model_label(uri: str) -> str:
    """`<name>/<version>` from the URI of a published model, as `vitline model show` takes it."""
    return "/".join(uri.rstrip("/").split("/")[-2:])


def finished_result(trials: Store, trial: Trial) -> TrialResult | None:
    return TrialResult.load_or_none(trials, f"{trial.key}.json")
