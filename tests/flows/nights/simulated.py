"""Nights of the model that `flows/nights/compare.py` states, as scores and as records in a store."""

from datetime import UTC, datetime, timedelta

import numpy as np

from vitline.flows.catalog.records import PipelineRecord, StageRecord, write_pipeline
from vitline.flows.nights.night_scores import NightScores, TaskScore
from vitline.vit.evaluation.calibration import calibration_of
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.training.predictions import Predictions

DIFFICULTY = {"tasks/digits/top1": 300, "tasks/emoji/top1": 200}


class Nights:
    """Nights by the model of `compare.py`: hard and easy test images, and seeds that shift whole trainings."""

    def __init__(self, seed, *, seeds_sd=0.6, noise=0.8, num_images=DIFFICULTY):
        self.rng = np.random.default_rng(seed)
        self.images = {name: self.rng.normal(1, 1.5, n) for name, n in num_images.items()}
        self.seeds_sd, self.noise, self.num = seeds_sd, noise, 0

    def night(self, num_seeds=3, shift=0.0, facts=None, shifts=None):
        """`shifts`: of single tasks, by their metrics, besides that of all."""
        self.num += 1
        pretrained = self.rng.normal(0, self.seeds_sd, num_seeds)
        tasks = {}
        for name, images in self.images.items():
            logits = images + shift + pretrained[:, None] + self.rng.normal(0, self.noise, (num_seeds, len(images)))
            if shifts:
                logits += shifts[name][..., None]
            tasks[name] = tuple(score(right) for right in logits > 0)
        models = tuple(f"{self.num}-{i}" for i in range(num_seeds))
        return NightScores(
            f"night-{self.num}", datetime(2026, 1, 1, 2, tzinfo=UTC) + timedelta(self.num), models, tasks, facts or {}
        )


def score(right, split="same"):
    right = np.asarray(right)
    return TaskScore(float(right.mean()), len(right), 0.1, split, right)


def store_night(root, night, *, name="nightly", state="finished", overrides=None, corpora=None, images=None):
    """Writes what a pipeline with these scores leaves in the store; its record."""
    stages = []
    for nth, model in enumerate(night.models):
        training, evaluation = f"{night.key}-t{nth}", f"{night.key}-e{nth}"
        start = {"at": 1.0, "world_size": 1, "versions": {"torch": "2.13.0", "commit": f"{nth}"}, "hardware": "a CPU"}
        root.write_json(f"runs/{training}/starts/a1-from-none-000.json", start)
        scores = [stored_score(root, metric, nth, model, of[nth]) for metric, of in night.tasks.items()]
        root.write_json(
            f"runs/{evaluation}/state.json", {"scores": [score.model_dump(mode="json") for score in scores]}
        )
        for stage, key in (("pretrain", training), ("evaluate", evaluation)):
            stages.append(StageRecord(stage=stage, run_key=key, reused=False, wall_s=1.0, what="", where=""))
    at = night.night.timestamp()
    record = PipelineRecord(
        key=night.key, name=name, request={"name": name, "seed": 0, "overrides": overrides or {}}, night=night.night, state=state,
        started_at=at, updated_at=at, stages=stages, corpora=corpora or {"birds": 64 * "a"}, images=images or {"birds": 1500},
        model=f"models/{night.models[0]}",
        model_digest=night.models[0],
    )  # fmt: skip
    write_pipeline(root, record)
    return record


def stored_score(root, metric, seed, model, task):
    name = metric.split("/")[1]
    trial, n = f"{name}-final-{model}", task.num_examples
    label = np.zeros(n, np.int32)
    predictions = Predictions(
        row=np.arange(n), label=label, predicted=np.where(task.right, 0, 1).astype(np.int32),
        probability=np.ones(n, np.float32), loss=np.zeros(n, np.float32),
    )  # fmt: skip
    root.write(f"trials/{trial}/predictions.parquet", predictions.to_parquet())
    result = TrialResult(
        key=trial, top1=task.value, loss=1.0, num_examples=n, majority_fraction=0.1, train_losses=(), wall_s=1.0, cpu_s=1.0,
        diverged=False, files=(f"{trial}/predictions.parquet",),
    )  # fmt: skip
    root.write_json(f"trials/{trial}.json", result.model_dump(mode="json"))
    return Score(
        calibration=calibration_of(predictions.probability, predictions.right),
        task=name, protocol="small-images", seed=seed, model=f"models/{model}", model_digest=model, value=task.value,
        num_examples=n, chosen={}, tried=(), majority_fraction=0.1, num_classes=10, corpus_digest="c", split_digest=task.split_digest,
        wall_s=1.0, cpu_s=1.0, trials=(trial,),
    )  # fmt: skip
