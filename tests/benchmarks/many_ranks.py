"""What 1,000 ranks ask of a real S3 service to start, to stop with a checkpoint, and to resume from it, and how long that takes.

    python -m tests.benchmarks.many_ranks [--ranks 1000]

The ranks of a training of a tiny network are threads of one process, which meet in its memory in place of torch.distributed; so they share
the cores of this machine, and decode and train nothing. Each does what a rank does until its first step; after a stop request it saves
the state, and starts again from that. Requests are counted at the store's interface, one within another once.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.config import digest_of
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import request_stop
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.names import Retention
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.checkpoints.state_tensors import state_tensors
from vitline.vit.checkpoints.tensor_file import raw_bytes
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.loop import TrainState
from vitline.vit.training.world import World

from ..trainings import begin, tiny_config
from .control_plane import counted
from .distant_s3 import own_s3


class Meeting:
    """One collective operation: the values that ranks have given to it, and whether those that all wait for are there."""

    def __init__(self) -> None:
        self.values, self.complete = dict[int, Any](), threading.Event()


class Meetings:
    """Those of all ranks, by number."""

    def __init__(self) -> None:
        self._lock, self._all = threading.Lock(), dict[int, Meeting]()

    def __getitem__(self, number: int) -> Meeting:
        with self._lock:
            return self._all.setdefault(number, Meeting())


@dataclass(frozen=True)
class ThreadRank(World):
    """A rank that is a thread."""

    meetings: Meetings = field(default_factory=Meetings)
    met: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def gather(self, value: Any) -> list[Any]:
        meeting = self.meetings[next(self.met)]
        meeting.values[self.rank] = value
        if len(meeting.values) == self.size:
            meeting.complete.set()
        meeting.complete.wait()
        return [meeting.values[rank] for rank in range(self.size)]

    def broadcast_int(self, value: int) -> int:
        return int(self.gather(value)[0])

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        meeting = self.meetings[next(self.met)]
        if self.rank == source:
            meeting.values[source] = value
            meeting.complete.set()
        meeting.complete.wait()
        return value.copy_(meeting.values[source])


class Rank:
    """What one rank of a training does besides its steps."""

    def __init__(self, run: Store, attempt: int, world: World) -> None:
        self.training, self.world = TrainingRun(run, attempt, world), world

    def start(self) -> TrainState:
        """Everything until the batches are read."""
        self.world.broadcast_int(not self.training.held.holds())
        self.world.broadcast_int(self.training._count_start())
        return self.training.start.newest()

    def stop(self, state: TrainState) -> None:
        """Rank 0 finds the request; all of them save."""
        held = self.training.held
        if self.world.rank == 0:
            with held._stop:
                while held.stopped() is None:
                    time.sleep(0.01)
        started = self.world.broadcast_int(1)
        saver, step = CheckpointSaver(held, self.world, Retention()), state.step
        saver.save(state, {**self.training.start.identity, "save_id": f"{started}-{step}", "images_seen": 0})
        saver.wait()


def all_of(ranks: Sequence[Any], what: Callable[[Any], Any], threads: ThreadPoolExecutor, label: str) -> list[Any]:
    """What each rank returns; prints what they asked for meanwhile."""
    began = time.monotonic()
    with counted(type(open_store("s3://any"))) as requests:
        found = [*threads.map(what, ranks)]
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in requests.most_common())
    print(f"{label}: {time.monotonic() - began:.1f} s, {requests.total():,} requests: {kinds}", flush=True)
    return found


def digest(state: TrainState) -> str:
    return digest_of({name: bytes(raw_bytes(value)).hex() for name, value in state_tensors(state).items()})


def measure(root: str, num_ranks: int) -> None:
    request: Any = PRESETS["digits"]()
    prepare([request], root)
    corpus = corpus_store(open_store(root), request)
    run, lease = begin(tiny_config("many", corpus.uri), root)

    def worlds() -> list[ThreadRank]:
        meetings = Meetings()
        return [ThreadRank(rank, num_ranks, node_rank=rank // 8, meetings=meetings) for rank in range(num_ranks)]

    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = all_of(worlds(), lambda world: Rank(run, lease.attempt, world), threads, "read the config")
        states = all_of(ranks, Rank.start, threads, "start")
        for state in states:
            state.step = 1
        request_stop(run, "preempted", by="benchmark", attempt=lease.attempt)
        pairs = [*zip(ranks, states, strict=True)]
        all_of(pairs, lambda pair: pair[0].stop(pair[1]), threads, "stop and save")
        second = acquire_lease(run, lease.run_key, job_state=lambda job: "failed", owner="benchmark")
        ranks = all_of(worlds(), lambda world: Rank(run, second.attempt, world), threads, "read the config")
        resumed = all_of(ranks, Rank.start, threads, "resume")
    assert {state.step for state in resumed} == {1}
    assert digest(resumed[0]) == digest(resumed[-1])
    print(f"{num_ranks:,} ranks, {len(state_tensors(resumed[0])):,} tensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    given = parser.parse_args()
    with own_s3() as root:
        measure(root, given.ranks)


if __name__ == "__main__":
    main()
