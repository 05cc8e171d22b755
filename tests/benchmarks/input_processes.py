"""Threads against input processes, on one machine. Command: python tests/benchmarks/input_processes.py [--rounds 7]

1. Hand-over alone: processes that have their pixels already copy them into the batches of rank 0 of 8 (B = 4,096, 224 px). CPU time of
   the training process, which is at least as much as it holds Python's interpreter lock, and images/s taken without a pause.
2. 93 KB JPEG at 500 x 375 from Parquet to 224 px, rounds in turn: threads in the training process, against as many processes
   of one thread. CPU time of the training process and images/s. Of threads, the time with the lock is their CPU time without
   the calls that release it: the JPEG decoder, the resize and copies of tensors.

Prints every round. CPU-seconds hold on a busy machine, images/s do not.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import simplejpeg
import torch
from input import interval, jpeg, photograph
from steady_stream import BATCH, LANES, RANKS, WINDOW, small_picture, write_corpus

from vitline.data_prep.shard_format import Manifest
from vitline.infra.settings import inherited_environment
from vitline.infra.storage import Store, open_store
from vitline.infra.stores.file_store import FileStore
from vitline.vit.input.batches import Batch, LoaderResources, Source, source_batches
from vitline.vit.input.config import InputConfig
from vitline.vit.input.decoding import processes
from vitline.vit.input.decoding.process import Filled
from vitline.vit.input.decoding.shared_memory import Link, mapped
from vitline.vit.input.decoding.training import TrainLoader
from vitline.vit.input.prefetch import Prefetcher

IMAGES_PER_S = 5_000
MICRO_BATCH = 128


def copy_pixels(descriptor: int) -> None:
    """An input process without decoding."""
    link = Link(socket.socket(fileno=descriptor))
    task, _ = link.receive()
    shape = TrainLoader(task.asked).shape
    picture = torch.randint(0, 256, (shape.size, shape.side_px, shape.side_px, 3), dtype=torch.uint8)
    known: list[dict[str, torch.Tensor]] = []
    number, count = task.part
    while True:
        try:
            numbers, descriptors = link.receive()
            known += [
                shape.inside(torch.frombuffer(mapped(d, shape.num_bytes), dtype=torch.uint8)) for d in descriptors
            ]
            for slot in numbers:
                known[slot]["images"][number::count] = picture[number::count]
            link.send(Filled([[] for _ in numbers], [{} for _ in numbers]))
        except EOFError:
            return


def start_copying(others: socket.socket) -> Any:
    command = [sys.executable, __file__, "--copy-for", str(others.fileno())]
    environment = inherited_environment((), OMP_NUM_THREADS="1")
    return subprocess.Popen(command, pass_fds=[others.fileno()], process_group=0, env=environment)


def taken(batches: Prefetcher[list[Batch]], steps: int) -> tuple[int, float, float]:
    """Images, wall time and CPU time of this process for some steps."""
    began, cpu_s = time.perf_counter(), time.process_time()
    images = sum(batch.num_examples for step in islice(batches, steps) for batch in step)
    return images, time.perf_counter() - began, time.process_time() - cpu_s


def hand_over(corpus: Store, manifest: Manifest, rounds: int, steps: int) -> None:
    recipe = InputConfig(global_batch_size=BATCH, num_lanes=LANES, shuffle_window=WINDOW)
    real = processes._start
    processes._start = start_copying
    loading = LoaderResources(0, RANKS, processes=2)
    print("\nhand-over alone, 512 images of 224 px a step")
    with source_batches(
        [Source(corpus, manifest, "train")], recipe, seed=0, micro_batch_size=MICRO_BATCH, loading=loading
    ) as batches:
        taken(batches, 5)
        rows = []
        for i in range(rounds):
            images, wall_s, cpu_s = taken(batches, steps)
            rows.append((images / wall_s, 1e3 * cpu_s / images))
            print(
                f"  round {i + 1:2d}: {rows[-1][0]:8,.0f} images/s, {rows[-1][1]:.4f} CPU-ms an image in this process"
            )
        # At the rate of a GPU: is a batch there each time that it is asked for?
        step_s, late = BATCH / RANKS / IMAGES_PER_S, []
        for _ in range(steps):
            asked = time.perf_counter()
            next(batches)
            late.append(time.perf_counter() - asked)
            time.sleep(max(0.0, step_s - late[-1]))
    processes._start = real
    waited = sum(wait > step_s / 10 for wait in late)
    print(
        f"  at {IMAGES_PER_S:,} images/s: {waited} of {steps} steps waited more than a tenth of a step, longest {1e3 * max(late):.1f} ms"
    )
    for name, column in zip(("images/s", "CPU-ms an image"), zip(*rows, strict=True), strict=True):
        print("  {:20s} {:10.4g}  [{:.4g}, {:.4g}]".format(name, *interval(column)))


@contextmanager
def counted_releases() -> Iterator[list[float]]:
    """Adds up the CPU time of calls that release the interpreter lock, one number per call."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append(time.thread_time() - began)

        return run

    places = [(simplejpeg, "decode_jpeg"), (torch.nn.functional, "interpolate"), (torch.Tensor, "copy_")]
    real = [getattr(owner, name) for owner, name in places]
    for (owner, name), call in zip(places, real, strict=True):
        setattr(owner, name, timed(call))
    try:
        yield spent
    finally:
        for (owner, name), call in zip(places, real, strict=True):
            setattr(owner, name, call)


def compare(corpus: Store, manifest: Manifest, rounds: int, steps: int) -> None:
    cores = len(os.sched_getaffinity(0))
    recipe = InputConfig(global_batch_size=256, num_lanes=16, shuffle_window=1)
    print(f"\nJPEG to 224 px, {cores} threads in this process against {cores} processes, 256 images a step")

    def batches(number: int) -> Prefetcher[list[Batch]]:
        loading = LoaderResources(threads=cores, processes=number)
        return source_batches([Source(corpus, manifest, "train")], recipe, seed=0, micro_batch_size=64, loading=loading)

    rows = []
    for i in range(rounds):
        found = {}
        for number in (0, cores)[:: 1 if i % 2 else -1]:
            with batches(number) as side:  # one at a time, because one that is not measured goes on for a while
                taken(side, 4)
                apart_s = side.processes_cpu_s
                with counted_releases() as spent:
                    images, wall_s, cpu_s = taken(side, steps)
                apart_s = side.processes_cpu_s - apart_s
            all_s = (cpu_s, cpu_s - sum(spent), cpu_s + apart_s)
            found[number] = (images / wall_s, *(1e3 * seconds / images for seconds in all_s))
        (rate, cpu, held, _), (rate_apart, cpu_here, _, cpu_apart) = found[0], found[cores]
        rows.append((cpu, held, cpu_here, held / cpu_here, cpu_apart / cpu, rate_apart / rate))
        print(
            f"  round {i + 1:2d}: threads {rate:4.0f} images/s, {cpu:.3f} CPU-ms, {held:.3f} with the lock; processes "
            f"{rate_apart:4.0f} images/s, {cpu_apart:.3f} CPU-ms, {cpu_here:.4f} in this process; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    names = (
        "threads: CPU-ms an image",
        "  of it with the lock",
        "processes: CPU-ms here",
        "ratio with the lock",
        "ratio of all CPU",
        "ratio of images/s",
    )
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print("  {:26s} {:8.4g}  [{:.4g}, {:.4g}]".format(name, *interval(column)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of a round of the second part; ten times as many of the first"
    )
    parser.add_argument("--copy-for", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.copy_for is not None:
        copy_pixels(given.copy_for)
        return
    print(f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        shape = write_corpus(FileStore.at(f"file://{folder}/shape"), LANES * WINDOW * 64, small_picture())
        hand_over(open_store(f"{folder}/shape"), shape, given.rounds, 10 * given.steps)
        pictures = [jpeg(photograph(i)) for i in range(64)]
        photographs = write_corpus(FileStore.at(f"file://{folder}/photographs"), 2048, *pictures)
        compare(open_store(f"{folder}/photographs"), photographs, given.rounds, given.steps)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
