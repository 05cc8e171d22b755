"""The state that a training starts from: its newest checkpoint, or the state that it begins with."""

import logging
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from vitline.infra.records import check_digest
from vitline.infra.runs.handle import Run
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.manifest import CannotResume, RunIdentity
from vitline.vit.checkpoints.restore import resume, rewind, start_from
from vitline.vit.corpora.training_corpora import TrainingCorpora, open_corpora
from vitline.vit.models.config import UserNetworkConfig
from vitline.vit.models.user_code import user_code_error
from vitline.vit.published.models import adapt, initialised, load_model
from vitline.vit.run.run_spec import RunSpec, parent_spec
from vitline.vit.training.loop import TrainState, initial_state, torch_seed, with_optimizer
from vitline.vit.training.sharding.fsdp import shard
from vitline.vit.training.world import World

log = logging.getLogger(__name__)


@dataclass
class StartState:
    """Restores or makes states of a run, the same on every rank; every rank must call its methods."""

    held: Run
    spec: RunSpec
    world: World

    def __post_init__(self) -> None:
        self.config, self.recipe = self.spec.config, self.spec.config.recipe

    @property
    def first_step(self) -> int:
        """The step of the state that the run begins with: of a branch that of its parent's checkpoint."""
        return self.config.parent.step if self.config.parent else 0

    @cached_property
    def corpora(self) -> TrainingCorpora:
        """The corpora, opened. Raises RuntimeError if they, or the class map, are not those that the run was started on."""
        corpora, started_on = open_corpora(self.config), self.spec.inputs
        for part, digest in zip(corpora.parts, corpora.digests_in(started_on), strict=True):
            check_digest(part.store.uri, part.manifest.digest, digest, "start a new run")
        if corpora.digest != started_on["corpus"]:
            raise RuntimeError(
                f"The class map {corpora.class_map} is not the one that this run was started on. Restore it, or start a new run."
            )
        return corpora

    @property
    def identity(self) -> RunIdentity:
        """What the checkpoints of the run say of it."""
        return {
            "run_key": self.spec.run_key,
            "recipe": self.recipe.model_dump(mode="json"),
            "config_digest": self.config.config_digest,
            "corpus_digest": self.corpora.digest,
            "class_map_digest": self.corpora.class_map_digest,
        }

    def newest(self) -> TrainState:
        """The state of the newest checkpoint, or the one that the run begins with."""
        self._check_user_code()
        state = self._initial()
        if (restored := resume(self.held.store, state, self.identity, self.world, self.held.check)) is not None:
            log.info("resumed at step=%d from %s", state.step, restored.prefix)
        else:
            self._load_parent(state)
        return state

    def first(self) -> TrainState:
        """The state that the run begins with."""
        state = self._initial()
        self._load_parent(state)
        return state

    def rewind(self, state: TrainState) -> None:
        """Makes `state` one from before the last spike, and deletes the checkpoints behind it."""
        rewind(self.held.store, state, self.first, self.world, self.held.check)

    def _check_user_code(self) -> None:
        """Raises CannotResume, on every rank, if the code of a user-defined network, loss or optimizer is not the one that the run began
        with on one of them."""
        optim = self.recipe.optim
        used = {
            "loss": (self.recipe.loss, self.recipe.loss_source),
            "optimizer": (optim.optimizer, optim.optimizer_source),
        }
        if isinstance(network := self.recipe.model, UserNetworkConfig):
            used["network"] = network.network, network.source
        problem = user_code_error(used)
        if problems := [text for text in self.world.gather(problem) if text]:
            raise CannotResume(problems[0])

    def _load_parent(self, state: TrainState) -> None:
        """Makes `state` that of the parent's checkpoint, if the run is a branch. Raises CannotResume."""
        if (parent := self.config.parent) is None:
            return
        theirs = parent_spec(parent)
        of_parent: RunIdentity = {**self.identity, "recipe": theirs.config.recipe.model_dump(mode="json")}
        started = start_from(open_store(parent.run), parent.step, state, of_parent, self.world)
        log.info("branched at step=%d from %s of %s", state.step, started.prefix, theirs.run_key)

    def _initial(self) -> TrainState:
        split = partial(shard, execution=self.config.execution, world=self.world)
        if self.config.init_model is None or self.config.parent is not None:
            return initial_state(self.recipe, self.corpora.num_classes, self.world.device, split)
        source = load_model(self.config.init_model)
        check_digest(source.uri, source.digest, self.spec.inputs["init_model"], "start a new run")
        torch.manual_seed(torch_seed(self.recipe.seed, "init"))
        if self.config.stage == "pretrain":
            network = initialised(source, self.recipe.model, self.corpora.class_names())
        else:
            network = adapt(
                source.network, self.recipe.model, self.corpora.num_classes, self.recipe.model.head_bias_init
            )
        return with_optimizer(network.to(self.world.device).train(), self.recipe, split)
