"""Runs a trial: trains on one split and scores another one once. The workers of an evaluation call it."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from vitline.data_prep.shard_format import Manifest, load_manifest
from vitline.infra.config import replace
from vitline.infra.records import check_digest
from vitline.infra.runs.watchdog import watched
from vitline.infra.storage import open_store
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.evaluation.packing import micro_batch_size
from vitline.vit.evaluation.trial_files import write_trial_files
from vitline.vit.evaluation.trials import Trial, TrialResult, finished_result
from vitline.vit.input.batches import LoaderResources, eval_batches, train_batches
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.published.models import PublishedModel, adapt, load_model
from vitline.vit.training.evaluate import Evaluation, evaluate
from vitline.vit.training.loop import TrainState, initial_state, torch_seed, train, with_optimizer
from vitline.vit.training.predictions import Predictions
from vitline.vit.training.world import World

EVAL_BATCH_SIZE = 128
# A thousand decoded images of 500 x 375 take 560 MB.
DECODED_CACHE_BYTES = 768 << 20
_decoded: dict[tuple[str, str, int], DecodedCache] = {}


def ensure_trial(trials_uri: str, trial: Trial, threads: int = 1) -> TrialResult:
    """The stored result of this trial. If there is none, runs the trial and stores its result; the first result stays.

    Before the result, a final trial stores its predictions and the files made from them (`trial_files.py`). `threads`
    decode and augment.
    """
    trials = open_store(trials_uri)
    if (done := finished_result(trials, trial)) is not None:
        return done
    noted: list[Predictions] = []
    result = run_trial(trial, threads=threads, note=noted.append if trial.phase == "final" else None)
    if noted:
        files = write_trial_files(
            trials, trial.key, Predictions.joined(noted), trial.corpus, trial.score_split, trial.title
        )
        result = replace(result, files=files)
    return result.stored_first(trials, f"{trial.key}.json")


def run_trial(
    trial: Trial,
    threads: int = 1,
    note: Callable[[Predictions], None] | None = None,
) -> TrialResult:
    """Trains and scores in this process, on its GPU if there is one. `note` receives the predictions of the scored split."""
    started, cpu_started = time.perf_counter(), time.process_time()
    world = World.current()
    execution = trial_execution(trial.recipe, world.device.type, threads)
    corpus = open_store(trial.corpus)
    manifest = load_manifest(corpus)
    check_digest(corpus.uri, manifest.digest, trial.corpus_digest)
    state = trial_state(trial, manifest.num_classes, world)
    losses: list[tuple[int, float]] = []

    def report(step: int, metrics: Any) -> None:
        if "train/loss" in metrics:
            losses.append((step, metrics["train/loss"]))

    with train_batches(
        corpus,
        manifest,
        trial.train_split,
        trial.recipe.input,
        seed=trial.recipe.seed,
        num_steps=trial.recipe.total_steps,
        micro_batch_size=execution.planned_micro_batch,
        loading=LoaderResources(
            threads=execution.decode_threads, shared_cache=decoded_cache(trial, execution.decoded_cache_bytes)
        ),
    ) as batches:
        outcome = train(
            state,
            watched(batches),
            trial.recipe,
            execution,
            world,
            report=report,
            input_ready=lambda: batches.is_ready,
        )
    unscored = outcome == "diverged" and trial.phase == "final"  # its setting has failed, and test is read once only
    score = Evaluation(0.0, math.nan, 0, 0.0) if unscored else score_split(state, trial, manifest, world, note)
    return TrialResult(
        key=trial.key,
        top1=score.top1,
        loss=score.loss,
        num_examples=score.num_examples,
        majority_fraction=score.majority_fraction,
        train_losses=tuple(losses),
        wall_s=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu_started,
        diverged=outcome == "diverged",
    )


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
    state: TrainState,
    trial: Trial,
    manifest: Manifest,
    world: World,
    note: Callable[[Predictions], None] | None = None,
) -> Evaluation:
    corpus, augment = open_store(trial.corpus), trial.recipe.input.augment
    with eval_batches(corpus, manifest, trial.score_split, augment, batch_size=EVAL_BATCH_SIZE) as batches:
        return evaluate(
            state.evaluation_model(),
            watched(batches),
            manifest.splits[trial.score_split].num_rows,
            loss=trial.recipe.loss,
            precision=trial.recipe.precision,
            world=world,
            note=note,
        )


def trial_execution(recipe: TrainRecipe, device: str, threads: int) -> ExecutionConfig:
    """How a trial is computed: it is small and many run at once, so one process and no checkpoints."""
    return ExecutionConfig(
        micro_batch_size=micro_batch_size(recipe.model, device),
        decode_threads=threads,
        decoded_cache_bytes=DECODED_CACHE_BYTES,
        log_every_steps=max(1, recipe.total_steps // 20),
    )


def decoded_cache(trial: Trial, budget_bytes: int) -> DecodedCache:
    """The cache for the task that this process works on: its trials differ in settings, not in images."""
    task = (trial.corpus_digest, trial.decode_digest, budget_bytes)
    if task not in _decoded:
        _decoded.clear()
        _decoded[task] = DecodedCache(budget_bytes)
    return _decoded[task]
