"""An input process: decodes a part of the lanes of its rank, and writes into batches that lie in shared memory.

It is started as a fresh interpreter, never forked, because a fork of a process with threads may deadlock and copies memory page by
page. It reads the shards itself. The first message it gets is a `Task` with the memory of its counters; each further one has
the numbers of the slots of the next step's micro-batches, with the memory of those that are new. For every step it
answers with the bad examples and several labels, or with what it raised. It ends with its parent, however that ends.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitline.infra.children import end_with_parent, sendable
from vitline.vit.input.decoding.several_labels import Arrays
from vitline.vit.input.decoding.shared_memory import Link, mapped
from vitline.vit.input.decoding.training import LoaderRequest, TrainLoader
from vitline.vit.input.prefetch import Prefetcher, WaitTimes, WorkTimes
from vitline.vit.input.schedule import Part


@dataclass(frozen=True)
class Task:
    """What an input process is to do. The resources of `asked` are its own."""

    asked: LoaderRequest
    part: Part
    """Its number, and the number of all; also its place in the counters."""


class Filled(NamedTuple):
    """The examples of this process have been filled in, in all micro-batches of a step."""

    bad: list[list[tuple[int, str]]]
    """For each micro-batch, like `Batch.bad`."""
    several: list[dict[str, Arrays]]
    """For each micro-batch, like `Batch.several_labels`: small, and of a size of its own, so they are not in shared memory."""


class Counters:
    """What all input processes have waited for and spent, in shared memory of float64 (processes, columns)."""

    COLUMNS = len(WaitTimes._fields) + len(WorkTimes._fields) + 1

    def __init__(self, descriptor: int, num_processes: int) -> None:
        """Closes the descriptor."""
        shape = (num_processes, self.COLUMNS)
        self._table = np.frombuffer(mapped(descriptor, self.num_bytes(num_processes)), dtype=np.float64).reshape(shape)

    @classmethod
    def num_bytes(cls, num_processes: int) -> int:
        return num_processes * cls.COLUMNS * 8

    def write(self, number: int, batches: Prefetcher[Any]) -> None:
        self._table[number] = (*batches.waits, *batches.effort, time.process_time())

    @property
    def waits(self) -> WaitTimes:
        return WaitTimes(*self._totals()[: len(WaitTimes._fields)])

    @property
    def effort(self) -> WorkTimes:
        return WorkTimes(*self._totals()[len(WaitTimes._fields) : -1])

    @property
    def cpu_s(self) -> float:
        return self._totals()[-1]

    def _totals(self) -> list[float]:
        totals: list[float] = self._table.sum(axis=0).tolist()
        return totals


def serve(link: Link, parent_is_gone: Callable[[], None]) -> None:
    """Does the task that comes over the link. `parent_is_gone` is called in another thread."""
    (task, (descriptor,)) = link.receive()
    assert isinstance(task, Task)
    number, num_processes = task.part
    counters = Counters(descriptor, num_processes)
    try:
        inputs = TrainLoader(task.asked)
        slots = _Slots(link, inputs, parent_is_gone)
        with inputs.prefetched(task.part, slots.next_step) as batches:
            for step in batches:
                counters.write(number, batches)
                several = [{name: found.arrays() for name, found in b.several_labels.items()} for b in step]
                link.send(Filled([batch.bad for batch in step], several))
                del step
    except EOFError:
        return  # the parent has closed the link
    except Exception as error:
        with suppress(EOFError):
            link.send(sendable(error))


class _Slots:
    """The slots that come over the link, as tensors. Its thread notices the end of the parent at any time."""

    def __init__(self, link: Link, inputs: TrainLoader, parent_is_gone: Callable[[], None]) -> None:
        self._shape, self._link, self._parent_is_gone = inputs.shape, link, parent_is_gone
        self._known: dict[int, dict[str, Tensor]] = {}
        self._steps: queue.Queue[list[int] | None] = queue.Queue()
        threading.Thread(target=self._receive, name="slots", daemon=True).start()

    def next_step(self, count: int) -> list[dict[str, Tensor]]:
        """The tensors of the micro-batches of the next step. Raises EOFError if the parent is gone."""
        numbers = self._steps.get()
        if numbers is None:
            raise EOFError
        assert len(numbers) == count, (numbers, count)
        return [self._known[number] for number in numbers]

    def _receive(self) -> None:
        try:
            with suppress(EOFError):
                while True:
                    numbers, descriptors = self._link.receive()
                    new = [number for number in numbers if number not in self._known]
                    for number, descriptor in zip(new, descriptors, strict=True):
                        memory = np.frombuffer(mapped(descriptor, self._shape.num_bytes), dtype=np.uint8)
                        self._known[number] = self._shape.inside(torch.from_numpy(memory))
                    self._steps.put(numbers)
        finally:
            self._steps.put(None)  # whatever was raised, nobody waits for steps that will not come
        self._parent_is_gone()


def main() -> None:
    """`python -m vitline.vit.input.decoding DESCRIPTOR PARENT`: serves the link of that descriptor for the process PARENT."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    if not end_with_parent(parent, signal.SIGKILL):
        return
    torch.set_num_threads(1)
    serve(Link(socket.socket(fileno=descriptor)), parent_is_gone=lambda: os._exit(0))
    os._exit(0)  # threads that wait for a store must not delay the end
