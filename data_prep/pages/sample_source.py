"""Lists a source and examines a sample of its examples within a budget: the input of a dry run."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examine.examine import Record, examine_examples
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.data_prep.pages.expected_rows import counts
from vitline.data_prep.plan.listed_ids import check_repeats, keys_of, known_keys, repeats
from vitline.data_prep.shard_format import KnownShard
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, WorkFolder, kept_lists
from vitline.data_prep.sources.splits import order_key

_NUM_PARTS = 32
_IDS_IN_MEMORY = 4_000_000
_REFUSED_PER_READABLE = 8  # limit for parts that begin with files that are not images


@dataclass(frozen=True)
class Budget:
    """Limits of a sample; the first one that is reached ends it."""

    num_images: int = 256
    num_bytes: int = 256 << 20
    seconds: float = 60.0


BUDGET = Budget()
"""What is acceptable to wait for at a terminal."""


@dataclass
class ListedSource:
    """Totals over the parts of a source, and some evenly spread parts."""

    num_parts: int = 0
    num_bytes: int = 0
    num_known: int = 0
    """Examples of the parts that report their number."""
    num_unknown: int = 0
    """Number of parts that do not report it."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Bytes of those of them that are sampled, by name."""
    unknown_bytes: int = 0
    """Bytes of all of them."""
    chosen: list[SourcePart] = field(default_factory=list)
    listed: bool = False
    """Whether the source lists every example without reading images; the counts below are of these lists."""
    labels: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    num_merged: int = 0
    """Examples that equal another one in every field."""
    ids_looked_at: int | None = None
    """Number of examples whose ids were checked for repeats. None: all, or the source does not list ids."""


def list_parts(
    source: ImageSource,
    work: WorkFolder,
    config: CorpusConfig,
    known: Sequence[KnownShard] = (),
    budget: Budget = BUDGET,
) -> ListedSource:
    """List a source. Raises ValueError if it is empty, or if ids repeat or are in the shards `known`, as far as that is found
    within the seconds of the budget."""
    found, stride, ids = ListedSource(), 1, _Ids(source, work, config, known, budget.seconds)
    for number, part in enumerate(source.parts(work)):
        ids.add(number, part)
        found.num_parts, found.num_bytes = number + 1, found.num_bytes + part.num_bytes
        found.num_known += part.num_examples
        found.num_unknown += not part.num_examples
        found.unknown_bytes += 0 if part.num_examples else part.num_bytes
        if number % stride == 0:
            found.chosen.append(part)
            if len(found.chosen) == 2 * _NUM_PARTS:  # keep between _NUM_PARTS and twice as many, evenly spread
                found.chosen, stride = found.chosen[::2], 2 * stride
    if not found.num_parts:
        raise ValueError(
            f"{config.name}: {source.origin} holds no examples. "
            "A source must hold labelled images; a table, rows below its header."
        )
    ids.check(found)
    step = -(-len(found.chosen) // _NUM_PARTS)
    found.chosen = found.chosen[::step]
    found.unknown = {part.name: part.num_bytes for part in found.chosen if not part.num_examples}
    for rows in kept_lists(work):
        found.listed = True
        found.refused.update(counts(rows["reason"].drop_null()))
        readable = rows.filter(pc.is_null(rows["reason"]))
        found.labels.update(counts(pc.list_flatten(readable["labels"])))
    return found


class _Ids:
    """Looks for repeated ids among listed examples, within the memory and time limits of a dry run."""

    def __init__(
        self, source: ImageSource, work: WorkFolder, config: CorpusConfig, known: Sequence[KnownShard], seconds: float
    ) -> None:
        self._skip_known = config.recipe.known_ids == "skip"
        self._source, self._work, self._left_s = source, work, seconds
        self._parts, self._num_rows, self._whole = dict[int, SourcePart](), 0, True
        self._keys = [*known_keys(known)] if source.lists_ids else []

    def add(self, number: int, part: SourcePart) -> None:
        if not self._source.lists_ids or not self._whole:
            return
        start = time.monotonic()
        self._keys.append(keys_of(self._source.listed(part, self._work), number))
        self._parts[number] = part
        self._num_rows += len(self._keys[-1])
        self._left_s -= time.monotonic() - start
        self._whole = self._left_s > 0 and self._num_rows < _IDS_IN_MEMORY

    def check(self, found: ListedSource) -> None:
        if self._parts:
            repeated = repeats(pa.concat_tables(self._keys), skip_known=self._skip_known)
            check_repeats(self._source, [repeated], self._parts.__getitem__, self._work)
            found.num_merged = len(repeated.merged)
            found.ids_looked_at = None if len(self._parts) == found.num_parts else self._num_rows


@dataclass
class Sample:
    """Records of some examples, and the time it took to examine them."""

    rows: list[Record] = field(default_factory=list)
    num_readable: int = 0
    refused_unread: Counter[str] = field(default_factory=Counter)
    """Examples that the source refused without reading them, by reason."""
    num_with_data: int = 0
    """Examples whose bytes came with the listing, such as from an archive."""
    seconds: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    """Number of examples of the parts that were read to their end."""
    late: list[str] = field(default_factory=list)
    """Parts that returned nothing in time."""
    of_unknown: list[Record] = field(default_factory=list)
    """Records of parts that do not report their number of examples."""


class _Taking(threading.Thread):
    """Takes the first examples of a part, or some of a list. It runs in a thread of its own, because a source that must read a
    compressed archive to its end cannot be stopped, but can be abandoned."""

    def __init__(
        self, source: ImageSource, part: SourcePart, work: WorkFolder, step: int, limit: int, max_bytes: int
    ) -> None:
        super().__init__(name=f"sample of {part.name}", daemon=True)
        self._source, self._part, self._work = source, part, work
        self._step, self._limit, self._max_bytes = step, limit, max_bytes
        self.examples: list[RawExample] = []
        self.count: int | None = None
        self.error: Exception | None = None
        self.began = self.ended = time.monotonic()

    def run(self) -> None:
        try:
            self._take()
        except Exception as error:
            self.error = error

    def _take(self) -> None:
        count = num_readable = num_bytes = 0
        for example in self._source.examples(self._part, self._work):
            count += 1
            if (count - 1) % self._step:
                continue
            if not self.examples:
                self.began = time.monotonic()  # opening the part does not count for the speed
            self.examples.append(example)
            num_readable += example.refused is None
            num_bytes += len(example.data or b"") or example.length or example.num_bytes
            self.ended = time.monotonic()
            full = num_readable == self._limit or len(self.examples) == _REFUSED_PER_READABLE * self._limit
            if full or num_bytes >= self._max_bytes:
                return
        self.count = count


def take_sample(
    source: ImageSource, work: WorkFolder, listed: ListedSource, config: CorpusConfig, budget: Budget
) -> Sample:
    """Examine examples of the chosen parts within the budget. Raises what the source raises."""
    _start_decoder(config)
    sample, deadline = Sample(), time.monotonic() + budget.seconds
    per_part, num_bytes = -(-budget.num_images // len(listed.chosen)), 0
    for i, part in enumerate(listed.chosen, start=1):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or num_bytes >= budget.num_bytes:
            break
        step = max(1, part.num_examples // per_part) if listed.listed else 1
        taking = _Taking(source, part, work, step, per_part, budget.num_bytes - num_bytes)
        taking.start()
        taking.join(left_s if i == len(listed.chosen) else left_s / 2)  # leave time for the other parts
        if taking.error:
            raise taking.error
        examples = [_kept(example, work) for example in taking.examples[:]]
        if taking.is_alive() and not examples:
            sample.late.append(part.name)
        if taking.count is not None:
            sample.counted[part.name] = taking.count
        num_bytes += sum(len(example.data or b"") or example.length or example.num_bytes for example in examples)
        sample.num_with_data += sum(example.data is not None for example in examples)
        sample.num_readable += sum(example.refused is None for example in examples)
        sample.refused_unread.update(example.refused[0] for example in examples if example.refused)
        start = time.monotonic()
        rows: list[Record] = []
        examine_examples(iter(examples), config, rows.append)
        sample.seconds += time.monotonic() - start + taking.ended - taking.began
        sample.rows += rows
        if part.name in listed.unknown:
            sample.of_unknown += rows
    return sample


def _start_decoder(config: CorpusConfig) -> None:
    """Start the decoding process beforehand, so that its start does not count for the speed; it is kept for the sample."""
    execution = config.execution
    with SandboxedDecoder(
        config.recipe.decode, timeout_s=execution.image_timeout_s, memory_bytes=execution.decode_memory_bytes
    ) as decoder:
        list(decoder.run([(None, b"")]))


def _kept(example: RawExample, work: WorkFolder) -> RawExample:
    """The example with a stable location: spilled bytes are not kept for a part that is not read to its end, so they are
    written to a file of their own."""
    if example.data is None or example.refused or example.base != work.store.uri:
        return example
    key = f"sample/{order_key(0, example.example_id):016x}"
    work.store.write(key, example.data)
    return replace(example, key=key, offset=0, length=len(example.data))
