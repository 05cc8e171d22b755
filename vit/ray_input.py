"""Batches that are decoded on other nodes of a Ray cluster, where the nodes of the training lack cores (`execution.decode_on`).

Each of P actors decodes a part of the lanes of a rank, by the code of an input process, and streams its examples of each step. Ray
places actors, which ask for as many CPUs as they have threads, on nodes without GPUs where those have room.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vitline.infra.provenance import require_same_versions
from vitline.vit.input.batches import Batch
from vitline.vit.input.decoding.parts import FilledPart, Spent, assembled, filled_parts
from vitline.vit.input.decoding.processes import check_parts
from vitline.vit.input.decoding.training import PREFETCH, TrainingRequest
from vitline.vit.input.prefetch import Effort, Prefetcher, Waits, Work

log = logging.getLogger(__name__)
LATE_S = 30.0
"""Seconds without a free place for an actor after which the log says so."""


def decoded_on_ray(asked: TrainingRequest) -> Prefetcher[list[Batch]]:
    """Iterates the micro-batches of each step like `TrainingInput.prefetched`, which `loading.processes` actors run.

    Iteration also raises RuntimeError naming an actor that has ended. All have ended when the iterator is closed.
    """
    check_parts(asked)
    actors = InputActors(asked)

    def work() -> Iterator[Work[list[Batch]]]:
        actors.start()
        yield from assembled(asked, actors.collect)

    # One thread collects, so that each actor is asked for its steps in turn.
    return Prefetcher(work(), threads=1, depth=PREFETCH, on_close=actors.kill, processes=actors)


class InputActors:
    """The actors of one iterator."""

    def __init__(self, asked: TrainingRequest) -> None:
        self._asked = asked
        self._actors: list[Any] = []
        self._streams: list[Any] = []
        self._spent: dict[int, Spent] = {}
        # Reentrant, because garbage collection may call `kill` while this thread starts an actor.
        self._killed, self._lock = False, threading.RLock()

    @property
    def _total(self) -> Spent:
        total = Spent()
        for spent in [*self._spent.values()]:
            total = total.plus(spent)
        return total

    @property
    def waits(self) -> Waits:
        return self._total.waits

    @property
    def effort(self) -> Effort:
        return self._total.effort

    @property
    def cpu_s(self) -> float:
        return self._total.cpu_s

    def start(self) -> None:
        """Asks Ray for all actors, and each for its steps; they wait for free CPUs, and then for the training."""
        import ray

        count, loading = self._asked.loading.processes, self._asked.loading
        kind: Any = ray.remote(_InputActor)
        waiting = []
        for number in range(count):
            mine = loading.of_process(number)
            with self._lock:
                if self._killed:
                    return
                actor = kind.options(num_cpus=mine.threads, max_restarts=0).remote()
                self._actors.append(actor)
            waiting.append(actor.ready.remote())  # first, because an actor does one thing after the other
            steps = actor.steps.options(num_returns="streaming", _generator_backpressure_num_objects=PREFETCH)
            self._streams.append(steps.remote(replace(self._asked, loading=mine), (number, count)))
        while (late := ray.wait(waiting, num_returns=count, timeout=LATE_S)[1]) and not self._killed:
            log.warning(
                "%d of %d input actors wait for %d free CPUs in the cluster", len(late), count, loading.threads // count
            )

    def collect(self) -> list[FilledPart]:
        """Waits until all have sent their parts of the next step."""
        return [self._next(number) for number in range(len(self._streams))]

    def _next(self, number: int) -> FilledPart:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            found: FilledPart = ray.get(next(self._streams[number]))
        except RayTaskError as error:  # what it has raised, as from an input process
            raise getattr(error, "cause", None) or error from None
        except RayError as error:
            raise RuntimeError(
                f"Input actor {number + 1} of {len(self._streams)} has ended: {error}. Batches cannot go on without it; a restart "
                "of the workers resumes from the newest checkpoint."
            ) from error
        self._spent[number] = found.spent
        return found

    def kill(self) -> None:
        """Ends all at once."""
        import ray

        with self._lock:
            self._killed = True
            for actor in self._actors:
                with suppress(Exception):  # Ray itself has ended, and the actors with it
                    ray.kill(actor)


class _InputActor:
    """Decodes one part. Ray makes an actor of it."""

    def ready(self) -> None:
        """Returns once the actor is placed."""

    def steps(self, asked: TrainingRequest, part: tuple[int, int]) -> Iterator[FilledPart]:
        require_same_versions()
        import torch

        torch.set_num_threads(1)
        yield from filled_parts(asked, part)
