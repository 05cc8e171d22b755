"""A training whose names were looked up and whose inputs were opened once, on the way from a form to a job. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from vitline.infra.keys import run_key
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.corpora.probed_corpora import probed_corpora
from vitline.vit.corpora.training_corpora import OpenCorpora, TrainingCorpora, open_corpora
from vitline.vit.published.model_record import ModelRecord, published_record
from vitline.vit.run.branch import check_branch
from vitline.vit.run.run_spec import RunSpec, parent_spec


@dataclass(frozen=True)
class ResolvedTraining:
    """A training with what its config names, as it was read. The job and its workers read that anew, and check it by the digests of
    the spec."""

    root: str
    config: TrainConfig
    corpora: TrainingCorpora
    initial: ModelRecord | None = None
    """The model that the weights come from; None for random weights, and for a branch."""
    parent: RunSpec | None = None
    """The run that a branch starts from."""

    def spec(
        self, night: datetime | None = None, pause_at_step: int | None = None, pause_at: float | None = None
    ) -> RunSpec:
        """The spec of its run, whose key covers config, corpora, and initial model or parent. Reads nothing.

        Raises ValueError for a branch that changes what its parent does not allow.
        """
        config, parent = self.config, self.parent
        # The corpus digest does not cover the names of the splits, but the results of the run depend on them.
        inputs = {"split": config.split, "val_split": config.val_split or "", **self.corpora.inputs()}
        if config.parent is not None:
            assert parent is not None, "resolve() reads the parent"
            # The weights come from it by way of the parent, even if it was deleted since.
            if "init_model" in parent.inputs:
                inputs["init_model"] = parent.inputs["init_model"]
            ours = {name: value for name, value in parent.inputs.items() if name != "parent"}
            check_branch(config.parent, config.recipe, inputs, parent.config.recipe, ours)
            inputs["parent"] = f"{parent.run_key}@{config.parent.step}"
        elif self.initial is not None:
            inputs["init_model"] = self.initial["digest"]
        return RunSpec(
            run_key=run_key(config.name, config.stage, config.config_digest, inputs, night),
            config=config,
            inputs=inputs,
            models=f"{open_store(self.root).uri.rstrip('/')}/models",
            night=night,
            pause_at_step=pause_at_step,
            pause_at=pause_at,
        )


def resolve(
    config: TrainConfig,
    root: str,
    opened: OpenCorpora | None = None,
    published: Mapping[str, ModelRecord] | None = None,
    parent: RunSpec | None = None,
) -> ResolvedTraining:
    """The training of a config that names everything by its URI. What was read before is taken from `opened`, `published` (records of
    models by URI) and `parent`.

    Raises ValueError for a mixture that does not fit, for a corpus that cannot be probed on and for an unknown parent;
    RuntimeError or FileNotFoundError for another input that is missing.
    """
    corpora, initial = open_corpora(config, opened), None
    probed_corpora(config, corpora, opened)  # raises for one that the probes of checkpoints cannot use
    if config.parent is not None:
        parent = parent or parent_spec(config.parent)
    elif config.init_model is not None:
        initial = (published or {}).get(config.init_model) or published_record(open_store(config.init_model))
    return ResolvedTraining(root, config, corpora, initial, parent)
