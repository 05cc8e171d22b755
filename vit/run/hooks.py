"""What a training run does besides training: saving, validation, pages, publishing. New periodic work is one function here."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from vitline.infra.runs.handle import Run
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.run_state import StateDetail
from vitline.infra.runs.watchdog import watched
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.best import BestCheckpoint
from vitline.vit.checkpoints.names import Retention, checkpoint_steps
from vitline.vit.checkpoints.save import CheckpointSaver, start_id
from vitline.vit.corpora.training_corpora import TrainingCorpus
from vitline.vit.input.batches import Batch, LoaderResources, eval_batches
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.input.prefetch import Prefetcher
from vitline.vit.models.config import UserNetworkConfig
from vitline.vit.models.masked_patches import MaskedPatchModel
from vitline.vit.models.network import Network
from vitline.vit.pages.first_inputs import save_first_inputs
from vitline.vit.pages.inspect_run import inspect_run
from vitline.vit.pages.spikes import spike_text, worst_examples, write_spike
from vitline.vit.published.models import publish
from vitline.vit.run.branch import unpin_parent
from vitline.vit.run.start_state import StartState
from vitline.vit.training.evaluate import Evaluation, evaluate, evaluate_patches
from vitline.vit.training.guard.spike_guard import Spike
from vitline.vit.training.loop import Hook, TrainState
from vitline.vit.training.reporter import Reporter

log = logging.getLogger(__name__)
UNTRAINED_HEAD = "not trained: the network has learned to predict masked patches, and is to be fine-tuned"


@dataclass
class RunHooks:
    """The periodic work of one run on one rank, and its work at the end. `training/fit.py` documents the order of writes."""

    held: Run
    start: StartState
    reporter: Reporter
    loading: LoaderResources
    """How validation reads."""
    micro_batch: int

    def __post_init__(self) -> None:
        self.spec, self.config, self.recipe = self.start.spec, self.start.config, self.start.recipe
        self.world, self.corpora = self.start.world, self.start.corpora
        self.best, self._parent_let_go = BestCheckpoint(self.held.store), False

    def save_every(self) -> tuple[Hook, CheckpointSaver]:
        """Saves every `execution.save_every_steps` and before a stop. No save of an earlier saver may be in flight."""
        execution = self.config.execution
        retention = Retention(
            keep=execution.keep_checkpoints,
            rewind_steps=self.recipe.spike_guard.steps_back,
            keep_every_images=execution.keep_every_images,
            save_every_steps=execution.save_every_steps,
            global_batch_size=self.recipe.input.global_batch_size,
        )
        saver = CheckpointSaver(self.held, self.world, retention, self._before_commit, self._let_parent_go)
        started, identity = start_id(self.world), self.start.identity

        def save(state: TrainState) -> None:
            saver.save(state, {**identity, "save_id": f"{started}-{state.step}", "images_seen": self.images(state)})

        return Hook(execution.save_every_steps, save, on_stop="run"), saver

    def _before_commit(self) -> None:
        """Called on rank 0 under its lease: the checkpoint before this one, if it is the best, is not to be deleted for it."""
        self.reporter.seal()
        self.best.mark()

    def _let_parent_go(self) -> None:
        """A branch that has a checkpoint of its own to go back to needs that of its parent no longer. Called after each commit."""
        if self.config.parent is None or self._parent_let_go:
            return
        steps = checkpoint_steps(self.held.store)
        if max(steps) - min(steps) >= self.recipe.spike_guard.steps_back:
            unpin_parent(self.config.parent, self.spec.run_key)
            self._parent_let_go = True

    def images(self, state: TrainState) -> int:
        """Images that the network was trained on."""
        return state.step * self.recipe.input.global_batch_size

    def first_inputs(self, step: int, batches: Iterator[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
        """Rank 0 writes the first images of the run. Each batch counts as progress."""
        read = watched(batches)
        is_first = step == self.start.first_step and self.world.rank == 0
        return save_first_inputs(self.held.store, read) if is_first else read

    def spike_pages(self, spike: Spike, batches: Sequence[Batch], example_losses: Sequence[Tensor]) -> None:
        """Logs a spike and leaves its record and the pictures of its batch in the folder `spikes` of the run."""
        worst = worst_examples(batches, example_losses, self.world)
        if self.world.rank != 0:
            return
        log.warning("%s", spike_text(spike, self.recipe.spike_guard.action))
        try:
            self.held.check()
            write_spike(
                self.held.store,
                spike,
                self.config,
                worst,
                self.corpora,
                world_size=self.world.size,
                title=self.spec.run_key,
            )
        except LeaseLost:
            raise
        except Exception:  # a picture must not end a training
            log.warning("the pictures of the spike at step %d could not be written", spike["step"], exc_info=True)

    def validate_every(self) -> list[Hook]:
        """Scores the validation split every `execution.evaluate_every_steps`. At the last step `score_at_end` does."""

        def score(state: TrainState) -> None:
            if 0 < state.step < self.recipe.total_steps:
                self.evaluate(state.evaluation_model(), state.step)

        every = self.config.execution.evaluate_every_steps
        return [Hook(every, score, on_stop="skip")] if every else []

    def evaluate(self, network: Network, step: int) -> Evaluation | None:
        """Scores the validation splits of all corpora together, on all ranks, and records it; None if there is none, or no labels are
        learned."""
        split = self.config.val_split
        if split is None or not (parts := self.corpora.with_split(split)):
            return None

        def batches() -> Iterator[Batch]:
            for part in parts:
                with self._eval_batches(part, split, self.micro_batch, self.loading) as loaded:
                    yield from watched(loaded)

        num_rows = sum(part.num_rows(split) for part in parts)
        if self.recipe.masked_patches is not None:
            patches = evaluate_patches(network, batches(), num_rows, self.recipe, self.world)
            self.reporter.record(step, patches)
            self.note_score(step, patches["val/patch_accuracy"])
            return None
        score = evaluate(
            network,
            batches(),
            num_rows,
            loss=self.recipe.loss,
            precision=self.recipe.precision,
            world=self.world,
            average_precision=not self.corpora.single_label,
        )
        metrics = {"val/top1": score.top1, "val/loss": score.loss}
        if score.mean_average_precision is not None:
            metrics["val/mean_average_precision"] = score.mean_average_precision
        self.reporter.record(step, metrics)
        self.note_score(step, metrics.get("val/mean_average_precision", score.top1))
        return score

    def note_score(self, step: int, score: float) -> None:
        """The score by which the best checkpoint is chosen, where it is kept."""
        if self.config.execution.keep_best:
            self.best.scored(step, score)

    def _eval_batches(
        self, part: TrainingCorpus, split: str, batch_size: int, loading: LoaderResources
    ) -> Prefetcher[Batch]:
        augment, labels = self.recipe.input.augment, part.labels(split)
        return eval_batches(
            part.store, part.manifest, split, augment, batch_size=batch_size, loading=loading, labels=labels
        )

    def at_end(self, state: TrainState) -> StateDetail:
        """Scores, publishes and draws the figures of a network that is trained; what `state.json` says of it. Every rank must call it."""
        network = state.evaluation_model()
        detail = self._score_at_end(network, state.step)
        if self.world.rank == 0:
            trained = network.network if isinstance(network, MaskedPatchModel) else network
            detail["model"] = self._publish_at_end(trained, state)
            detail["inspection"] = self._figures_at_end(trained)
            self.held.check()
            self.best.mark()
        return detail

    def _score_at_end(self, network: Network, step: int) -> StateDetail:
        """The scores of the validation split; empty if there is none."""
        score = self.evaluate(network, step)
        if score is None:
            return {}
        detail: StateDetail = {
            "val_top1": score.top1,
            "val_examples": score.num_examples,
            "val_majority_fraction": score.majority_fraction,
        }
        if score.mean_average_precision is not None:
            detail["val_mean_average_precision"] = score.mean_average_precision
        return detail

    def _publish_at_end(self, network: Network, state: TrainState) -> str:
        """Publishes the model; its URI."""
        return publish(
            open_store(self.spec.models),
            self.config.name,
            self.spec.run_key.rsplit("-", 1)[1],
            network,
            ImageContract(decode=self.corpora.decode_policy, evaluation=self.recipe.input.augment),
            self.corpora.class_names(),
            {
                "run_key": self.spec.run_key,
                "config_digest": self.config.config_digest,
                "corpus_digest": self.corpora.digest,
                "steps": state.step,
                "images_seen": self.images(state),
                **({"head": UNTRAINED_HEAD} if self.recipe.masked_patches else {}),
                **({"parent": self.spec.inputs["parent"]} if self.config.parent else {}),
                **self.corpora.provenance(),
            },
            self.held.check,
        )

    def _figures_at_end(self, network: Network) -> list[str]:
        """The paper's figures of a pre-trained network; none of a user-defined network."""
        num_images = self.config.execution.inspect_images
        if self.config.stage != "pretrain" or num_images == 0 or isinstance(self.recipe.model, UserNetworkConfig):
            return []
        val = self.corpora.with_split(self.config.val_split)
        part, split = (val[0], str(self.config.val_split)) if val else (self.corpora.parts[0], self.config.split)
        size = min(num_images, self.micro_batch)
        with self._eval_batches(part, split, size, LoaderResources()) as batches:
            return inspect_run(self.held.store, network, batches, num_images, title=self.spec.run_key)
