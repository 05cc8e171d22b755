"""Runs a trial: trains on one split, by the `fit` of every training, and scores another split once. The workers of an evaluation call it.

    <root>/trials/<trial key>/checkpoints/    as of every training, while the trial runs
                             /progress.json   what its result says of the steps up to the newest checkpoint

A trial saves its state when its evaluation is stopped. One that was stopped or killed goes on from its newest checkpoint, in whichever
evaluation runs it next.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable

import torch

from vitline.data_prep.shard_format import Manifest, load_manifest
from vitline.infra.config import digest_of, replace
from vitline.infra.records import check_digest
from vitline.infra.runs.handle import Run
from vitline.infra.runs.watchdog import watched
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.manifest import CannotResume, RunIdentity
from vitline.vit.checkpoints.names import FOLDER, MANIFEST, Retention
from vitline.vit.checkpoints.restore import resume, rewind
from vitline.vit.checkpoints.save import CheckpointSaver, start_id
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.evaluation.calibration import calibration_of
from vitline.vit.evaluation.kept_models import keep_network, take_published
from vitline.vit.evaluation.packing import Place, memory_of_this_gpu, micro_batch_on_cpu, packed
from vitline.vit.evaluation.ranks import ranks
from vitline.vit.evaluation.trial_files import write_trial_files
from vitline.vit.evaluation.trials import PROGRESS, Trial, TrialProgress, TrialResult, finished_result
from vitline.vit.input.batches import LoaderResources, Source, eval_batches
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.models.network import Network
from vitline.vit.published.models import PublishedModel, adapt, load_model
from vitline.vit.training.evaluate import Evaluation, evaluate
from vitline.vit.training.fit import FitPlan, RunIO, fit
from vitline.vit.training.loop import Hook, TrainState, initial_state, torch_seed, with_optimizer
from vitline.vit.training.metrics import Metrics
from vitline.vit.training.predictions import Predictions
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

EVAL_BATCH_SIZE = 128
# A thousand decoded images of 500 x 375 take 560 MB.
DECODED_CACHE_BYTES = 768 << 20
SAVE_EVERY_S = 120.0
"""How long a trial trains before it saves its state; one that is shorter writes no checkpoint, unless it is stopped."""
ALONE = Place()
_MAY_SAVE = 50  # steps of a trial at which it looks whether it is time to save
_decoded: dict[tuple[str, str, int], DecodedCache] = {}


class TrialStopped(Exception):
    """The evaluation of a trial was stopped, and the trial has saved its state."""


def ensure_trial(held: Run, trials: Store, trial: Trial, place: Place = ALONE) -> TrialResult:
    """The stored result of this trial. If there is none, runs the trial and stores its result; the first result stays.

    `held` is the hold of the evaluation, without which no checkpoint is written. Before the result, a final trial publishes its
    network, if that is kept (`kept_models.py`), and stores its predictions and the files made from them (`trial_files.py`).

    Raises TrialStopped if `held` is requested to stop while the trial trains.
    """
    if (done := finished_result(trials, trial)) is not None:
        return done
    of_trial = held.part(trials.child(trial.key))
    with ranks(place.ranks, functools.partial(_as_other_rank, held.store.uri, held.attempt, trials.uri, trial, place)):
        result, noted = run_trial(of_trial, trial, place)
    if noted:
        predictions = Predictions.joined(noted)
        files = write_trial_files(trials, trial.key, predictions, trial.corpus, trial.score_split, trial.title)
        result = replace(result, files=files, calibration=calibration_of(predictions.probability, predictions.right))
    stored = result.stored_first(trials, f"{trial.key}.json")
    _forget(of_trial.store)
    return stored


def _as_other_rank(run_uri: str, attempt: int, trials_uri: str, trial: Trial, place: Place) -> None:
    """What a rank but the first does, in a process of its own."""
    held = Run(open_store(run_uri), attempt, follows_stops=False)
    with contextlib.suppress(TrialStopped):
        run_trial(held.part(open_store(trials_uri).child(trial.key)), trial, place)


def run_trial(held: Run, trial: Trial, place: Place = ALONE) -> tuple[TrialResult, list[Predictions]]:
    """Trains, from the newest checkpoint in `held.store` if there is one, and scores, as a rank of the process group of this process, on
    its GPU if there is one. A final trial returns the predictions of all ranks, too. Raises TrialStopped on all ranks."""
    world = World.current()
    execution = trial_execution(trial.recipe, place, world)
    corpus = open_store(trial.corpus)
    manifest = load_manifest(corpus)
    check_digest(corpus.uri, manifest.digest, trial.corpus_digest)
    training = TrialTraining(held, trial, manifest, world)
    state = training.newest()
    plan = FitPlan(
        recipe=trial.recipe,
        execution=execution,
        sources=[Source(corpus, manifest, trial.train_split)],
        loading=LoaderResources(
            world.rank,
            world.size,
            threads=execution.decode_threads,
            shared_cache=decoded_cache(trial, execution.decoded_cache_bytes),
        ),
        micro_batch=execution.planned_micro_batch,
        epoch=manifest.split(trial.train_split).num_rows,
        mask_bad=False,
    )
    outcome = fit(plan, state, world, training.io(), ()).outcome
    if outcome not in ("finished", "diverged"):
        raise TrialStopped(
            f"{trial.key} was stopped at step {state.step:,} of {trial.recipe.total_steps:,}, and is saved."
        )
    diverged = outcome == "diverged"
    unscored = diverged and trial.phase == "final"  # its setting has failed, and test is read once only
    network = state.evaluation_model()
    if trial.keep:
        take_published(trial, network, world)
    noted: list[Predictions] = []
    note = noted.append if trial.phase == "final" else None
    score = Evaluation(0.0, math.nan, 0, 0.0) if unscored else score_split(network, trial, manifest, world, note)
    result = TrialResult(
        key=trial.key,
        top1=score.top1,
        loss=score.loss,
        num_examples=score.num_examples,
        majority_fraction=score.majority_fraction,
        diverged=diverged,
        **training.progress().model_dump(exclude={"saved_at"}),
    )
    if trial.keep and result.failure is None and world.rank == 0:
        keep_network(held, trial, network, manifest)
    return result, [part for parts in world.gather(noted) for part in parts]


class TrialTraining:
    """The training of a trial in this process: its state, its checkpoints, and what its result says of it."""

    def __init__(self, held: Run, trial: Trial, manifest: Manifest, world: World) -> None:
        self.held, self.trial, self.manifest, self.world = held, trial, manifest, world
        self.before = TrialProgress()
        """Of earlier processes, up to the checkpoint from which this one goes on."""
        self.losses: list[tuple[int, float]] = []
        self.begun_s, self.cpu_begun_s = time.perf_counter(), time.process_time()
        self.saved_s = self.begun_s

    @property
    def identity(self) -> RunIdentity:
        """What the checkpoints of the trial say of it."""
        return {
            "run_key": self.trial.key,
            "recipe": self.trial.recipe.model_dump(mode="json"),
            "config_digest": digest_of(self.trial.recipe),
            "corpus_digest": self.trial.corpus_digest,
            "class_map_digest": "",
        }

    def newest(self) -> TrainState:
        """The state of the newest checkpoint; the first one where there is none, or none that can be read."""
        state, store = self.first(), self.held.store
        try:
            restored = resume(store, state, self.identity, self.world, self.held.check)
        except CannotResume as error:
            log.warning("trial=%s begins anew: %s", self.trial.key, error)
            if self.world.rank == 0:
                self.held.check()
                _forget(store)
            self.world.broadcast_int(0)  # no rank saves before the damaged files are gone
            return self.first()
        if restored is not None:
            log.info("trial=%s goes on at step=%d", self.trial.key, state.step)
            noted = TrialProgress.load_or_none(store, PROGRESS) or TrialProgress()
            losses = tuple((step, loss) for step, loss in noted.train_losses if step <= state.step)
            self.before = replace(noted, train_losses=losses)
        return state

    def first(self) -> TrainState:
        return trial_state(self.trial, self.manifest.num_classes, self.world)

    def io(self) -> RunIO:
        return RunIO(
            stopped=self.held.stopped,
            reached=lambda step: None,
            report=self.report,
            spike=lambda spike, *_: log.warning("trial=%s has a spike at step %d", self.trial.key, spike["step"]),
            seen=lambda step, batches: watched(batches),
            save_every=self.save_every,
            rewind=self.rewind,
        )

    def rewind(self, state: TrainState) -> None:
        rewind(self.held.store, state, self.first, self.world, self.held.check)
        self.losses = [(step, loss) for step, loss in self.losses if step <= state.step]

    def report(self, step: int, metrics: Metrics) -> None:
        if "train/loss" in metrics:
            self.losses.append((step, metrics["train/loss"]))

    def save_every(self) -> tuple[Hook, CheckpointSaver]:
        """Saves once SAVE_EVERY_S have passed since the trial, or the last save, began, and before a stop. No save of an earlier saver may
        be in flight."""
        recipe, started = self.trial.recipe, start_id(self.world)
        retention = Retention(rewind_steps=recipe.spike_guard.steps_back)
        saver = CheckpointSaver(self.held, self.world, retention, self._note_progress)

        def save(state: TrainState) -> None:
            recent = time.perf_counter() - self.saved_s < SAVE_EVERY_S
            if self.world.broadcast_int(recent and self.held.stopped() is None):
                return
            self.saved_s = time.perf_counter()
            images = state.step * recipe.input.global_batch_size
            saver.save(state, {**self.identity, "save_id": f"{started}-{state.step}", "images_seen": images})

        return Hook(max(1, recipe.total_steps // _MAY_SAVE), save, on_stop="run"), saver

    def progress(self) -> TrialProgress:
        return TrialProgress(
            saved_at=time.time(),
            train_losses=(*self.before.train_losses, *self.losses),
            wall_s=self.before.wall_s + time.perf_counter() - self.begun_s,
            cpu_s=self.before.cpu_s + time.process_time() - self.cpu_begun_s,
        )

    def _note_progress(self) -> None:
        self.held.store.write(PROGRESS, self.progress().model_dump_json().encode())


def _forget(of_trial: Store) -> None:
    """Deletes what only a trial that is not finished needs, each manifest before the files that it names."""
    keys = [*of_trial.list(FOLDER), *of_trial.list(PROGRESS)]
    for key in sorted(keys, key=lambda key: not key.endswith(MANIFEST)):
        of_trial.delete(key)


def trial_state(trial: Trial, num_classes: int, world: World) -> TrainState:
    if trial.model is None:
        return initial_state(trial.recipe, num_classes, world.device)
    source = pretrained(trial.model, str(trial.model_digest))
    check_digest(trial.model, source.digest, str(trial.model_digest))
    torch.manual_seed(torch_seed(trial.recipe.seed, "init"))
    network = adapt(source.network, trial.recipe.model, num_classes, trial.recipe.model.head_bias_init)
    return with_optimizer(network.to(world.device).train(), trial.recipe)


@functools.lru_cache(maxsize=1)
def pretrained(uri: str, digest: str) -> PublishedModel:
    """The model that trials start from, loaded once per process."""
    return load_model(uri)


def score_split(
    network: Network,
    trial: Trial,
    manifest: Manifest,
    world: World,
    note: Callable[[Predictions], None] | None = None,
) -> Evaluation:
    corpus, augment = open_store(trial.corpus), trial.recipe.input.augment
    loading = LoaderResources(world.rank, world.size)
    with eval_batches(
        corpus, manifest, trial.score_split, augment, batch_size=EVAL_BATCH_SIZE, loading=loading
    ) as batches:
        return evaluate(
            network,
            watched(batches),
            manifest.splits[trial.score_split].num_rows,
            loss=trial.recipe.loss,
            precision=trial.recipe.precision,
            world=world,
            note=note,
        )


def micro_batch_alone(recipe: TrainRecipe, world: World) -> int:
    """The micro-batch of a trial that has the device for itself."""
    if world.device.type == "cpu":
        return micro_batch_on_cpu(recipe)
    return packed(recipe, memory_of_this_gpu(), most=1).micro_batch


def trial_execution(recipe: TrainRecipe, place: Place, world: World) -> ExecutionConfig:
    return ExecutionConfig(
        micro_batch_size=place.micro_batch or micro_batch_alone(recipe, world),
        decode_threads=place.threads,
        decoded_cache_bytes=DECODED_CACHE_BYTES,
        log_every_steps=max(1, recipe.total_steps // 20),
        compile=place.compile,
    )


def decoded_cache(trial: Trial, budget_bytes: int) -> DecodedCache:
    """The cache for the task that this process works on: its trials differ in settings, not in images."""
    task = (trial.corpus_digest, trial.decode_digest, budget_bytes)
    if task not in _decoded:
        _decoded.clear()
        _decoded[task] = DecodedCache(budget_bytes)
    return _decoded[task]
