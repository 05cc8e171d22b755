"""The batches of a training: rows from the order, examples from the lanes, pixels from tasks.

An input process runs the same code as the threads of the training, for a part of the lanes of its rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import DiskCache, Store, disk_cache
from vitline.vit.input.augment import train_draws
from vitline.vit.input.augmentations.mixing import draw_mix, partners
from vitline.vit.input.config import InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.decoding.batch import Batch, BatchShape, blank_batches
from vitline.vit.input.decoding.fill import filling_tasks, mixing_tasks, place_examples
from vitline.vit.input.decoding.native_view import TrainingView
from vitline.vit.input.load_queue import LoadQueue, max_concurrent_loads
from vitline.vit.input.mapped_labels import MappedLabels
from vitline.vit.input.mixture import Mixture
from vitline.vit.input.order import Order
from vitline.vit.input.prefetch import Prefetcher, Work
from vitline.vit.input.read_shards import Example, LaneReader, SplitReader
from vitline.vit.input.schedule import ALL, Part, RankBatch, Schedule

PREFETCH = 2
"""Steps (training) or batches (evaluation) that are finished ahead of the consumer."""


@dataclass(frozen=True)
class LoaderResources:
    """Which share of the batches this process loads, and with what resources. It never changes an example or a pixel."""

    rank: int = 0
    world_size: int = 1
    threads: int = 1
    """Threads that decode and augment, those of all input processes together."""
    processes: int = 0
    """Processes in which they decode the batches of a training; 0 for this process. Evaluation always decodes in this one."""
    decoded_cache_bytes: int = 0
    """Memory for decoded pixels."""
    shared_cache: DecodedCache | None = None
    """Cache to use instead of one of its own, where several iterators read the same corpus. Not with `processes`."""
    read_ahead_bytes: int = 2**31
    """Most memory for row groups that are read before their turn; as much as the open ones is needed."""
    shard_cache_dir: str | None = None
    """Folder that caches row groups of a remote store, for all processes of this machine. Corpora in files are not cached."""
    shard_cache_bytes: int = 2**36
    """Most bytes in that folder."""

    def cache(self) -> DecodedCache:
        return self.shared_cache or DecodedCache(self.decoded_cache_bytes)

    def shard_cache(self) -> DiskCache | None:
        return disk_cache(self.shard_cache_dir, self.shard_cache_bytes) if self.shard_cache_dir else None

    def of_process(self, number: int) -> "LoaderResources":
        """The resources of one of the input processes."""
        more = number < self.threads % self.processes
        return replace(
            self,
            threads=max(1, self.threads // self.processes + more),
            processes=0,
            decoded_cache_bytes=self.decoded_cache_bytes // self.processes,
            read_ahead_bytes=self.read_ahead_bytes // self.processes,
        )


ONE_PROCESS = LoaderResources()


@dataclass(frozen=True)
class Source:
    """A corpus to train on, alone or in a mixture."""

    corpus: Store
    manifest: Manifest
    split: str
    weight: float = 1.0
    labels: MappedLabels | None = None
    """Its labels in the classes of the mixture; None for the labels of the corpus."""


@dataclass(frozen=True)
class LoaderRequest:
    """The batches that are asked for."""

    sources: tuple[Source, ...]
    config: InputConfig
    seed: int
    micro_batch_size: int
    start_step: int
    num_steps: int | None
    mask_bad: bool
    loading: LoaderResources


def loads_from(*corpora: Store) -> LoadQueue:
    return LoadQueue(max_concurrent_loads(any(corpus.high_latency for corpus in corpora)))


def order_of_training(
    sources: Sequence[Source],
    config: InputConfig,
    seed: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    most_examples: int,
) -> Schedule:
    """Which examples a rank trains on, in micro-batches of at most `most_examples`. Raises like `source_batches`."""
    orders = []
    for source in sources:
        kept = source.labels.kept if source.labels else None
        orders.append(Order.of(source.manifest, source.split, config, seed, kept.groups if kept else None))
    mixture = None
    if len(sources) > 1:
        mixture = Mixture([s.weight for s in sources], seed=seed, global_batch_size=config.global_batch_size)
    return Schedule(orders, mixture, rank=rank, world_size=world_size, most_examples=most_examples)


class TrainLoader:
    """What the batches of a training are made from. Raises ValueError if lanes, batch, ranks or class maps do not fit together."""

    def __init__(self, asked: LoaderRequest) -> None:
        self._asked, config, loading = asked, asked.config, asked.loading
        cache, shard_cache = loading.cache(), loading.shard_cache()
        self._readers = [
            SplitReader(s.corpus, s.manifest, s.split, cache, s.labels, shard_cache) for s in asked.sources
        ]
        self._schedule = order_of_training(
            asked.sources,
            config,
            asked.seed,
            rank=loading.rank,
            world_size=loading.world_size,
            most_examples=asked.micro_batch_size,
        )
        classes = asked.sources[0].labels or asked.sources[0].manifest
        self.shape = BatchShape(
            self._schedule.micro_batch_size,
            config.augment.image_size_px,
            classes.single_label,
            config.augment.mixes,
        )

    def shares(self, part: Part | None) -> Iterator[RankBatch]:
        """The shares of all steps that are asked for."""
        return self._schedule.shares(self._asked.start_step, self._asked.num_steps, part)

    def batches(self, share: RankBatch, tensors: Sequence[Mapping[str, Tensor]]) -> list[Batch]:
        """The micro-batches of a share, in these tensors, still to be filled in."""
        return blank_batches(share, tensors, self._asked.config.global_batch_size)

    def prefetched(
        self, part: Part = ALL, memory: Callable[[int], Sequence[Mapping[str, Tensor]]] | None = None
    ) -> Prefetcher[list[Batch]]:
        """Iterates the micro-batches of each step, with the examples of a part of the lanes filled in, and the padding by the first.

        `memory(n)` gives the tensors of n micro-batches; by default they are new.
        """
        loading, readers = self._asked.loading, self._readers
        loads = loads_from(*(reader.corpus for reader in readers))
        ahead_bytes = loading.read_ahead_bytes // len(readers)
        lanes = [LaneReader(r, o, loads, ahead_bytes) for r, o in zip(readers, self._schedule.orders, strict=True)]

        def work() -> Iterator[Work[list[Batch]]]:
            for share in self.shares(part):
                examples = _gather(lanes, share)
                tensors = memory(share.num_micro_batches) if memory else self._new(share.num_micro_batches)
                batches = self.batches(share, tensors)
                if part[0] == 0:
                    for batch in batches:
                        batch.pad()
                yield self._tasks(share, examples, batches), batches

        def close() -> None:
            loads.close()
            for reader in readers:
                reader.close()

        return Prefetcher(
            work(), threads=loading.threads, depth=PREFETCH, on_close=close, store_waited_s=lambda: loads.waited_s
        )

    def _new(self, count: int) -> list[dict[str, Tensor]]:
        return [self.shape.new() for _ in range(count)]

    def _tasks(self, share: RankBatch, examples: list[Example], batches: list[Batch]) -> list[Callable[[], None]]:
        """The tasks that fill in the examples of a share; their labels are filled in at once."""
        augment, seed, mask_bad = self._asked.config.augment, self._asked.seed, self._asked.mask_bad
        draws = train_draws(seed, share.rows.epoch, share.rows.row, augment.randaugment_layers).tolist()
        views = [TrainingView(d, augment) for d in draws]
        if not augment.mixes:
            return filling_tasks(place_examples(batches, share.at, examples, views), mask_bad=mask_bad)
        mixed_in = [examples[i] for i in partners(share.rows.lane).tolist()]
        places = place_examples(batches, share.at, examples, views, mixed_in)
        return mixing_tasks(places, share.rows.lane, draw_mix(seed, share.step, augment), mask_bad=mask_bad)


def _gather(lanes: Sequence[LaneReader], share: RankBatch) -> list[Example]:
    if len(lanes) == 1:
        return lanes[0].gather(share.rows)
    found: dict[int, Example] = {}
    for i, reader in enumerate(lanes):
        at = np.flatnonzero(share.source == i)
        found |= zip(at.tolist(), reader.gather(share.rows.at(at)), strict=True)
    return [found[i] for i in range(len(found))]
