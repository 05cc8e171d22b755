"""What a training of 1,000 ranks on 125 machines asks of its store, apart from data and checkpoints, and the memory of its flow and driver.

python -m tests.benchmarks.control_plane [--seconds 900] [--machines 125] [--workers 2 8 24]

Between checkpoints the store parts of the driver, of rank 0 and of one process of each other machine run as threads; other ranks have
none. Before that, two ranks train a tiny network, for what each rank asks at its start and at each step.
Requests are counted at the store's interface, one within another once.

Last, a deployment of a local stack trains a small network on so many workers, each a process of this machine: the most memory of the flow,
of the driver and of Ray Train's controller, by what they share with no other process, and what each further worker adds.
"""

import argparse
import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch import multiprocessing

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.flows.catalog.records import list_run_keys
from vitline.infra.local.stack import find_stack
from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import Store, open_store
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.reporter import Reporter, system_metrics
from vitline.vit.training.world import World

from ..counted import counted
from ..servers.own_servers import OwnServers, own_servers
from ..servers.stack import FINAL
from ..trainings import begin, tiny_config

STEP_S, STEPS = 0.3, 40
PROCESSES = {"flow": "prefect.engine", "driver": "vit.ray_jobs.train_driver", "controller": "TrainController"}
"""By words of their commands."""


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


def memory_with(servers: OwnServers, root: Store, workers: int) -> dict[str, float]:
    """The most memory of each of PROCESSES with so many workers, in MB, and seconds from the start of the flow run to the first and to
    the last step."""
    overrides = {
        "recipe.total_steps": STEPS,
        "recipe.input.global_batch_size": workers,
        "recipe.input.num_lanes": workers,
    }
    overrides |= {"recipe.optim.warmup_steps": 1, "execution.log_every_steps": 1, "execution.device": "cpu"}
    name, began = f"workers-{workers}", time.time()
    request = {"corpus": "digits", "recipe": "digits", "name": name, "num_workers": workers, "overrides": overrides}
    flow_run, found = servers.start("pretrain/default", request), dict.fromkeys(PROCESSES, 0.0)
    stack = find_stack(servers.directory)
    assert stack is not None
    while servers.ask("prefect", f"/flow_runs/{flow_run}")["state_type"] not in FINAL:
        for process in psutil.Process(stack.supervisor_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                for kind in (kind for kind, words in PROCESSES.items() if words in command):
                    found[kind] = max(found[kind], process.memory_full_info().uss / 1e6)
        time.sleep(0.1)
    assert (end := servers.ended(flow_run)).startswith("Completed"), end
    (key,) = (key for key in list_run_keys(root) if key.startswith(f"{name}-"))
    run = root.child(f"runs/{key}")
    at = [record.timestamp_ms / 1e3 for record in read_journal(run) if record.key == "train/loss"]
    assert len(at) == STEPS, read_state(run)
    return found | {"first step": min(at) - began, "last step": max(at) - began}


def of_processes(folder: str, numbers: Sequence[int]) -> None:
    with own_servers(folder, num_cpus=max(numbers)) as servers:
        measured = {workers: memory_with(servers, open_store(folder), workers) for workers in numbers}
    for workers, found in measured.items():
        memory = ", ".join(f"{kind} {found[kind]:.0f} MB" for kind in PROCESSES)
        print(
            f"{workers} workers: {memory}; first step after {found['first step']:.0f} s, last {found['last step']:.0f} s"
        )
    fewest, most = min(numbers), max(numbers)
    for kind in PROCESSES:
        each = (measured[most][kind] - measured[fewest][kind]) / (most - fewest)
        print(
            f"{kind}: {each:.2f} MB for each further worker, {measured[most][kind] + (1000 - most) * each:.0f} MB with 1,000"
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
        of_processes(folder, given.workers)


if __name__ == "__main__":
    main()
