"""The overhead of a sweep: planning, scheduling, storing results, and the files that explain a final score.

    .venv/bin/python tests/benchmarks/sweep_overhead.py [--rounds 5] [--rates 20] [--tasks 1] [--steps 20]

Sweeps of so many learning rates on so many tasks, all of the digits, on a Ray cluster of two cores that is started before the clock. Per
trial: (wall time of the whole drive x cores - seconds of training and scoring that trials report) / trials, so that a
core that is idle at the end counts as well. The first round also starts the worker processes. Bar: 2 s.

And wall time x cores by the seconds of the training steps alone. These are timed before and after, in one process for each core at
the same time, as trials run: two busy cores of one processor are slower than one. Bar for 19 tasks: 1.25.
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import mean, median

import ray
import torch
from input import interval

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examples import presets
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.cost.step_time import seconds_per_step
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef, plan_task_sweeps
from vitline.vit.evaluation.protocols import SMALL_IMAGES, Protocol
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.published.models import publish
from vitline.vit.ray_jobs import task_driver
from vitline.vit.recipes import digits

CORES = 2
TIMES = 15
"""So often the steps are timed, some seconds long, so that the other process runs meanwhile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        prepare([presets.digits()], root)
        ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False)
        rounds = [measure(root, spec(root, seed, asked)) for seed in range(asked.rounds)]
        ray.shutdown()
    overheads, ratios = zip(*rounds, strict=True)
    print(f"first round, which starts the processes: {overheads[0]:.2f} s a trial, {ratios[0]:.2f} of its steps")
    print("later rounds: {:.2f} s [{:.2f}, {:.2f}] a trial".format(*interval(overheads[1:])))
    print("later rounds: {:.2f} [{:.2f}, {:.2f}] of the steps".format(*interval(ratios[1:])))


def measure(root: str, of: EvaluationSpec) -> tuple[float, float]:
    """Overhead in seconds per trial of one evaluation, and wall time x cores by the seconds of its training steps."""
    seed = of.seed
    recipe = plan_task_sweeps(of)[0].settings[0]
    run = open_store(root).child(f"runs/sweep-{seed}")
    run.write_json("config.json", of.model_dump(mode="json"))
    lease = acquire_lease(run, f"sweep-{seed}", job_state=lambda job: "failed", owner="benchmark")
    before = busy_step_s(recipe)
    started = time.perf_counter()
    code = task_driver.drive(run, lease.attempt)
    wall = time.perf_counter() - started
    assert code == 0, read_state(run)
    step_s = (before + busy_step_s(recipe)) / 2
    keys = [key for score in read_state(run)["scores"] for key in score["trials"]]
    trials = open_store(root).child("trials")
    trained = [TrialResult.model_validate(trials.read_json(f"{key}.json")).wall_s for key in keys]
    overhead = (wall * CORES - sum(trained)) / len(trained)
    ratio = wall * CORES / (len(trained) * recipe.total_steps * step_s)
    print(
        f"seed {seed}: {len(trained)} trials in {wall:.1f} s, {sum(trained):.1f} s of training: {overhead:.2f} s a trial; "
        f"{ratio:.2f} of steps of {1000 * step_s:.1f} ms"
    )
    return overhead, ratio


def busy_step_s(recipe: TrainRecipe) -> float:
    """Seconds of a step while each core has one."""
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as processes:
        return mean(processes.map(own_step_s, [recipe] * CORES))


def own_step_s(recipe: TrainRecipe) -> float:
    return median(seconds_per_step(recipe, ExecutionConfig(), num_classes=10) for _ in range(TIMES))


def spec(root: str, seed: int, asked: argparse.Namespace) -> EvaluationSpec:
    """Sweeps of the demo's network over many learning rates."""
    torch.manual_seed(0)
    config, contract = digits.network(), ImageContract(decode=DecodePolicy(), evaluation=SMALL_IMAGES.augment)
    classes = [f"{i}" for i in range(3)]
    model = publish(open_store(root).child("models"), "net", "1", build_network(config, 3), contract, classes, {})
    corpus = corpus_store(open_store(root), presets.digits())
    protocol = Protocol(
        name="many-rates",
        image_size_px=None,
        learning_rates=tuple(0.01 * (i + 1) for i in range(asked.rates)),
        total_steps=(asked.steps,),
        warmup_steps=2,
        global_batch_size=64,
        num_lanes=16,
        augment=AugmentConfig(image_size_px=digits.IMAGE_SIZE_PX, train_crop="none", flip=False),
    )
    tasks = tuple(TaskRef(name=f"digits-{i}", corpus=corpus.uri) for i in range(asked.tasks))
    return EvaluationSpec(
        run_key=f"sweep-{seed}", tasks=tasks, models=(model,),
        architecture=config, protocol=protocol, seed=seed, root=root,
    )  # fmt: skip


if __name__ == "__main__":
    main()
