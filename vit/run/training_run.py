"""One training run on one rank: store, state, batches, journal and checkpoints around `train()`.

It works the same in a Ray Train worker and in a plain process (a `World()` of size 1), and knows neither Ray nor MLflow.
"""

import logging
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from vitline.infra.provenance import cpu_model, versions
from vitline.infra.runs.claims import ClaimHolder, ClaimLost
from vitline.infra.runs.run_state import RunState, StateDetail, write_state
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.runs.watchdog import Watchdog
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.best import BestCheckpoint
from vitline.vit.checkpoints.manifest import CannotResume, RunIdentity
from vitline.vit.checkpoints.names import kept_steps, lasts, list_checkpoints
from vitline.vit.checkpoints.resume import resume, start_from
from vitline.vit.checkpoints.rewind import rewind
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.corpora.training_corpora import TrainingCorpora, TrainingCorpus, open_corpora
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.cost.micro_batch import micro_batch_that_fits
from vitline.vit.cost.training_memory import forget_peak, memory_record
from vitline.vit.input.batches import Batch, Loading, eval_batches, source_batches
from vitline.vit.input.decoding.how_many import decode_processes
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.input.prefetch import Prefetcher
from vitline.vit.models.config import OwnNetworkConfig
from vitline.vit.models.masked_patches import MaskedPatchModel
from vitline.vit.models.network import Network
from vitline.vit.models.own_code import problem_with_source
from vitline.vit.pages.first_inputs import save_first_inputs
from vitline.vit.pages.inspect_run import inspect_run
from vitline.vit.pages.spikes import spike_text, worst_examples, write_spike
from vitline.vit.published.models import adapt, initialised, load_model, publish
from vitline.vit.run.branch import unpin_parent
from vitline.vit.run.devices import devices_text
from vitline.vit.run.run_spec import MIXTURE_KEY, RunSpec, StartRecord, WorkerError, parent_spec
from vitline.vit.training.bad_examples import BadExamples
from vitline.vit.training.evaluate import Evaluation, evaluate, evaluate_patches
from vitline.vit.training.guard.spike_guard import Spike
from vitline.vit.training.reporter import Reporter, system_metrics
from vitline.vit.training.sharding.fsdp import shard
from vitline.vit.training.train import Hook, TrainState, initial_state, torch_seed, train, with_optimizer
from vitline.vit.training.world import World

log = logging.getLogger(__name__)
UNTRAINED_HEAD = "not trained: the network has learned to predict masked patches, and is to be fine-tuned"


@dataclass
class TrainingRun:
    """One rank's part of one attempt. `execute()` returns after rank 0 has written `state.json`, or raises."""

    run: Store
    attempt: int
    world: World

    def __post_init__(self) -> None:
        self.spec = RunSpec.model_validate(self.run.read_json("config.json"))
        self.config, self.recipe = self.spec.config, self.spec.config.recipe
        self.claim = ClaimHolder(self.run, self.attempt)
        self._parent_let_go = False
        self._best = BestCheckpoint(self.run)
        execution = self.config.execution
        self._micro_batch = execution.planned_micro_batch
        self.loading = Loading(
            self.world.rank,
            self.world.size,
            threads=execution.decode_threads,
            shard_cache_dir=execution.shard_cache_dir,
            shard_cache_bytes=execution.shard_cache_bytes,
        )
        rank, timeout_s = self.world.rank, execution.progress_timeout_s
        self.watchdog = Watchdog(self.run.uri, self.attempt, timeout_s, who=f"rank{rank}", fields={"rank": rank})

    def execute(self) -> RunState | None:
        """Trains from the newest checkpoint to the end. Returns None if another attempt holds the claim.

        A process that makes no progress for `execution.progress_timeout_s` is killed (`Watchdog`).
        """
        with self.watchdog:
            return self._execute()

    def _execute(self) -> RunState | None:
        if self.world.agree(self._lost_claim()):
            log.warning(
                "run=%s attempt=%d: another attempt holds the claim; this one stops", self.run.uri, self.attempt
            )
            return None
        # Count the start before anything that could fail every time, so that no failure repeats without end.
        if self.world.agree(self._count_start()):
            return self._end("failed", {"reason": self._reason_of_restarts()})
        try:
            state = self._newest_state()
        except CannotResume as error:  # a restart of the worker group would not help
            log.error("%s", error)
            return self._end("failed", {"reason": str(error)[:4000]})
        if self.world.rank == 0:
            self.claim.check()
            if (mixture := self.corpora.record()) and not self.run.exists(MIXTURE_KEY):
                self.run.write_json(MIXTURE_KEY, mixture)
            write_state(self.run, "running", self.attempt, from_step=state.step)
        self._micro_batch = micro_batch_that_fits(state, self.recipe, self.config.execution, self.world)
        forget_peak(self.world)
        with (
            StopPoller(self.run, self.attempt, active=self.world.rank == 0) as stop,
            Reporter(
                self.run,
                self.attempt,
                min(self.spec.pause_at_step or self.recipe.total_steps, self.recipe.total_steps),
                active=self.world.rank == 0,
                devices=devices_text(self.world.device.type, self.world.size),
                check_claim=self.claim.check,
                from_step=0 if self.recipe.spike_guard.action == "rewind" else state.step,
            ) as reporter,
            system_metrics(self.run, self.attempt, self.world, reporter.journal, lambda: state.step, self.claim.check),
        ):
            epoch = sum(part.num_rows(self.config.split) for part in self.corpora.parts)
            bad = BadExamples(self.config.execution.max_bad_fraction, epoch)
            try:
                while (outcome := self._train(state, stop, reporter, bad)) == "rewind":
                    rewind(self.run, state, self._begun, self.world, self.claim.check)
            except CannotResume as error:
                log.error("%s", error)
                return self._end("failed", {"reason": str(error)[:4000]})
            detail: StateDetail = {"step": state.step, "images_seen": self._images(state)}
            if state.guard.spikes:
                detail["spikes"] = [spike["step"] for spike in state.guard.spikes]
            detail |= memory_record(state.model, self.recipe, self.config.execution, self._micro_batch, self.world)
            if outcome == "finished":
                network = state.evaluation_model()
                detail |= self._score(network, state.step, reporter)
                if self.world.rank == 0:
                    detail |= self._publish(network, state)
                    self.claim.check()
                    self._best.mark()
            elif outcome == "failed":  # without an error, because a restart of the worker group would not help
                detail["reason"] = bad.reason(self.world)
            elif outcome == "diverged" and state.guard.too_many(state.step):
                detail["reason"] = state.guard.reason(state.step)
            elif outcome != "diverged" and stop.by:
                detail["reason"] = stop.by
        return self._end(outcome, detail)

    @cached_property
    def corpora(self) -> TrainingCorpora:
        """The corpora, opened. Raises RuntimeError if they, or the class map, are not those that the run was started on."""
        corpora, started_on = open_corpora(self.config), self.spec.inputs
        for part, digest in zip(corpora.parts, corpora.digests_in(started_on), strict=True):
            if part.manifest.digest != digest:
                raise RuntimeError(
                    f"{part.store.uri} has digest {part.manifest.digest[:12]}, but this run was started on {digest[:12]}. "
                    "The corpus was replaced; start a new run."
                )
        if corpora.digest != started_on["corpus"]:
            raise RuntimeError(
                f"The class map {corpora.class_map} is not the one that this run was started on. Restore it, or start a new run."
            )
        return corpora

    def _newest_state(self) -> TrainState:
        """The state of the newest checkpoint, or the one that the run begins with."""
        self._check_own_code()
        state = self._initial()
        if (restored := resume(self.run, state, self._meta(), self.world, self.claim.check)) is not None:
            log.info("resumed at step=%d from %s", state.step, restored.prefix)
        else:
            self._go_on_from_parent(state)
        return state

    def _check_own_code(self) -> None:
        """Raises CannotResume, on every rank, where the code of a network or loss of others is not the one that the run began with on one
        of them."""
        used = {"loss": (self.recipe.loss, self.recipe.loss_source)}
        if isinstance(network := self.recipe.model, OwnNetworkConfig):
            used["network"] = network.network, network.source
        problem = problem_with_source(used)
        if problems := [text for text in self.world.gather(problem) if text]:
            raise CannotResume(problems[0])

    def _begun(self) -> TrainState:
        """The state that the run begins with: of a branch that of its parent's checkpoint."""
        state = self._initial()
        self._go_on_from_parent(state)
        return state

    def _go_on_from_parent(self, state: TrainState) -> None:
        """Makes `state` that of the parent's checkpoint, if the run is a branch. Raises CannotResume."""
        if (parent := self.config.parent) is None:
            return
        theirs = parent_spec(parent)
        of_parent: RunIdentity = {**self._meta(), "recipe": theirs.config.recipe.model_dump(mode="json")}
        started = start_from(open_store(parent.run), parent.step, state, of_parent, self.world)
        log.info("branched at step=%d from %s of %s", state.step, started.prefix, theirs.run_key)

    def _initial(self) -> TrainState:
        split = partial(shard, execution=self.config.execution, world=self.world)
        if self.config.init_model is None or self.config.parent is not None:
            return initial_state(self.recipe, self.corpora.num_classes, self.world.device, split)
        source = load_model(self.config.init_model)
        if source.digest != self.spec.inputs["init_model"]:
            raise RuntimeError(
                f"{source.uri} has digest {source.digest[:12]}, but this run was started on "
                f"{self.spec.inputs['init_model'][:12]}. The model was replaced; start a new run."
            )
        torch.manual_seed(torch_seed(self.recipe.seed, "init"))
        if self.config.stage == "pretrain":
            network = initialised(source, self.recipe.model, self.corpora.class_names())
        else:
            network = adapt(
                source.network, self.recipe.model, self.corpora.num_classes, self.recipe.model.head_bias_init
            )
        return with_optimizer(network.to(self.world.device).train(), self.recipe, split)

    def _train(
        self, state: TrainState, stop: StopPoller, reporter: Reporter, bad: BadExamples
    ) -> RunState | Literal["rewind"]:
        execution, guard = self.config.execution, self.recipe.spike_guard
        saver = CheckpointSaver(
            self.run,
            attempt=self.attempt,
            rank=self.world.rank,
            world_size=self.world.size,
            keep=execution.keep_checkpoints,
            rewind_steps=guard.rewind_steps if guard.action == "rewind" else 0,
            lasts=partial(
                lasts,
                save_every_steps=execution.save_every_steps,
                global_batch_size=self.recipe.input.global_batch_size,
                keep_every_images=execution.keep_every_images,
            ),
            check_claim=self.claim.check,
            before_commit=partial(self._before_commit, reporter),
            after_commit=self._let_parent_go,
            progress=self.watchdog.progress,
        )
        # Distinguishes the saves of this start from unfinished saves of an earlier start of the worker group.
        start_id = self.world.agree(int(time.time() * 1000))
        meta = self._meta()

        def save(state: TrainState) -> None:
            saver.save(state, {**meta, "save_id": f"{start_id}-{state.step}", "images_seen": self._images(state)})

        def stop_requested() -> RunState | None:
            reporter.reached(state.step)
            saver.raise_error()  # a claim that was lost at a save ends the loop now, not at the next save
            in_time = self.spec.pause_at is None or time.time() < self.spec.pause_at
            return stop.asked() or ("paused" if self._pauses(state) or not in_time else None)

        if self._pauses(state):  # it was killed after its last checkpoint
            return "paused"
        with self._train_batches(state.step) as loaded:
            batches = self.watchdog.watched(loaded)
            outcome = train(
                state,
                save_first_inputs(self.run, batches) if self._is_first(state) and self.world.rank == 0 else batches,
                self.recipe,
                execution,
                self.world,
                report=reporter.record,
                hooks=[Hook(execution.save_every_steps, save, before_stop=True), *self._validation(state, reporter)],
                stop_requested=stop_requested,
                bad=bad,
                input_waits=lambda: loaded.waits,
                input_ready=lambda: loaded.is_ready,
                seen_spike=self._show_spike,
                pause_at_step=self.spec.pause_at_step,
            )
        saver.wait()
        return outcome

    def _before_commit(self, reporter: Reporter) -> None:
        """Called on rank 0 under its claim: the checkpoint before this one, if it is the best, is not to be deleted for it."""
        reporter.seal()
        self._best.mark()

    def _pauses(self, state: TrainState) -> bool:
        pause = self.spec.pause_at_step
        return pause is not None and pause <= state.step < self.recipe.total_steps

    def _is_first(self, state: TrainState) -> bool:
        """Whether the state is the one that the run began with."""
        return state.step == (self.config.parent.step if self.config.parent else 0)

    def _let_parent_go(self) -> None:
        """A branch that has a checkpoint of its own to go back to needs that of its parent no longer. Called after each commit."""
        if self.config.parent is None or self._parent_let_go:
            return
        steps, guard = kept_steps(self.run), self.recipe.spike_guard
        if max(steps) - min(steps) >= (guard.rewind_steps if guard.action == "rewind" else 0):
            unpin_parent(self.config.parent, self.spec.run_key)
            self._parent_let_go = True

    def _show_spike(self, spike: Spike, batches: Sequence[Batch], example_losses: Sequence[Tensor]) -> None:
        """Logs a spike and leaves its record and the pictures of its batch in the folder `spikes` of the run."""
        worst = worst_examples(batches, example_losses, self.world)
        if self.world.rank != 0:
            return
        log.warning("%s", spike_text(spike, self.recipe.spike_guard.action))
        try:
            self.claim.check()
            write_spike(
                self.run, spike, self.config, worst, self.corpora, world_size=self.world.size, title=self.spec.run_key
            )
        except ClaimLost:
            raise
        except Exception:  # a picture must not end a training
            log.warning("the pictures of the spike at step %d could not be written", spike["step"], exc_info=True)

    def _train_batches(self, start_step: int) -> Prefetcher[list[Batch]]:
        execution = self.config.execution
        processes = decode_processes(
            execution.decode_processes,
            threads=execution.decode_threads,
            lanes=self.recipe.input.num_lanes // self.world.size,
            in_memory=any(part.store.uri.startswith("memory://") for part in self.corpora.parts),
        )
        return source_batches(
            sources_of(self.corpora, self.config.split),
            self.recipe.input,
            seed=self.recipe.seed,
            micro_batch_size=self._micro_batch,
            start_step=start_step,
            num_steps=self.recipe.total_steps,
            mask_bad=True,
            loading=replace(
                self.loading,
                processes=processes,
                decoded_cache_bytes=execution.decoded_cache_bytes,
                read_ahead_bytes=execution.read_ahead_bytes,
            ),
        )

    def _eval_batches(self, part: TrainingCorpus, split: str, batch_size: int, loading: Loading) -> Prefetcher[Batch]:
        augment, labels = self.recipe.input.augment, part.labels(split)
        return eval_batches(
            part.store, part.manifest, split, augment, batch_size=batch_size, loading=loading, labels=labels
        )

    def _validation(self, state: TrainState, reporter: Reporter) -> list[Hook]:
        """Scores the validation split every `execution.evaluate_every_steps`. At the last step `_score` does.

        A run that resumes at such a step scores it first: it may have been stopped between the checkpoint and the score.
        """
        every = self.config.execution.evaluate_every_steps
        if not every:
            return []

        def score(state: TrainState) -> None:
            if 0 < state.step < self.recipe.total_steps:
                self._evaluate(state.evaluation_model(), state.step, reporter)

        if state.step % every == 0:
            score(state)
        return [Hook(every, score, unless_stopping=True)]

    def _score(self, network: Network, step: int, reporter: Reporter) -> StateDetail:
        """The scores of the validation split for the state of the run; empty if there is none."""
        score = self._evaluate(network, step, reporter)
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

    def _evaluate(self, network: Network, step: int, reporter: Reporter) -> Evaluation | None:
        """Scores the validation splits of all corpora together, on all ranks, and records it; None if there is none, or no labels are
        learned."""
        split = self.config.val_split
        if split is None or not (parts := self.corpora.with_split(split)):
            return None

        def batches() -> Iterator[Batch]:
            for part in parts:
                with self._eval_batches(part, split, self._micro_batch, self.loading) as loaded:
                    yield from self.watchdog.watched(loaded)

        num_rows = sum(part.num_rows(split) for part in parts)
        if self.recipe.masked_patches is not None:
            patches = evaluate_patches(network, batches(), num_rows, self.recipe, self.world)
            reporter.record(step, patches)
            self._note_score(step, patches["val/patch_accuracy"])
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
        reporter.record(step, metrics)
        self._note_score(step, metrics.get("val/mean_average_precision", score.top1))
        return score

    def _note_score(self, step: int, score: float) -> None:
        if self.config.execution.keep_best:
            self._best.scored(step, score)

    def _publish(self, network: Network, state: TrainState) -> StateDetail:
        """Publishes the model and draws the figures of the run."""
        if isinstance(network, MaskedPatchModel):
            network = network.network
        model = publish(
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
                "images_seen": self._images(state),
                **({"head": UNTRAINED_HEAD} if self.recipe.masked_patches else {}),
                **({"parent": self.spec.inputs["parent"]} if self.config.parent else {}),
                **self.corpora.provenance(),
            },
            self.claim.check,
        )
        return {"model": model, "inspection": self._inspect(network)}

    def _inspect(self, network: Network) -> list[str]:
        """The paper's figures of a pre-trained network; none of a network of others."""
        num_images = self.config.execution.inspect_images
        if self.config.stage != "pretrain" or num_images == 0 or isinstance(self.recipe.model, OwnNetworkConfig):
            return []
        val = self.corpora.with_split(self.config.val_split)
        part, split = (val[0], str(self.config.val_split)) if val else (self.corpora.parts[0], self.config.split)
        size = min(num_images, self._micro_batch)
        with self._eval_batches(part, split, size, Loading()) as batches:
            return inspect_run(self.run, network, batches, num_images, title=self.spec.run_key)

    def _meta(self) -> RunIdentity:
        return {
            "run_key": self.spec.run_key,
            "recipe": self.recipe.model_dump(mode="json"),
            "config_digest": self.config.config_digest,
            "corpus_digest": self.corpora.digest,
            "class_map_digest": self.corpora.class_map_digest,
        }

    def _images(self, state: TrainState) -> int:
        return state.step * self.recipe.input.global_batch_size

    def _lost_claim(self) -> int:
        try:
            self.claim.check()
        except ClaimLost:
            return 1
        return 0

    def _count_start(self) -> int:
        """Records a start of the worker group (rank 0). 1 if there were too many since the newest checkpoint, else 0."""
        if self.world.rank != 0:
            return 0
        prefix = self._prefix_of_starts()
        starts = self.run.list(prefix)
        note: StartRecord = {
            "host": platform.node(),
            "at": time.time(),
            "world_size": self.world.size,
            "versions": versions(),
            "hardware": self._hardware(),
        }
        self.run.write_json(f"{prefix}{len(starts):03d}.json", note)
        return int(len(starts) > self.config.execution.max_restarts_without_progress)

    def _hardware(self) -> str:
        device = self.world.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()

    def _prefix_of_starts(self) -> str:
        """What the keys of this attempt's starts from the newest checkpoint begin with."""
        newest = next(iter(list_checkpoints(self.run)), "none").rsplit("/", 1)[-1]
        return f"starts/a{self.attempt}-from-{newest}-"

    def _reason_of_restarts(self) -> str:
        errors: list[WorkerError] = [self.run.read_json(key) for key in self.run.list(f"errors/a{self.attempt}-")]
        counted: list[StartRecord] = [self.run.read_json(key) for key in self.run.list(self._prefix_of_starts())]
        if list_checkpoints(self.run):  # errors before the first of these starts did not keep it from a new checkpoint
            errors = [error for error in errors if error["at"] >= min(start["at"] for start in counted)]
        # The first error of a failure is its cause; the others are peers whose connection broke.
        first = min(errors, key=lambda e: e["at"], default=None)
        cause = f"the first error, on rank {first['rank']}: {first['error']}" if first else "no worker left an error"
        limit = self.config.execution.max_restarts_without_progress
        return f"{limit} restarts brought no new checkpoint; {cause}"

    def _end(self, outcome: RunState, detail: StateDetail) -> RunState:
        if self.world.rank == 0:
            self.claim.check()
            return write_state(self.run, outcome, self.attempt, **detail)
        return outcome
