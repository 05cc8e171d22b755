"""What a training of 1,000 ranks on 125 machines asks of its store, apart from data and checkpoints, and of the memory of its driver.

python -m tests.benchmarks.control_plane [--seconds 900] [--machines 125] [--workers 2 8 24]

Between checkpoints the store parts of the driver, of rank 0 and of one process of each other machine run as threads; other ranks have
none. Before that, two ranks train a tiny network, for what each rank asks at its start and at each step.
Requests are counted at the store's interface, one within another once.

Last, Ray Train trains a tiny network on so many workers, each a process of this machine: the most memory of the driver and of Ray Train's
controller, by what they share with no other process, and what each further worker adds.
"""

import argparse
import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist
from torch import multiprocessing

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.config import replace
from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store
from vitline.infra.stores.file_store import FileStore
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.reporter import Reporter, system_metrics
from vitline.vit.training.world import World

from ..trainings import begin, tiny_config

REQUESTS = ("read", "read_tagged", "list", "scan", "size", "create", "compare_and_swap", "write", "delete", "writer")
STEP_S = 0.3


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Requests to all stores meanwhile, by kind and first folder of the key."""
    found, within = Counter[str](), threading.local()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def request(self: FileStore, *given: Any, **options: Any) -> Any:
            if getattr(within, "one", False):
                return method(self, *given, **options)
            within.one = True
            place = "data" if "/corpora/" in self.uri else str(given[0] if given else "").partition("/")[0]
            found[f"{name} {place}"] += 1
            try:
                return method(self, *given, **options)
            finally:
                within.one = False

        return request

    with contextlib.ExitStack() as stack:
        for name in REQUESTS:
            stack.enter_context(patch.object(FileStore, name, counting(name, getattr(FileStore, name))))
        yield found


@dataclass(frozen=True)
class OfMany(World):
    """A rank that knows how many machines there are."""

    machines: int = 1

    def gather(self, value: Any) -> list[Any]:
        return [value, self.machines - 1]


def between_checkpoints(folder: str, machines: int, seconds: float) -> Counter[str]:
    """The requests of driver, rank 0 and machines in so many seconds."""
    run = open_store(folder).child("runs/large-0a")
    acquire_lease(run, "large-0a", job_state=lambda job: None, owner="benchmark")
    over = threading.Event()

    def machine(number: int) -> None:
        held = Run(run, 1, follows_stops=False)
        with system_metrics(held, OfMany(rank=8 * number, node_rank=number, machines=machines), None, lambda: 1):
            over.wait()

    def rank_0() -> None:
        world, step = OfMany(machines=machines), 0
        with (
            Run(run, 1) as held,
            Reporter(held, 10**6, active=True) as reporter,
            system_metrics(held, world, reporter.journal, lambda: step),
        ):
            while not over.wait(STEP_S):
                step += 1
                reporter.reached(step)

    threads = [threading.Thread(target=machine, args=(number,)) for number in range(1, machines)]
    with Run(run, 1, beats=True), contextlib.ExitStack() as stack:
        for thread in [*threads, threading.Thread(target=rank_0)]:
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        time.sleep(10)
        with counted() as found:
            time.sleep(seconds)
            return Counter(found)


def train_as(rank: int, folder: str, runs: list[tuple[str, int]]) -> None:
    """Trains each run as one of two ranks; rank 1 says what it has asked."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for uri, steps in runs:
        with counted() as requests:
            TrainingRun(open_store(uri), 1, World.current(node_rank=rank)).execute()
        if rank:
            print(f"rank 1, {steps} steps: {dict(requests)}", flush=True)
    dist.destroy_process_group()


def of_one_rank(folder: str) -> None:
    """The requests of a rank of a machine of its own in a training of 5 steps, and in one of 25, with the last checkpoint only."""
    request: CorpusConfig = PRESETS["digits"]()
    prepare([request], folder)
    corpus = corpus_store(open_store(folder), request)
    configs = [
        tiny_config(f"steps-{steps}", corpus.uri, workers=2, steps=steps, save_every_steps=10**6) for steps in (5, 25)
    ]
    runs = [(begin(config, folder)[0].uri, config.recipe.total_steps) for config in configs]
    multiprocessing.spawn(train_as, (folder, runs), nprocs=2)


def drive(uri: str, attempt: int, workers: int) -> None:
    import ray

    from vitline.vit.ray_jobs import train_driver

    ray.init(address="local", num_cpus=workers, include_dashboard=False, logging_level="warning")
    train_driver.drive(open_store(uri), attempt)


def memory_with(folder: str, workers: int) -> dict[str, float]:
    """The most memory of the driver of so many workers and of the controller, in MB, and seconds to the first step and to the end."""
    corpus = corpus_store(open_store(folder), PRESETS["digits"]())
    several = {"recipe.input.global_batch_size": workers, "recipe.input.num_lanes": workers}
    several |= {"execution.num_workers": workers}
    config = replace(tiny_config(f"workers-{workers}", corpus.uri, steps=40, device="cpu"), **several)
    run, lease = begin(config, folder)
    driver = multiprocessing.get_context("spawn").Process(target=drive, args=(run.uri, lease.attempt, workers))
    driver.start()
    assert driver.pid is not None
    watched, found = {"driver": psutil.Process(driver.pid)}, {"driver": 0.0, "controller": 0.0}
    while driver.is_alive():
        with contextlib.suppress(psutil.Error):
            if "controller" not in watched:
                for each in watched["driver"].children(recursive=True):
                    if "TrainController" in " ".join(each.cmdline()):
                        watched["controller"] = each
            for name, process in watched.items():
                found[name] = max(found[name], process.memory_full_info().uss / 1e6)
        driver.join(0.1)  # the driver takes most in its last second
    at = [record.timestamp_ms / 1e3 for record in read_journal(run) if record.key == "train/loss"]
    assert len(at) == 40, read_state(run)
    return found | {"first step": min(at) - lease.began, "end": max(at) - lease.began}


def of_driver(folder: str, numbers: Sequence[int]) -> None:
    measured = {workers: memory_with(folder, workers) for workers in numbers}
    for workers, found in measured.items():
        memory = ", ".join(f"{name} {found[name]:.0f} MB" for name in ("driver", "controller"))
        print(
            f"{workers} workers: {memory}; first step after {found['first step']:.0f} s, the 40th after {found['end']:.0f} s"
        )
    fewest, most = min(numbers), max(numbers)
    for name in ("driver", "controller"):
        each = (measured[most][name] - measured[fewest][name]) / (most - fewest)
        print(
            f"{name}: {each:.2f} MB for each further worker, {measured[most][name] + (1000 - most) * each:.0f} MB with 1,000"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--machines", type=int, default=125)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 24])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        of_one_rank(folder)
        found = between_checkpoints(str(Path(folder) / "large"), given.machines, given.seconds)
        for kind, number in found.most_common():
            print(f"{number / given.seconds:8.3f} a second  {kind}")
        print(f"{found.total() / given.seconds:8.3f} a second in all, {given.machines} machines, {given.seconds:.0f} s")
        of_driver(folder, given.workers)


if __name__ == "__main__":
    main()
