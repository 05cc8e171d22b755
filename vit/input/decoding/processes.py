"""The training's side of input processes: it gives them memory for the batches of each step, and waits until it is filled.

Rank r of W has the lanes l with l mod W = r; of these, process p of P has those with (l // W) mod P = p. So every row group is read
by one process, and no image passes through this one.
"""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from vitline.infra.children import how_it_ended, start_python
from vitline.infra.settings import inherited_environment
from vitline.vit.input.decoding.batch import Batch
from vitline.vit.input.decoding.process import Counters, Filled, Task
from vitline.vit.input.decoding.several_labels import MultiLabels
from vitline.vit.input.decoding.shared_memory import BatchBuffers, Link, new_memory
from vitline.vit.input.decoding.training import PREFETCH, LoaderRequest, TrainLoader
from vitline.vit.input.prefetch import Prefetcher, WaitTimes, Work, WorkTimes

_END_S = 10.0


def decoded_in_processes(asked: LoaderRequest) -> Prefetcher[list[Batch]]:
    """Iterates the micro-batches of each step like `TrainLoader.prefetched`, which it runs in `loading.processes` processes.

    Iteration also raises RuntimeError naming a process that has ended. All have ended when the iterator is closed.
    """
    _check_parts(asked)
    inputs, processes = TrainLoader(asked), InputProcesses(asked)

    def work() -> Iterator[Work[list[Batch]]]:
        # In this thread, because to the kernel it is the parent of the processes, and they are killed when it ends.
        processes.start()
        slots = BatchBuffers(inputs.shape.num_bytes)
        for share in inputs.shares(part=None):
            taken = [slots.take() for _ in range(share.num_micro_batches)]
            batches = inputs.batches(share, [inputs.shape.inside(memory) for _, memory, _ in taken])
            processes.hand_out([n for n, _, _ in taken], [new for _, _, new in taken if new is not None])
            del taken  # it would keep the slots from being used again
            yield [partial(processes.collect, batches)], batches
            del batches

    # One thread collects, so that each process is asked for its steps in turn.
    return Prefetcher(work(), threads=1, depth=PREFETCH, on_close=processes.end, processes=processes)


def _check_parts(asked: LoaderRequest) -> None:
    """Raises ValueError where the input cannot be divided among `loading.processes` processes, or they could not read it."""
    loading, lanes = asked.loading, asked.config.num_lanes
    least = lanes // max(1, loading.world_size)
    if loading.processes > least:
        raise ValueError(
            f"decode_processes={loading.processes} must be at most {least}, the fewest of the num_lanes={lanes} lanes that one of "
            f"{loading.world_size} workers has: a process decodes whole lanes. Set fewer, or more lanes."
        )
    if loading.shared_cache is not None:
        raise ValueError(
            "shared_cache is in the memory of this process, so input processes cannot use it. Set processes=0."
        )
    if local := [s.corpus.uri for s in asked.sources if s.corpus.uri.startswith("memory://")]:
        raise ValueError(f"{local[0]} exists in this process only, so others cannot decode it. Set decode_processes=0.")


class Running(Protocol):
    """A process that was started. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class InputProcesses:
    """The input processes of one iterator."""

    def __init__(self, asked: LoaderRequest) -> None:
        self._asked = asked
        self._counters: Counters | None = None
        self._links: list[Link] = []
        self._running: list[Running] = []
        # Reentrant, because garbage collection may call `kill` while this thread starts a process.
        self._killed, self._lock = False, threading.RLock()

    @property
    def waits(self) -> WaitTimes:
        return self._counters.waits if self._counters else WaitTimes()

    @property
    def effort(self) -> WorkTimes:
        return self._counters.effort if self._counters else WorkTimes()

    @property
    def cpu_s(self) -> float:
        return self._counters.cpu_s if self._counters else 0.0

    @property
    def pids(self) -> list[int]:
        return [running.pid for running in self._running]

    def start(self) -> None:
        """Starts all and gives them their tasks. The thread that calls it must outlive them."""
        count, loading = self._asked.loading.processes, self._asked.loading
        table = new_memory(Counters.num_bytes(count))
        try:
            for _ in range(count):
                mine, others = socket.socketpair()
                with others, self._lock:
                    self._links.append(Link(mine))
                    self._running.append(_start(others))
                    if self._killed:
                        self.kill()
            for number, link in enumerate(self._links):
                task = Task(replace(self._asked, loading=loading.of_process(number)), (number, count))
                _send(link, task, [table])
        finally:
            self._counters = Counters(table, count)

    def hand_out(self, slots: list[int], new: Sequence[int]) -> None:
        """Gives all the slots of the next step, and the memory of those that are new, whose descriptors are closed."""
        try:
            for link in self._links:
                _send(link, slots, new)
        finally:
            for descriptor in new:
                os.close(descriptor)

    def collect(self, batches: list[Batch]) -> None:
        """Waits until all have filled in the next step. Their bad examples, and labels of images that may have several, are added."""
        answers: list[Filled] = []
        for number, link in enumerate(self._links):
            try:
                answer, _ = link.receive()
            except EOFError:
                raise self._ended(number) from None
            if not isinstance(answer, Filled):
                raise answer
            answers.append(answer)
        for i, batch in enumerate(batches):
            for answer in answers:
                batch.bad.extend(answer.bad[i])
            several: dict[str, Any] = {
                name: MultiLabels.joined([a.several[i][name] for a in answers]) for name in batch.several_labels
            }
            batches[i] = replace(batch, **several)

    def kill(self) -> None:
        """Ends all at once. Never waits."""
        with self._lock:
            self._killed = True
            for running in self._running:
                running.kill()

    def end(self) -> None:
        """Kills all, and waits for their end."""
        self.kill()
        for running in self._running:
            running.wait()
        for link in self._links:
            link.close()

    def _ended(self, number: int) -> RuntimeError:
        code = self._running[number].wait(_END_S)
        how = how_it_ended(code)
        if code >= 0:
            how += ", and its log above says why"
        if code == -signal.SIGKILL:
            how += ", as the kernel does where memory is lacking (--set execution.decode_processes lowers their number)"
        return RuntimeError(
            f"Input process {number + 1} of {len(self._running)} (pid {self._running[number].pid}) {how}. Batches cannot go on "
            "without it; a restart of the workers resumes from the newest checkpoint."
        )


def _send(link: Link, message: object, descriptors: Sequence[int]) -> None:
    # A process that has ended is noticed where its answers are collected, of which the last says what it raised.
    with suppress(EOFError):
        link.send(message, descriptors)


def _start(others: socket.socket) -> Running:
    """A fresh interpreter at the other end, in a process group of its own, so that Ctrl-C reaches this process only."""
    return start_python(
        "vitline.vit.input.decoding",
        str(others.fileno()),
        str(os.getpid()),
        # With more threads than its own, libraries of numerics would compete with the other processes.
        env=inherited_environment((), OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        pass_fds=[others.fileno()],
        process_group=0,
    )
