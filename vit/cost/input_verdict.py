"""Whether a node feeds its GPUs: measured speeds of the input against what the GPUs eat, what limits it, what to change.

Arithmetic only; `input_speed.py` measures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from statistics import fmean
from typing import Literal, get_args

from vitline.infra.html.text import num_bytes
from vitline.vit.cost.input_speed import WorkerSpeed

Stage = Literal["store", "network", "decode", "hand-over"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Until the store answers; until the bytes are there; decoding and augmentation; planning of batches."""


@dataclass(frozen=True)
class Setting:
    """What a node has, and how its workers read."""

    cores: int
    threads: int
    """`execution.decode_threads`, of each worker."""
    processes: int
    """Input processes of each worker; 0 for its own."""
    lanes: int
    """Lanes of each worker, and so the most input processes that it can have."""
    loads_at_a_time: int
    """Row groups that a worker loads at a time, at most."""
    rows_per_group: int
    read_ahead_bytes: int
    """`execution.read_ahead_bytes`, of each worker."""
    open_bytes: int
    """Encoded bytes of the row groups that a worker keeps open."""
    split_bytes: int
    """Encoded bytes of the split."""
    can_cache: bool
    """Whether a shard cache would help: the store is remote, and there is none."""


@dataclass(frozen=True)
class InputVerdict:
    """The figures of `vitline data bench` for one node. `needed` is the rate at which one of its GPUs eats, in images/s."""

    speeds: Sequence[WorkerSpeed]
    setting: Setting
    needed: float

    @property
    def workers(self) -> int:
        return len(self.speeds)

    @property
    def images_per_s(self) -> float:
        """From the store to batches, of the node."""
        return sum(speed.images_per_s for speed in self.speeds)

    @property
    def images_per_core_s(self) -> float:
        """Images per second of CPU time."""
        return 1 / self._mean("cpu_s_per_image")

    @property
    def fraction(self) -> float:
        """Of what the GPUs of the node eat."""
        return self.images_per_s / (self.needed * self.workers)

    @property
    def bytes_per_s(self) -> float:
        """What the store must send to the node, so that no GPU waits."""
        return self.needed * self.workers * self.bytes_per_image

    @property
    def bytes_per_image(self) -> float:
        return fmean(speed.read.bytes_per_image for speed in self.speeds)

    @property
    def cores_needed(self) -> float:
        return self.needed * self.workers * self._mean("cpu_s_per_image")

    @property
    def loads_needed(self) -> int:
        """Row groups that a worker must load at a time: their rate times the seconds of one (Little's law)."""
        return ceil(self.needed / self.setting.rows_per_group * fmean(speed.read.load_s for speed in self.speeds))

    def alone(self) -> dict[Stage, float]:
        """Images per second that each stage could feed if it were the only one."""
        setting = self.setting
        at_a_time = self.workers * setting.loads_at_a_time * setting.rows_per_group
        answers = fmean(speed.read.answer_s for speed in self.speeds)
        return {
            "store": at_a_time / answers if answers else inf,
            "network": sum(speed.read.images_per_s for speed in self.speeds),
            "decode": min(
                sum(setting.threads / speed.decode_s_per_image for speed in self.speeds),
                setting.cores * self.images_per_core_s,
            ),
            "hand-over": sum(max(1, setting.processes) / s.hand_over_cpu_s_per_image for s in self.speeds),
        }

    def shares(self) -> dict[Stage, float]:
        """What the consumers waited for, as fractions of their waits. A wait for a row group is divided like the time of one
        that is read alone."""
        store, decode, hand_over = (sum(seconds) for seconds in zip(*(s.waits for s in self.speeds), strict=True))
        total = store + decode + hand_over or 1.0
        answers = fmean(min(1.0, speed.read.answer_s / speed.read.load_s) for speed in self.speeds)
        parts = (store * answers, store * (1 - answers), decode, hand_over)
        return {stage: part / total for stage, part in zip(STAGES, parts, strict=True)}

    @property
    def limit(self) -> Stage:
        """What was waited for most."""
        shares = self.shares()
        return max(STAGES, key=lambda stage: shares[stage])

    def sentence(self) -> str:
        """The verdict."""
        eat = "its GPU eats" if self.workers == 1 else f"its {self.workers} GPUs eat"
        rates = f"a node feeds {self.images_per_s:,.0f} of the {self.needed * self.workers:,.0f} images/s that {eat}"
        if self.fraction >= 1:
            return f"No GPU waits: {rates}, {self.fraction:.2f} times as many as needed."
        return f"GPUs would wait {1 - self.fraction:.0%} of the time: {rates}; {_LIMITS[self.limit]} is the limit."

    def changes(self) -> Iterator[str]:
        """What to change so that no GPU waits, with numbers; the first where the most is gained."""
        setting = self.setting
        if setting.read_ahead_bytes < setting.open_bytes:
            yield (
                f"read-ahead: --set execution.read_ahead_bytes={setting.open_bytes}, as much as the row groups that a worker keeps "
                f"open; with {num_bytes(setting.read_ahead_bytes)} batches wait where blocks end"
            )
        if self.fraction >= 1:
            return
        alone, node = self.alone(), self.needed * self.workers
        if alone["decode"] < node:
            yield from self._more_cores(node)
        if alone["hand-over"] < node:
            yield (
                f"hand-over: one worker plans {alone['hand-over'] / self.workers:,.0f} images/s at most in "
                f"{_processes(setting.processes)}, whatever its threads; raise execution.decode_processes"
            )
        if min(alone["store"], alone["network"]) < node:
            yield from self._more_bytes(node, alone["network"])

    def _more_cores(self, node: float) -> Iterator[str]:
        setting, each = self.setting, self._mean("decode_cpu_s_per_image")
        room = max(1, setting.cores // self.workers)
        threads = min(room, ceil(self.needed * each))
        stalled = 1 - each / self._mean("decode_s_per_image")
        if stalled > _STALLED and setting.threads <= room:
            each_process = self.alone()["decode"] / self.workers / max(1, setting.processes)
            processes = min(ceil(self.needed / each_process), setting.lanes, max(threads, setting.threads))
            yield (
                f"interpreter lock: with {setting.threads} threads in {_processes(setting.processes)} a worker's decoding waits "
                f"{stalled:.0%} of the time for Python's interpreter lock, or for cores that other programs use; one process decodes "
                f"{each_process:,.0f} images/s"
            )
            if processes > max(1, setting.processes):
                yield (
                    f"processes: --set execution.decode_processes={processes} --set execution.decode_threads="
                    f"{max(threads, setting.threads)}, each of which has a lock of its own"
                )
        elif threads > setting.threads:
            fed = min(threads * self.workers / each, setting.cores * self.images_per_core_s)
            yield f"threads: --set execution.decode_threads={threads}, which can decode {fed:,.0f} images/s on this node"
        if self.cores_needed > setting.cores:
            gpus = floor(setting.cores * self.images_per_core_s / self.needed)
            enough = f"give such a node {gpus} of these GPUs at most" if gpus else "less than one of these GPUs eats"
            yield (
                f"cores: {node:,.0f} images/s take {ceil(self.cores_needed)} cores, at {self.images_per_core_s:,.0f} images/s a core; "
                f"this node has {setting.cores}, enough for {setting.cores * self.images_per_core_s:,.0f} images/s: {enough}"
            )

    def _more_bytes(self, node: float, network: float) -> Iterator[str]:
        setting = self.setting
        if self.loads_needed > setting.loads_at_a_time:
            yield (
                f"row groups: a worker must load {self.loads_needed:,} at a time and loads {setting.loads_at_a_time} at most; prepare "
                f"the corpus with recipe.sharding.row_group_bytes {ceil(self.loads_needed / setting.loads_at_a_time)} times as large"
            )
        yield (
            f"bandwidth: a node needs {num_bytes(self.bytes_per_s)}/s of the store, which gave "
            f"{num_bytes(network * self.bytes_per_image)}/s"
        )
        if setting.can_cache:
            yield (
                f"cache: --set execution.shard_cache_dir=FOLDER --set execution.shard_cache_bytes={setting.split_bytes}, on a local "
                f"disk that reads {num_bytes(self.bytes_per_s)}/s; from the second epoch on nothing comes from the store"
            )

    def _mean(self, field: str) -> float:
        """Mean over the workers, each of which loads an equal share."""
        return fmean(getattr(speed, field) for speed in self.speeds)


def _processes(number: int) -> str:
    return "1 process" if number < 2 else f"{number} processes"


_STALLED = 0.3
"""Share of the time of a thread without CPU time from which on more threads are not advised."""
_LIMITS = {
    "store": "the time until the store answers",
    "network": "the bandwidth from the store",
    "decode": "decoding",
    "hand-over": "the hand-over of batches",
}
