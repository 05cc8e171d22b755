"""The twin of `vitline plan cluster` against a training on a Ray of one node whose worker is killed.

    .venv/bin/python tests/benchmarks/cluster_twin.py [--steps 200] [--save-every 50] [--rounds 1]

Two CPU workers train a small network on the digits: undisturbed first, which gives the time of a step, of a start, and of a save with its
write. Then one worker is killed with -9, half a block after the checkpoint in the middle. The twin simulates this with one failure at that
step: from the figures of the undisturbed training only, with its start for the restart, too; and, because other work on the machine changes
its speed between the two trainings, from those of the killed one. All times end when the last checkpoint is whole.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from training_overheads import prepared, started

from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.storage import Store, open_store
from vitline.vit.config import ExecutionConfig, TrainConfig
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.cluster_twin import Simulated, Workload, simulate
from vitline.vit.ray_jobs import train_driver
from vitline.vit.recipes import digits

WORKERS, BATCH = 2, 32


class Figures(NamedTuple):
    """Seconds of a training."""

    start_s: float
    """From the start of its driver to its first step; Ray is up before."""
    step_s: float
    stall_s: float
    """What a save adds to the step that follows."""
    write_s: float
    wall_s: float


class OneFailure(Random):
    """Of the waits for a failure the second one ends, which begins with the first step."""

    def __init__(self, after_s: float) -> None:
        super().__init__(0)
        self.waits = iter((float("inf"), after_s))

    def expovariate(self, lambd: float = 1.0) -> float:
        return next(self.waits, float("inf"))


def drive(uri: str, attempt: int, ready: "multiprocessing.Queue[float]") -> None:
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="warning")
    ready.put(time.time())
    train_driver.drive(open_store(uri), attempt)


def trained(root: str, config: TrainConfig, kill_after: tuple[int, float] | None) -> tuple[Store, float, float]:
    """The run after its end; when it began, and when a worker was killed, in Unix seconds. `kill_after`: a step whose checkpoint is waited
    for, and seconds."""
    run, attempt = started(root, config)
    context = multiprocessing.get_context("spawn")
    ready: multiprocessing.Queue[float] = context.Queue()
    driver = context.Process(target=drive, args=(run.uri, attempt, ready))
    driver.start()
    began = ready.get()
    if kill_after is not None:
        while kill_after[0] not in committed(run):
            time.sleep(0.02)
        time.sleep(kill_after[1])
        below = psutil.Process(driver.pid).children(recursive=True)
        workers = [process for process in below if "TrainWorker" in " ".join(process.cmdline())]
        assert len(workers) == WORKERS, workers
        workers[0].kill()
    killed = time.time()
    driver.join()
    starts = len(run.list("starts/"))
    assert starts == (1 if kill_after is None else 2), f"{starts} starts of the workers"
    return run, began, killed


def committed(run: Store) -> dict[int, float]:
    """When each checkpoint was whole, by step, in Unix seconds."""
    found = Path(run.uri.removeprefix("file://")).glob("checkpoints/step-*/manifest.json")
    return {int(path.parent.name.split("-")[1]): path.stat().st_mtime for path in found}


def steps_of(run: Store) -> dict[int, float]:
    """When each step was done that was kept, in Unix seconds."""
    return {record.step: record.timestamp_ms / 1e3 for record in read_journal(run) if record.key == "train/loss"}


def figures_of(run: Store, began: float, killed: float, every: int) -> Figures:
    """The figures of a run that began and whose worker was killed at these Unix seconds."""
    at, whole = steps_of(run), committed(run)
    took = {step: at[step] - at[before] for before, step in pairwise(sorted(at)) if not at[before] < killed < at[step]}
    plain = statistics.fmean(seconds for step, seconds in took.items() if step % every != 1)
    stall = max(0.0, statistics.fmean(seconds for step, seconds in took.items() if step % every == 1) - plain)
    return Figures(
        start_s=at[1] - plain - began,
        step_s=plain,
        stall_s=stall,
        write_s=max(0.0, statistics.fmean(whole[step] - at[step] for step in whole) - stall),
        wall_s=max(whole.values()) - began,
    )


def simulated(known: Figures, config: TrainConfig, fails_after_s: float) -> Simulated:
    """As the twin has it, with a failure so long after the first step; checkpoints have as many bytes as the store takes in `write_s`."""
    assumed = ClusterAssumptions(
        gpus_per_node=WORKERS,
        step_scatter=0,
        decode_images_per_core_s=1e9,
        store_node_bytes_per_s=1e9,
        save_stall_s=known.stall_s,
        start_s=known.start_s,
        replacement_s=0,
        failures_per_node_day=1,
    )
    work = Workload(
        total_steps=config.recipe.total_steps,
        save_every_steps=config.execution.save_every_steps,
        global_batch_size=BATCH,
        num_lanes=config.recipe.input.num_lanes,
        micro_batch=BATCH,
        images_per_s=BATCH / WORKERS / known.step_s,
        decode_threads=1,
        bytes_per_image=0,
        sent_bytes=0,
        checkpoint_bytes=1e9 * known.write_s,
        overlaps=False,
        min_workers=None,
        max_restarts=3,
    )
    return simulate(work, assumed, 1, OneFailure(fails_after_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        corpus = prepared(root)
        for number in range(asked.rounds):
            recipe = replace(
                digits.pretrain_recipe(),
                **{
                    "input.global_batch_size": BATCH,
                    "total_steps": asked.steps,
                    "optim.warmup_steps": 10,
                    "seed": number,
                },
            )
            execution = ExecutionConfig(
                num_workers=WORKERS, device="cpu", log_every_steps=1, save_every_steps=asked.save_every, inspect_images=0,
                keep_checkpoints=1_000,
            )  # fmt: skip
            config = TrainConfig(name="undisturbed", corpus=corpus.uri, recipe=recipe, execution=execution)
            every, middle = asked.save_every, asked.steps // 2
            run, began, ended = trained(root, config, None)
            known = figures_of(run, began, ended, every)
            print(f"round {number}: load {os.getloadavg()[0]:.1f}; undisturbed {known}")
            run, began, killed = trained(root, replace(config, name="killed"), (middle, every / 2 * known.step_s))
            own = figures_of(run, began, killed, every)
            # Of the steps that were lost the journal may keep the first time.
            at, first = min((at, step) for step, at in steps_of(run).items() if at > killed)
            restart_s = at - (first - middle) * own.step_s - killed
            print(f"  killed {own}; its restart took {restart_s:.1f} s")
            after_s = killed - committed(run)[middle]
            for whose, figures, start_s in (("undisturbed", known, known.start_s), ("killed", own, restart_s)):
                block_s = every * figures.step_s + figures.stall_s
                twin = simulated(figures, config, middle // every * block_s + figures.write_s + after_s)
                wall_s = twin.wall_s - figures.start_s + start_s
                print(
                    f"  {own.wall_s:.1f} s; from the {whose} one the twin says {wall_s:.1f} s ({wall_s / own.wall_s - 1:+.1%})"
                )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
