"""Batches for training and evaluation: uint8 pixels and labels, which threads decode and augment ahead of the consumer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data_prep.shard_format import Manifest
from infra.storage import DiskCache, Store, disk_cache
from vit.input.augment import eval_pixels, train_draws
from vit.input.augmentations.mixing import Mix, draw_mix, mix_lane, partners
from vit.input.config import AugmentConfig, InputConfig
from vit.input.decoded_cache import DecodedCache, Label
from vit.input.decoding.native_view import TrainingView
from vit.input.load_queue import NOW, Load, LoadQueue, most_loads
from vit.input.mapped_labels import MappedLabels
from vit.input.mixture import Mixture
from vit.input.order import Ints, Order, RowGroups
from vit.input.prefetch import Prefetcher, Work
from vit.input.read_shards import Example, LaneReader, RowGroup, SplitReader
from vit.input.schedule import Schedule, Share

T = TypeVar("T")
_EXAMPLES_PER_TASK = 16
_PREFETCH = 2
"""Steps (training) or batches (evaluation) that are finished ahead of the consumer."""


@dataclass(frozen=True)
class SeveralLabels:
    """Labels of n images that may have any number each, as class ids with weights, in m columns. Padding has weight 0. Rows of all
    classes are made of them where they are needed, on the device."""

    ids: Tensor
    """int64 (n, m)."""
    weights: Tensor
    """float32 (n, m)."""

    @classmethod
    def of(cls, labels: Sequence[Label], num_rows: int) -> "SeveralLabels":
        """The labels of the first rows; further rows are padding. A class without a weight has weight 1."""
        several = [([label], None) if isinstance(label, int) else label for label in labels]
        sizes = np.array([len(ids) for ids, _ in several], dtype=np.int64)
        row = np.repeat(np.arange(len(several)), sizes)
        column = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        ids = np.zeros((num_rows, sizes.max(initial=0)), dtype=np.int64)
        weights = np.zeros(ids.shape, dtype=np.float32)
        ids[row, column] = [i for of_image, _ in several for i in of_image]
        weights[row, column] = [w for of_image, given in several for w in given or [1.0] * len(of_image)]
        return cls(torch.from_numpy(ids), torch.from_numpy(weights))

    def dense(self, num_classes: int) -> Tensor:
        """float32 (n, num_classes): the weight of each class. Of a class that an image has twice, which a class map may cause, the
        larger."""
        rows = torch.zeros(len(self.ids), num_classes, device=self.ids.device)
        return rows.scatter_reduce_(1, self.ids, self.weights, "amax")


Labels = Tensor | SeveralLabels
"""int64 (n,) class ids where every image has one label."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch of n images. The last `n - num_examples` are padding: black images of class 0, masked by `valid`."""

    images: Tensor
    """uint8 (n, size, size, 3), RGB; the network normalises them to [-1, 1] on the device."""
    labels: Labels
    """int64 (n,) class ids, or `SeveralLabels` where an image may have several. Padding has class 0, or none."""
    valid: Tensor
    """bool (n,)."""
    first_slot: int
    """Position of the first example in the reading order (training), or its row in the split (evaluation)."""
    num_examples: int
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, text) of the bad examples of a training, in any order; the text names shard, row and reason. Their images are
    black, and `valid` masks them."""
    partner_labels: Labels | None = None
    """Labels, like `labels`, of the examples that MixUp or CutMix has mixed in; None where the recipe mixes none."""
    own_share: Tensor | None = None
    """float32 (n,), with `partner_labels`: share of `labels` in the target, 1 where an image was not mixed. The rest is of
    `partner_labels`."""

    @property
    def num_valid(self) -> int:
        """Number of examples that can be used: all but padding and bad ones."""
        return self.num_examples - len(self.bad)


@dataclass(frozen=True)
class Loading:
    """Which share of the batches this process loads, and with what resources. It never changes an example or a pixel."""

    rank: int = 0
    world_size: int = 1
    threads: int = 1
    """Threads that decode and augment."""
    decoded_cache_bytes: int = 0
    """Memory for decoded pixels."""
    shared_cache: DecodedCache | None = None
    """Cache to use instead of one of its own, where several iterators read the same corpus."""
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


ONE_PROCESS = Loading()


def _loads(*corpora: Store) -> LoadQueue:
    return LoadQueue(most_loads(any(corpus.reads_wait for corpus in corpora)))


def _prefetched(work: Iterator[Work[T]], threads: int, loads: LoadQueue, on_close: Callable[[], None]) -> Prefetcher[T]:
    return Prefetcher(work, threads=threads, depth=_PREFETCH, on_close=on_close, store_waited_s=lambda: loads.waited_s)


@dataclass(frozen=True)
class Source:
    """A corpus to train on, alone or in a mixture."""

    corpus: Store
    manifest: Manifest
    split: str
    weight: float = 1.0
    labels: MappedLabels | None = None
    """Its labels in the classes of the mixture; None for the labels of the corpus."""


def train_batches(
    corpus: Store,
    manifest: Manifest,
    split: str,
    config: InputConfig,
    *,
    seed: int,
    micro_batch_size: int,
    start_step: int = 0,
    num_steps: int | None = None,
    mask_bad: bool = False,
    loading: Loading = ONE_PROCESS,
) -> Prefetcher[list[Batch]]:
    """Iterates the micro-batches of this rank, step by step, from `start_step` up to `num_steps` (None: without end).

    All micro-batches of a training have one size, at most `micro_batch_size`, that leaves little padding; all ranks yield
    the same number of them in a step, and a rank may have only padding. Examples and pixels depend on the recipe only, not
    on `loading`, `micro_batch_size` or `start_step`. Raises ValueError if lanes, batch or ranks do not fit together.
    Iteration raises ShardError or ValueError naming the shard (and row) that cannot be read or decoded. With `mask_bad`, an
    example that cannot be decoded is masked instead, in its place, and listed in `Batch.bad`.
    """
    return source_batches(
        [Source(corpus, manifest, split)],
        config,
        seed=seed,
        micro_batch_size=micro_batch_size,
        start_step=start_step,
        num_steps=num_steps,
        mask_bad=mask_bad,
        loading=loading,
    )


def source_batches(
    sources: Sequence[Source],
    config: InputConfig,
    *,
    seed: int,
    micro_batch_size: int,
    start_step: int = 0,
    num_steps: int | None = None,
    mask_bad: bool = False,
    loading: Loading = ONE_PROCESS,
) -> Prefetcher[list[Batch]]:
    """Like `train_batches`, but from one corpus or several, by weight and with labels in the classes of the mixture.

    Every corpus has its exact share (`Mixture`) and follows its own order, epoch after epoch. Labels are class ids if all
    corpora are single-label. Raises ValueError naming the corpus that does not fit lanes and batch.
    """
    cache, shard_cache = loading.cache(), loading.shard_cache()
    readers = [SplitReader(s.corpus, s.manifest, s.split, cache, s.labels, shard_cache) for s in sources]
    schedule = order_of_training(
        sources, config, seed, rank=loading.rank, world_size=loading.world_size, most_examples=micro_batch_size
    )
    classes = sources[0].labels or sources[0].manifest
    assembly = _Assembly(config.augment, schedule.micro_batch_size, classes.single_label, mask_bad)
    return _train(
        list(zip(readers, schedule.orders, strict=True)),
        schedule.shares(start_step, num_steps),
        assembly,
        global_batch_size=config.global_batch_size,
        seed=seed,
        loading=loading,
    )


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


def eval_batches(
    corpus: Store,
    manifest: Manifest,
    split: str,
    augment: AugmentConfig,
    *,
    batch_size: int,
    loading: Loading = ONE_PROCESS,
    labels: MappedLabels | None = None,
) -> Prefetcher[Batch]:
    """Iterates this rank's part of a split in row order; over all ranks every example comes exactly once.

    With `labels`, the classes are those of a mixture, and rows are those that it keeps. Rank r has rows [N r // W,
    N (r + 1) // W). All ranks yield the same number of batches; padding is masked. The row of a valid example is `first_slot`
    plus its index in the batch. Raises like `train_batches`.
    """
    rank, world_size = loading.rank, loading.world_size
    if not 0 <= rank < world_size or batch_size < 1:
        raise ValueError(
            f"rank={rank} must be 0 to world_size - 1 = {world_size - 1}, and batch_size={batch_size} must be 1 or more."
        )
    reader = SplitReader(corpus, manifest, split, loading.cache(), labels, loading.shard_cache())
    of_split = labels or manifest
    assembly = _Assembly(augment, batch_size, of_split.single_label)
    loads = _loads(corpus)

    def close() -> None:
        loads.close()
        reader.close()

    work = _eval_work(reader, assembly, loads, rank, world_size)
    return _prefetched(work, loading.threads, loads, close)


def row_batches(
    corpus: Store,
    manifest: Manifest,
    split: str,
    augment: AugmentConfig,
    ranges: Sequence[range],
    *,
    batch_size: int,
    threads: int = 1,
) -> Prefetcher[Batch]:
    """Iterates the evaluation views of the given row ranges of a split, in order.

    A batch ends at the end of its range and is then smaller; nothing is padded. Raises like `train_batches`.
    """
    reader, loads = SplitReader(corpus, manifest, split, DecodedCache(0)), _loads(corpus)

    def close() -> None:
        loads.close()
        reader.close()

    def work() -> Iterator[Work[Batch]]:
        groups, view = reader.groups, partial(eval_pixels, config=augment)
        for rows in ranges:
            examples = _rows_in_order(reader, groups, loads, rows.start, rows.stop)
            for start in range(rows.start, rows.stop, batch_size):
                part = list(islice(examples, batch_size))
                assembly = _Assembly(augment, len(part), manifest.single_label)
                batch, places = assembly.batch(part, [view] * len(part), start)
                yield assembly.tasks(places), batch

    return _prefetched(work(), threads, loads, close)


def _train(
    sources: Sequence[tuple[SplitReader, Order]],
    shares: Iterator[Share],
    assembly: "_Assembly",
    *,
    global_batch_size: int,
    seed: int,
    loading: Loading,
) -> Prefetcher[list[Batch]]:
    loads = _loads(*(split.corpus for split, _ in sources))
    lanes = [LaneReader(split, order, loads, loading.read_ahead_bytes // len(sources)) for split, order in sources]

    def close() -> None:
        loads.close()
        for split, _ in sources:
            split.close()

    def work() -> Iterator[Work[list[Batch]]]:
        augment, size = assembly.augment, assembly.size
        for share in shares:
            draws = train_draws(seed, share.rows.epoch, share.rows.row, augment.randaugment_layers).tolist()
            views = [TrainingView(d, augment) for d in draws]
            examples = _gather(lanes, share)
            mixed_in = [examples[i] for i in partners(share.rows.lane).tolist()] if augment.mixes else None
            batches: list[Batch] = []
            places: list[_Place] = []
            first = share.step * global_batch_size
            for start in range(0, share.num_micro_batches * size, size):
                part = slice(start, start + size)
                first = int(share.slots[start]) if start < len(share.slots) else first
                batch, of_batch = assembly.batch(examples[part], views[part], first, mixed_in and mixed_in[part])
                batches.append(batch)
                places += of_batch
            if augment.mixes:
                yield assembly.mixing_tasks(places, share.rows.lane, draw_mix(seed, share.step, augment)), batches
            else:
                yield assembly.tasks(places), batches

    return _prefetched(work(), loading.threads, loads, close)


def _gather(lanes: Sequence[LaneReader], share: Share) -> list[Example]:
    if len(lanes) == 1:
        return lanes[0].gather(share.rows)
    found: dict[int, Example] = {}
    for i, reader in enumerate(lanes):
        at = np.flatnonzero(share.source == i)
        found |= zip(at.tolist(), reader.gather(share.rows.at(at)), strict=True)
    return [found[i] for i in range(len(found))]


def _eval_work(
    reader: SplitReader, assembly: "_Assembly", loads: LoadQueue, rank: int, world_size: int
) -> Iterator[Work[Batch]]:
    groups, size = reader.groups, assembly.size
    first, stop = (groups.num_rows * r // world_size for r in (rank, rank + 1))
    largest = -(-groups.num_rows // world_size)
    examples = _rows_in_order(reader, groups, loads, first, stop)
    view = partial(eval_pixels, config=assembly.augment)
    num_yielded = 0
    for start in range(first, first + largest, size):
        part = list(islice(examples, max(0, min(size, stop - start))))
        num_yielded += len(part)
        batch, places = assembly.batch(part, [view] * len(part), start)
        yield assembly.tasks(places), batch
    assert num_yielded == stop - first, f"rank {rank} yielded {num_yielded} of {stop - first} examples"


def _rows_in_order(
    reader: SplitReader, groups: RowGroups, loads: LoadQueue, first: int, stop: int
) -> Iterator[Example]:
    """The examples of rows [first, stop); the next row group loads while the current one is used."""
    cached = reader.cache.split(reader.cache_key)
    ahead: dict[int, Load[RowGroup]] = {}
    for row, group in zip(range(first, stop), groups.group_of(np.arange(first, stop)).tolist(), strict=True):
        if (hit := cached.get(row)) is not None:
            yield Example(reader, row, hit.label, pixels=hit.pixels)
            continue
        for wanted in range(group, min(group + 2, groups.num_groups)):
            if wanted not in ahead:
                ahead[wanted] = Load(partial(reader.load, wanted))
                loads.put(ahead[wanted], NOW)
        for used in [g for g in ahead if g < group]:
            del ahead[used]
        loaded, in_group = loads.wait_for(ahead[group]), row - int(groups.first_row(np.array(group)))
        yield Example(reader, row, loaded.labels[in_group], encoded=loaded.images[in_group].as_py())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the view of an example goes. `view(pixels, out=...)` makes it."""

    batch: Batch
    index: int
    example: Example
    view: Callable[..., None]


@dataclass(frozen=True)
class _Assembly:
    """Makes micro-batches of one size."""

    augment: AugmentConfig
    size: int
    single_label: bool
    mask_bad: bool = False
    """Whether an example that cannot be decoded is masked instead of raising."""

    def batch(
        self,
        examples: Sequence[Example],
        views: Sequence[Callable[..., None]],
        first_slot: int,
        mixed_in: Sequence[Example] | None = None,
    ) -> tuple[Batch, list[_Place]]:
        """The batch, whose images are still to be filled, and the place of each example. `mixed_in` are the partners of the examples."""
        side, num = self.augment.image_size_px, len(examples)
        images = torch.empty(self.size, side, side, 3, dtype=torch.uint8)
        images[num:] = 0
        batch = Batch(
            images,
            self._labels([e.split.mapped(e.label) for e in examples]),
            torch.arange(self.size) < num,
            first_slot,
            num,
            partner_labels=None if mixed_in is None else self._labels([e.split.mapped(e.label) for e in mixed_in]),
            own_share=None if mixed_in is None else torch.ones(self.size),
        )
        return batch, [_Place(batch, i, *each) for i, each in enumerate(zip(examples, views, strict=True))]

    def tasks(self, places: Sequence[_Place]) -> list[Callable[[], None]]:
        """The tasks that fill the images of the places."""
        chunks = range(0, len(places), _EXAMPLES_PER_TASK)
        return [partial(_fill, places[i : i + _EXAMPLES_PER_TASK], self.mask_bad) for i in chunks]

    def mixing_tasks(self, places: Sequence[_Place], lane: Ints, mix: Mix) -> list[Callable[[], None]]:
        """The tasks that fill the images and mix them. A task has whole lanes, so none waits for another."""
        by_lane = np.argsort(lane, kind="stable")
        lanes = np.split(by_lane, np.flatnonzero(np.diff(lane[by_lane])) + 1) if len(lane) else []
        tasks: list[Callable[[], None]] = []
        waiting: list[list[_Place]] = []
        for number, of_lane in enumerate(lanes, start=1):
            waiting.append([places[i] for i in of_lane.tolist()])
            if number == len(lanes) or sum(map(len, waiting)) >= _EXAMPLES_PER_TASK:
                tasks.append(partial(_fill_and_mix, waiting, mix, self.mask_bad))
                waiting = []
        return tasks

    def _labels(self, labels: Sequence[Label]) -> Labels:
        if not self.single_label:
            return SeveralLabels.of(labels, self.size)
        classes = torch.zeros(self.size, dtype=torch.int64)
        classes[: len(labels)] = torch.tensor(labels, dtype=torch.int64)
        return classes


def _fill(places: Sequence[_Place], mask_bad: bool) -> None:
    for place in places:
        batch, i = place.batch, place.index
        if _written_natively(place):
            continue
        try:
            pixels = place.example.decoded()
        except ValueError as error:
            if not mask_bad:
                raise
            batch.images[i] = 0
            batch.valid[i] = False
            batch.bad.append((i, f"{place.example.split.where(place.example.row)}: {error.__cause__}"))
        else:
            place.view(pixels, out=batch.images[i])


def _written_natively(place: _Place) -> bool:
    view, example = place.view, place.example
    if not isinstance(view, TrainingView) or example.encoded is None or not example.split.cache.is_full:
        return False
    return view.write_natively(example.encoded, example.split.policy, place.batch.images[place.index])


def _fill_and_mix(lanes: Sequence[Sequence[_Place]], mix: Mix, mask_bad: bool) -> None:
    for places in lanes:
        _fill(places, mask_bad)
        images, usable = [p.batch.images[p.index] for p in places], [bool(p.batch.valid[p.index]) for p in places]
        for place, mixed in zip(places, mix_lane(images, usable, mix), strict=True):
            if mixed and place.batch.own_share is not None:
                place.batch.own_share[place.index] = mix.share
