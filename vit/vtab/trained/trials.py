"""Fine-tuning trials: the unit of work of a sweep. A trial is a pure function of its spec and is kept under its key.
Imports no torch."""

from typing import Literal, Self

from pydantic import model_validator

from infra.config import FrozenConfig, digest_of
from infra.keys import run_key
from infra.storage import Store
from vit.config import TrainRecipe


class Trial(FrozenConfig):
    """One fine-tuning: train on one split, score another once."""

    task: str
    """Name of the task."""
    corpus: str
    """URI of the task's corpus."""
    corpus_digest: str
    """Its digest."""
    decode_digest: str
    """Of the decode policy, which the corpus digest does not cover: other pixels are another trial."""
    model: str | None
    """URI of the published model to start from; none trains from scratch."""
    model_digest: str | None
    """Its digest."""
    phase: Literal["select", "final"]
    """Choosing a setting on validation, or the one training whose test score counts."""
    train_split: str
    score_split: str
    recipe: TrainRecipe
    repetition: int = 0
    """Trained again in spite of a result."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) != (self.model_digest is None):
            raise ValueError("model and model_digest belong together; give both, or neither to train from scratch.")
        return self

    @property
    def title(self) -> str:
        """For people: `digits: emoji/1`, or `digits from scratch`."""
        return f"{self.task}: {model_label(self.model)}" if self.model else f"{self.task} from scratch"

    @property
    def key(self) -> str:
        """`<task>-<phase>-<12 hex>`: equal trials have equal keys, wherever their inputs lie."""
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


class TrialResult(FrozenConfig):
    """What a trial found on the whole scored split; see `Evaluation`."""

    schema_version: int = 1
    key: str
    top1: float
    loss: float
    num_examples: int
    majority_fraction: float
    train_losses: tuple[tuple[int, float], ...]
    """(step, loss of that batch), for curves."""
    wall_s: float
    cpu_s: float
    diverged: bool
    """Non-finite to the end: the score is that of the last finite weights."""
    files: tuple[str, ...] = ()
    """Of a final trial, keys below the trials: its predictions, then what people see of them; see `trial_files`."""


def model_label(uri: str) -> str:
    """`<name>/<version>` of a published model's URI: what people call it, and what `vitline model show` takes."""
    return "/".join(uri.rstrip("/").split("/")[-2:])


def finished_result(trials: Store, trial: Trial) -> TrialResult | None:
    try:
        return TrialResult.model_validate(trials.read_json(f"{trial.key}.json"))
    except FileNotFoundError:
        return None
