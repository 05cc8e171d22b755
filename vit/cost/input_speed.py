"""How fast the loader of a training feeds one node from its store, and how fast each stage of it could be.

The workers of the node are measured at once, in a process each, with the parts and settings that the training uses. The consumer
takes every batch at once, as a GPU without end would. Decoded pixels are not cached, as in a first epoch.
"""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import inf
from statistics import median
from typing import Any

import numpy as np

from vitline.vit.config import TrainConfig
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.input.batches import LoaderResources, Source, order_of_training, source_batches
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.decoding.how_many import decode_processes
from vitline.vit.input.load_queue import AHEAD, Load, LoadQueue, max_concurrent_loads
from vitline.vit.input.order import Order
from vitline.vit.input.prefetch import Prefetcher, WaitTimes
from vitline.vit.input.read_shards import RowGroup, SplitReader

_ANSWERS, _LOADS_ALONE, _MOST_GROUPS = 5, 3, 10_000
_START_S = 300.0
"""Seconds in which all processes of a node must have started, and read their first batch."""


@dataclass(frozen=True)
class ReadSpeed:
    """Row groups that are only read, by one worker."""

    answer_s: float
    """Median seconds of a read of one byte."""
    load_s: float
    """Median seconds of one row group that is read alone."""
    images_per_s: float
    """With as many row groups at a time as the loader reads at most."""
    bytes_per_image: float


@dataclass(frozen=True)
class WorkerSpeed:
    """What one worker was measured to do."""

    images_per_s: float
    """From the store to batches of uint8 pixels."""
    first_batch_s: float
    cpu_s_per_image: float
    """CPU time of the worker, its input processes included."""
    decode_s_per_image: float
    """Seconds of one thread that decodes and augments; waits for a core or for Python's interpreter lock are in it."""
    decode_cpu_s_per_image: float
    """Its CPU time."""
    hand_over_cpu_s_per_image: float
    """CPU time of the thread that plans the batches, or of those of all input processes."""
    waits: WaitTimes
    """What the consumer waited for."""
    read: ReadSpeed


def node_speed(config: TrainConfig, workers: int, seconds: float) -> list[WorkerSpeed]:
    """Measures the first `workers` of the `execution.num_workers` of a training, for `seconds` each of reading and of the whole
    way. Raises what the loader raises for a corpus that it cannot read."""
    if workers == 1:
        return [worker_speed(config, 0, seconds)]
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(workers, timeout=_START_S)
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_join, initargs=(barrier,)) as pool:
        started = [pool.submit(_one_of_many, config, rank, seconds) for rank in range(workers)]
        errors = [error for error in (future.exception() for future in started) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # that of the process that failed; the others only waited for it
        return [future.result() for future in started]


def worker_speed(
    config: TrainConfig, rank: int, seconds: float, together: Callable[[], object] = lambda: None
) -> WorkerSpeed:
    """Measures one worker. `together()` returns once all workers of the node have come to the same point."""
    sources, execution, recipe = sources_of(open_corpora(config), config.split), config.execution, config.recipe
    loading = LoaderResources(
        rank,
        execution.num_workers,
        threads=execution.decode_threads,
        processes=decode_processes(
            execution.decode_processes,
            threads=execution.decode_threads,
            lanes=recipe.input.num_lanes // execution.num_workers,
            in_memory=any(s.corpus.uri.startswith("memory://") for s in sources),
        ),
        read_ahead_bytes=execution.read_ahead_bytes,
        shard_cache_dir=execution.shard_cache_dir,
        shard_cache_bytes=execution.shard_cache_bytes,
    )
    together()
    read = read_speed(sources, config, loading, seconds)
    together()
    began = time.perf_counter()
    with source_batches(
        sources,
        recipe.input,
        seed=recipe.seed,
        micro_batch_size=execution.planned_micro_batch,
        mask_bad=True,
        loading=loading,
    ) as batches:
        next(batches)
        first_batch_s = time.perf_counter() - began
        together()
        began, cpu_s, waits, effort, images = time.perf_counter(), _cpu_s(batches), batches.waits, batches.effort, 0
        while not images or time.perf_counter() - began < seconds:
            images += sum(batch.num_examples for batch in next(batches))
        wall_s, cpu_s, spent = time.perf_counter() - began, _cpu_s(batches) - cpu_s, batches.effort
        return WorkerSpeed(
            images_per_s=images / wall_s,
            first_batch_s=first_batch_s,
            cpu_s_per_image=cpu_s / images,
            decode_s_per_image=(spent.tasks_s - effort.tasks_s) / images,
            decode_cpu_s_per_image=(spent.tasks_cpu_s - effort.tasks_cpu_s) / images,
            hand_over_cpu_s_per_image=(spent.planner_cpu_s - effort.planner_cpu_s) / images,
            waits=batches.waits.since(waits),
            read=read,
        )


def _cpu_s(batches: Prefetcher[Any]) -> float:
    """CPU time of this process and its input processes."""
    return time.process_time() + batches.processes_cpu_s


def read_speed(sources: Sequence[Source], config: TrainConfig, loading: LoaderResources, seconds: float) -> ReadSpeed:
    """Reads row groups of one worker: a few one by one, then as many at a time as the loader does at most."""
    stores = [source.corpus for source in sources]
    answers = [_seconds(partial(store.read, "manifest.json", 0, 1)) for _ in range(1 + _ANSWERS) for store in stores]
    readers = [
        SplitReader(s.corpus, s.manifest, s.split, DecodedCache(0), s.labels, loading.shard_cache()) for s in sources
    ]
    groups = [(readers[i], group) for i, group in _row_groups(sources, config, loading.rank)]
    loads = LoadQueue(max_concurrent_loads(any(store.high_latency for store in stores)))
    try:
        alone = []
        for reader, group in groups[:_LOADS_ALONE]:
            reader.load(_neighbour(reader, group))  # also reads the footer of the shard, which is kept
            alone.append(_seconds(partial(reader.load, group)))
        images_per_s, bytes_per_image = _read_many(groups[_LOADS_ALONE:] or groups, loads, seconds)
    finally:
        loads.close()
        for reader in readers:
            reader.close()
    return ReadSpeed(median(answers[len(stores) :]), median(alone), images_per_s, bytes_per_image)


def _read_many(groups: Sequence[tuple[SplitReader, int]], loads: LoadQueue, seconds: float) -> tuple[float, float]:
    """Images per second, and mean bytes of an image. Counts from when the first loads are done, which also read footers."""
    under_way = deque[Load[RowGroup]]()
    began, images, num_bytes, ended = time.perf_counter(), 0, 0, 0
    for reader, group in cycle(groups):
        load = Load(partial(reader.load, group))
        under_way.append(load)
        loads.put(load, AHEAD)
        if len(under_way) < 2 * loads.max_threads:
            continue
        loaded = under_way.popleft().result()
        ended += 1
        if ended <= loads.max_threads:
            began = time.perf_counter()
            continue
        images, num_bytes = images + len(loaded.labels), num_bytes + loaded.num_bytes
        if time.perf_counter() - began >= seconds:
            break
    return images / (time.perf_counter() - began), num_bytes / images


def _row_groups(sources: Sequence[Source], config: TrainConfig, rank: int) -> list[tuple[int, int]]:
    """(source, row group) of one rank in the first epoch, the last first: the whole way begins with others. Of several sources each
    has its share of the rows, until one ends."""
    schedule = order_of_training(sources, config.recipe.input, config.recipe.seed, most_examples=1)
    found, end = list[tuple[float, int, int]](), inf
    for i, (source, order) in enumerate(zip(sources, schedule.orders, strict=True)):
        groups = _groups_of_rank(order, range(rank, order.num_lanes, config.execution.num_workers))
        turns = np.cumsum(order.groups.size(np.array(groups))) / source.weight
        found += zip(turns.tolist(), [i] * len(groups), groups, strict=True)
        end = min(end, float(turns[-1]))
    return [(i, group) for turn, i, group in sorted(found) if turn <= end]


def _groups_of_rank(order: Order, lanes: range) -> list[int]:
    """The row groups of some lanes in the first epoch, the last first, at most about `_MOST_GROUPS`."""
    groups, block = list[int](), 0
    while len(groups) < _MOST_GROUPS:
        of_block = [group for lane in lanes for group in order.block_groups(0, lane, block).tolist()]
        if not of_block:
            break
        groups, block = groups + of_block, block + 1
    return groups[::-1]


def _neighbour(reader: SplitReader, group: int) -> int:
    """Another row group of the same shard, if there is one."""
    near = [n for n in (group + 1, group - 1) if 0 <= n < reader.groups.num_groups]
    return next((n for n in near if reader.shard_key(n) == reader.shard_key(group)), group)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


_barrier: threading.Barrier


def _join(barrier: threading.Barrier) -> None:
    global _barrier
    _barrier = barrier


def _one_of_many(config: TrainConfig, rank: int, seconds: float) -> WorkerSpeed:
    try:
        return worker_speed(config, rank, seconds, _barrier.wait)
    except BaseException:
        _barrier.abort()  # the others must not wait for this one
        raise
