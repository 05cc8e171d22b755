"""Batches for training and evaluation: uint8 pixels and labels, decoded and augmented ahead of the consumer by threads or processes."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import Store
from vitline.vit.input.augment import eval_pixels
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.decoding.batch import Batch, BatchShape, blank_batch
from vitline.vit.input.decoding.fill import filling_tasks, place_examples
from vitline.vit.input.decoding.processes import decoded_in_processes
from vitline.vit.input.decoding.several_labels import Labels, MultiLabels
from vitline.vit.input.decoding.training import (
    ONE_PROCESS,
    PREFETCH,
    LoaderRequest,
    LoaderResources,
    Source,
    TrainLoader,
    loads_from,
    order_of_training,
)
from vitline.vit.input.load_queue import NOW, Load, LoadQueue
from vitline.vit.input.mapped_labels import MappedLabels
from vitline.vit.input.order import RowGroups
from vitline.vit.input.prefetch import Prefetcher, Work
from vitline.vit.input.read_shards import Example, RowGroup, SplitReader

__all__ = [
    "ONE_PROCESS",
    "Batch",
    "Labels",
    "LoaderResources",
    "MultiLabels",
    "Source",
    "eval_batches",
    "order_of_training",
    "row_batches",
    "source_batches",
]


def source_batches(
    sources: Sequence[Source],
    config: InputConfig,
    *,
    seed: int,
    micro_batch_size: int,
    start_step: int = 0,
    num_steps: int | None = None,
    mask_bad: bool = False,
    loading: LoaderResources = ONE_PROCESS,
) -> Prefetcher[list[Batch]]:
    """Iterates the micro-batches of this rank, step by step, from `start_step` up to `num_steps` (None: without end), from one corpus or
    several, by weight and with labels in the classes of the mixture.

    Every corpus has its exact share (`Mixture`) and follows its own order, epoch after epoch. Labels are class ids if all
    corpora are single-label. All micro-batches of a training have one size, at most `micro_batch_size`, that leaves little padding;
    all ranks yield the same number of them in a step, and a rank may have only padding. Examples and pixels depend on the recipe only,
    not on `loading`, `micro_batch_size` or `start_step`.

    Raises ValueError, naming the corpus, if lanes, batch or ranks do not fit together. Iteration raises ShardError or ValueError naming the
    shard (and row) that cannot be read or decoded. With `mask_bad`, an example that cannot be decoded is masked instead, in its place, and
    listed in `Batch.bad`.
    """
    asked = LoaderRequest(tuple(sources), config, seed, micro_batch_size, start_step, num_steps, mask_bad, loading)
    return decoded_in_processes(asked) if loading.processes else TrainLoader(asked).prefetched()


def eval_batches(
    corpus: Store,
    manifest: Manifest,
    split: str,
    augment: AugmentConfig,
    *,
    batch_size: int,
    loading: LoaderResources = ONE_PROCESS,
    labels: MappedLabels | None = None,
) -> Prefetcher[Batch]:
    """Iterates this rank's part of a split in row order; over all ranks every example comes exactly once.

    With `labels`, the classes are those of a mixture, and rows are those that it keeps. Rank r has rows [N r // W,
    N (r + 1) // W). All ranks yield the same number of batches; padding is masked. The row of a valid example is `first_slot`
    plus its index in the batch. Raises like `source_batches`.
    """
    rank, world_size = loading.rank, loading.world_size
    if not 0 <= rank < world_size or batch_size < 1:
        raise ValueError(
            f"rank={rank} must be 0 to world_size - 1 = {world_size - 1}, and batch_size={batch_size} must be 1 or more."
        )
    reader = SplitReader(corpus, manifest, split, loading.cache(), labels, loading.shard_cache())
    of_split = labels or manifest
    shape = BatchShape(batch_size, augment.image_size_px, of_split.single_label)
    loads = loads_from(corpus)

    def work() -> Iterator[Work[Batch]]:
        num_rows = reader.groups.num_rows
        first, stop = (num_rows * r // world_size for r in (rank, rank + 1))
        examples, num_yielded = _rows_in_order(reader, reader.groups, loads, first, stop), 0
        for start in range(first, first + -(-num_rows // world_size), batch_size):
            part = list(islice(examples, max(0, min(batch_size, stop - start))))
            num_yielded += len(part)
            yield _evaluation_work(part, shape, augment, start)
        assert num_yielded == stop - first, f"rank {rank} yielded {num_yielded} of {stop - first} examples"

    return _prefetched(work(), loading.threads, loads, reader)


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

    A batch ends at the end of its range and is then smaller; nothing is padded. Raises like `source_batches`.
    """
    reader, loads = SplitReader(corpus, manifest, split, DecodedCache(0)), loads_from(corpus)

    def work() -> Iterator[Work[Batch]]:
        for rows in ranges:
            examples = _rows_in_order(reader, reader.groups, loads, rows.start, rows.stop)
            for start in range(rows.start, rows.stop, batch_size):
                part = list(islice(examples, batch_size))
                shape = BatchShape(len(part), augment.image_size_px, manifest.single_label)
                yield _evaluation_work(part, shape, augment, start)

    return _prefetched(work(), threads, loads, reader)


def _evaluation_work(
    examples: Sequence[Example], shape: BatchShape, augment: AugmentConfig, first_row: int
) -> Work[Batch]:
    batches = [blank_batch(shape.new(), first_row, len(examples))]
    batches[0].pad()
    views = [partial(eval_pixels, config=augment)] * len(examples)
    places = place_examples(batches, np.arange(len(examples)), examples, views)
    return filling_tasks(places, mask_bad=False), batches[0]


def _prefetched(work: Iterator[Work[Batch]], threads: int, loads: LoadQueue, reader: SplitReader) -> Prefetcher[Batch]:
    def close() -> None:
        loads.close()
        reader.close()

    return Prefetcher(work, threads=threads, depth=PREFETCH, on_close=close, store_waited_s=lambda: loads.waited_s)


def _rows_in_order(
    reader: SplitReader, groups: RowGroups, loads: LoadQueue, first: int, stop: int
) -> Iterator[Example]:
    """The examples of rows [first, stop); the next row groups load while the current ones are used."""
    cached, each = reader.cache.split(reader.cache_key), reader.groups_per_load
    ahead: dict[int, Load[list[RowGroup]]] = {}
    of_rows = groups.group_of(np.arange(first, stop)).tolist()
    for row, group in zip(range(first, stop), of_rows, strict=True):
        if (hit := cached.get(row)) is not None:
            yield Example(reader, row, hit.label, pixels=hit.pixels)
            continue
        begin = group - (group - of_rows[0]) % each
        for wanted in range(begin, min(begin + 2 * each, of_rows[-1] + 1), each):
            if wanted not in ahead:
                neighbours = range(wanted, min(wanted + each, of_rows[-1] + 1))
                ahead[wanted] = Load(partial(reader.load_neighbours, neighbours))
                loads.put(ahead[wanted], NOW)
        for used in [g for g in ahead if g < begin]:
            del ahead[used]
        loaded, in_group = loads.wait_for(ahead[begin])[group - begin], row - int(groups.first_row(np.array(group)))
        yield Example(reader, row, loaded.labels[in_group], encoded=loaded.images[in_group].as_py())
