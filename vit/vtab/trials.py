"""Fine-tuning trials: the unit of work of a sweep. A trial is a pure function of its spec and is kept under its key."""

import time
from typing import Any, Literal, Self

import torch
from pydantic import model_validator

from data_prep.shard_format import load_manifest
from infra.config import FrozenConfig, digest_of
from infra.keys import run_key
from infra.storage import Lost, Store, open_store
from vit.config import ExecutionConfig, TrainRecipe
from vit.evaluate import Evaluation, evaluate
from vit.input.batches import eval_batches, train_batches
from vit.published import adapt, load_model
from vit.train import TrainState, initial_state, torch_seed, train, with_optimizer
from vit.world import World

EVAL_BATCH_SIZE = 128


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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) != (self.model_digest is None):
            raise ValueError("model and model_digest belong together; give both, or neither to train from scratch.")
        return self

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


def finished_result(trials: Store, trial: Trial) -> TrialResult | None:
    try:
        return TrialResult.model_validate(trials.read_json(f"{trial.key}.json"))
    except FileNotFoundError:
        return None


def ensure_trial(trials_uri: str, trial: Trial) -> TrialResult:
    """The stored result of this trial, or a new one, computed and stored; the first to finish is the one that stays."""
    trials = open_store(trials_uri)
    if (done := finished_result(trials, trial)) is not None:
        return done
    result = run_trial(trial)
    try:
        trials.create(f"{trial.key}.json", result.model_dump_json(indent=1).encode())
    except Lost:
        result = finished_result(trials, trial) or result
    return result


def run_trial(trial: Trial) -> TrialResult:
    """Trains and scores in this process, on its GPU if there is one."""
    started, cpu_started = time.perf_counter(), time.process_time()
    world, execution = World.current(), trial_execution(trial.recipe)
    corpus = open_store(trial.corpus)
    manifest = load_manifest(corpus)
    if manifest.digest != trial.corpus_digest:
        raise RuntimeError(
            f"{corpus.uri} has digest {manifest.digest[:12]}, the sweep was planned on {trial.corpus_digest[:12]}."
        )
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
        micro_batch_size=execution.micro_batch_size,
        threads=execution.decode_threads,
        decoded_cache_bytes=execution.decoded_cache_bytes,
    ) as batches:
        outcome = train(state, batches, trial.recipe, execution, world, report=report, save=lambda _: None)
    score = score_split(state, trial, manifest, world)
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
    source = load_model(trial.model)
    if source.digest != trial.model_digest:
        raise RuntimeError(
            f"{trial.model} has digest {source.digest[:12]}, the sweep was planned on {trial.model_digest}."
        )
    torch.manual_seed(torch_seed(trial.recipe.seed, "init"))
    network = adapt(source.network, trial.recipe.model, num_classes)
    return with_optimizer(network.to(world.device).train(), trial.recipe)


def score_split(state: TrainState, trial: Trial, manifest: Any, world: World) -> Evaluation:
    corpus, augment = open_store(trial.corpus), trial.recipe.input.augment
    with eval_batches(corpus, manifest, trial.score_split, augment, batch_size=EVAL_BATCH_SIZE) as batches:
        return evaluate(
            state.evaluation_model(),
            batches,
            manifest.splits[trial.score_split].num_rows,
            loss=trial.recipe.loss,
            precision=trial.recipe.precision,
            world=world,
        )


def trial_execution(recipe: TrainRecipe) -> ExecutionConfig:
    """Trials are small and run many at a time: one process, no checkpoints of their own."""
    steps = recipe.total_steps
    return ExecutionConfig(micro_batch_size=64, log_every_steps=max(1, steps // 20), save_every_steps=steps)
