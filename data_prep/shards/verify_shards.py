"""Reads a corpus back and reports defects: file checksums, rows, page checksums, image hashes, labels, digests and, on request,
the pixels of every image."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pydantic import Field

from vitline.data_prep.config import PrepareExecution
from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.data_prep.executors import IN_PROCESS, Executor
from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.parquet_files import RowGroupFile, read_table
from vitline.data_prep.plan.corpus_stats import STATS_KEY, CorpusStats
from vitline.data_prep.records import WORK
from vitline.data_prep.shard_format import (
    CLASSES_KEY,
    LEAKAGE_KEY,
    REJECTS_KEY,
    REPORT_KEY,
    SHARDS_KEY,
    ListedShard,
    Manifest,
    ShardError,
    check_shard,
    load_manifest,
    open_shard,
    segment_keys,
    segment_store,
    shard_schema,
)
from vitline.data_prep.shards.content_digest import RowContent, content_digest, corpus_digest
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

_BLOCK_BYTES = 1 << 20
_TABLES = (REJECTS_KEY, SHARDS_KEY, LEAKAGE_KEY)
_MAX_IMAGES = 100  # per shard that are named individually


class ShardSpec(FrozenConfig):
    """Expected properties of a shard, whatever rows it holds."""

    corpus_name: str
    key: str
    num_rows: int
    rows_per_row_group: int
    num_classes: int
    single_label: bool
    has_weights: bool

    def arrow_schema(self) -> pa.Schema:
        return shard_schema(single_label=self.single_label, has_weights=self.has_weights)


@dataclass(frozen=True)
class ReadBack:
    """Checksum and label counts of a shard as read from the store."""

    sha256: str
    label_counts: dict[int, int]


class VerifyTask(FrozenConfig):
    """One shard to check against its row in shards.parquet."""

    corpus: str
    spec: ShardSpec
    sha256: str
    listed: ListedShard
    pixels: DecodePolicy | None = None
    """How to decode every image; None: compare bytes only."""
    limits: PrepareExecution = PrepareExecution()
    """Limits of the decoding process."""


class ShardCheck(FrozenConfig):
    """Result for one shard: `problem` is None if the shard is intact."""

    key: str
    problem: str | None
    label_counts: dict[int, int]
    images: dict[str, str] = Field(default_factory=dict)
    """Example id -> what is wrong with its pixels, for the first 100 of the shard."""


class VerifyReport(FrozenConfig):
    """Result for a corpus."""

    corpus: str
    num_shards: int
    num_rows: int
    """Rows of the corpus; the shards of a subset may hold more."""
    num_rows_read: int
    """Rows of its shards, all of which are checked."""
    label_counts: dict[int, int]
    """Labels of the rows that were read."""
    problems: dict[str, str]
    """URI -> what is wrong with it; for shards, shard list and class map."""
    images: dict[str, dict[str, str]]
    """URI of a shard -> example id -> what is wrong with its pixels, up to 100 per shard. Empty unless pixels were checked."""
    auxiliary: dict[str, str]
    """URI -> what is wrong with it; for the auxiliary files: refused examples, leakage, statistics, report."""


def verify_corpus(corpus: Store, executor: Executor = IN_PROCESS, *, pixels: bool = False) -> VerifyReport:
    """Check every file of a corpus. Raises RuntimeError if there is no corpus.

    Detects and names a flipped byte; a missing, extra, swapped or truncated shard; and a shard list or class map that contradicts
    the digest in the manifest. With `pixels`, every image is decoded again, which takes as long as examining it did; images that
    are refused, or whose pixels differ from the stored hash, are named.
    """
    manifest = load_manifest(corpus)
    problems: dict[str, str] = {}
    if not _class_map_is_right(corpus, manifest):
        problems[corpus.uri_of(CLASSES_KEY)] = "does not match the class map digest in the manifest"
    try:
        table = read_table(corpus, SHARDS_KEY).select(["key", "num_bytes", "sha256", "content_digest"])
        listed = {line["key"]: line for line in table.to_pylist()}
    except (OSError, pa.ArrowException, KeyError):
        listed = {}  # reported below, because no digest matches
    specs = shard_specs(corpus, manifest)
    digests = {key: line["content_digest"] for key, line in listed.items()}
    whole = digests.keys() >= specs.keys()
    if not whole or corpus_digest(manifest.class_map_digest, manifest.splits, digests) != manifest.digest:
        problems[corpus.uri_of(SHARDS_KEY)] = "does not match the corpus digest in the manifest"
    for key in corpus.list():
        if not key.startswith(f"{WORK}/") and key.endswith(".parquet") and key not in specs and key not in _TABLES:
            problems[corpus.uri_of(key)] = "is not listed in the manifest: an extra shard"
    limits = PrepareExecution.model_validate(manifest.provenance.get("request", {}).get("execution", {}))
    tasks = [
        VerifyTask(
            corpus=store.uri,
            spec=spec,
            sha256=listed[key]["sha256"],
            listed=ListedShard(manifest.name, key, digests[key], listed[key]["num_bytes"]),
            pixels=manifest.decode_policy if pixels else None,
            limits=limits,
        )
        for key, (store, spec) in specs.items()
        if key in listed
    ]
    label_counts: Counter[int] = Counter()
    images = {}
    for check in executor.run(verify_shard, tasks):
        label_counts.update(check.label_counts)
        uri = specs[check.key][0].uri_of(check.key)
        if check.problem:
            problems[uri] = check.problem
        if check.images:
            images[uri] = check.images
    return VerifyReport(
        corpus=corpus.uri,
        num_shards=len(specs),
        num_rows=_num_rows(manifest),
        num_rows_read=sum(spec.num_rows for _, spec in specs.values()),
        label_counts=dict(sorted(label_counts.items())),
        problems=dict(sorted(problems.items())),
        images=dict(sorted(images.items())),
        auxiliary=dict(sorted(_wrong_auxiliary(corpus, manifest).items())),
    )


def _num_rows(manifest: Manifest) -> int:
    """Rows of all splits; rows that several splits share count once."""
    rows: Counter[tuple[str, str]] = Counter()
    for split in manifest.splits.values():
        for segment in split.segments:
            place = segment.split, segment.name
            rows[place] = max(rows[place], segment.num_rows)
    return rows.total()


def _wrong_auxiliary(corpus: Store, manifest: Manifest) -> dict[str, str]:
    """Auxiliary files that cannot be read, with the reason; a subset has none and relies on those of its parent."""
    if manifest.view_of is not None:
        return {}
    readers: dict[str, Callable[[], object]] = {
        REJECTS_KEY: lambda: read_table(corpus, REJECTS_KEY),
        LEAKAGE_KEY: lambda: read_table(corpus, LEAKAGE_KEY),
        STATS_KEY: lambda: CorpusStats.from_json(corpus.read_json(STATS_KEY)),
        REPORT_KEY: lambda: _check_report(corpus.read(REPORT_KEY)),
    }
    wrong = {}
    for key, read in readers.items():
        try:
            read()
        except FileNotFoundError:
            wrong[corpus.uri_of(key)] = "is missing"
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            wrong[corpus.uri_of(key)] = f"cannot be read: {' '.join(str(error).split())}"
    return wrong


def _check_report(page: bytes) -> None:
    if not page.rstrip().endswith(b"</html>"):
        raise ValueError("the HTML document is not complete")


def _class_map_is_right(corpus: Store, manifest: Manifest) -> bool:
    try:
        classes = ClassMap.from_file(corpus.read_json(CLASSES_KEY))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return classes.digest == manifest.class_map_digest


def shard_specs(corpus: Store, manifest: Manifest) -> dict[str, tuple[Store, ShardSpec]]:
    """Store and spec of every shard of a corpus, by key; a shard that several splits list appears once."""
    specs = {}
    for split in manifest.splits.values():
        for segment in split.segments:
            for i, key in enumerate(segment_keys(segment)[: split.shards_in_use(segment)]):
                spec = ShardSpec(
                    corpus_name=manifest.name,
                    key=key,
                    num_rows=split.shard_rows(segment, i),
                    rows_per_row_group=split.rows_per_row_group,
                    num_classes=manifest.num_classes,
                    single_label=manifest.single_label,
                    has_weights=manifest.has_weights,
                )
                specs[key] = segment_store(corpus, segment), spec
    return specs


def verify_shard(task: VerifyTask) -> ShardCheck:
    """Check one shard against the shard list; a bad shard is a result, not an exception."""
    corpus, key = open_store(task.corpus), task.spec.key
    try:
        found = read_back(corpus, task.spec, task.listed)
    except ShardError as error:
        return ShardCheck(key=key, problem=error.found, label_counts={})
    if found.sha256 != task.sha256:
        problem = f"has sha256 {found.sha256[:12]}, but the shard list says {task.sha256[:12]}: a byte was changed"
        return ShardCheck(key=key, problem=problem, label_counts={})
    num_wrong, images = 0, dict[str, str]()
    for example_id, wrong in _wrong_images(corpus, task) if task.pixels else ():
        num_wrong += 1
        if len(images) < _MAX_IMAGES:
            images[example_id] = wrong
    corrupt = f"holds {num_wrong:,} corrupt images among {task.spec.num_rows:,}" if num_wrong else None
    return ShardCheck(key=key, problem=corrupt, label_counts=found.label_counts, images=images)


def _wrong_images(corpus: Store, task: VerifyTask) -> Iterator[tuple[str, str]]:
    """Example id and defect of every image of a shard whose pixels differ from the examined ones."""
    assert task.pixels
    timeout_s, memory_bytes = task.limits.image_timeout_s, task.limits.decode_memory_bytes
    with SandboxedDecoder(task.pixels, timeout_s=timeout_s, memory_bytes=memory_bytes) as decoder:
        for (example_id, expected), outcome in decoder.run(_images(corpus, task.listed)):
            if isinstance(outcome, ImageRejected):
                yield example_id, f"cannot be decoded: {outcome}"
            elif outcome["pixel_sha256"] != expected:
                yield example_id, "decodes to pixels that do not match its pixel_sha256"


def _images(corpus: Store, listed: ListedShard) -> Iterator[tuple[tuple[str, bytes], bytes]]:
    with open_shard(corpus, listed) as file:
        for group in range(file.metadata.num_row_groups):
            table = file.row_group(group, ["image", "example_id", "pixel_sha256"])
            for row in table.to_pylist():
                yield (row["example_id"], row["pixel_sha256"]), row["image"]["bytes"]


def read_back(corpus: Store, spec: ShardSpec, listed: ListedShard) -> ReadBack:
    """Read a whole shard. Raises ShardError if its bytes, rows, schema, images or labels are inconsistent, if it holds other
    rows than are listed, or if it states to be another shard."""
    uri, label_counts = corpus.uri_of(spec.key), Counter[int]()

    def check(file: RowGroupFile) -> None:
        check_shard(file, uri, spec.arrow_schema(), spec.rows_per_row_group, spec.num_rows)
        if content_digest(_checked_rows(file, uri, spec, label_counts)) != listed.content_digest:
            raise ShardError(uri, "holds examples that differ from the shard list: it was swapped or rewritten")

    try:
        open_shard(corpus, listed, check).close()
    except (OSError, pa.ArrowException) as error:
        raise ShardError(uri, f"has a damaged page ({' '.join(str(error).split())})") from error
    return ReadBack(file_sha256(corpus, spec.key), dict(sorted(label_counts.items())))


def _checked_rows(file: RowGroupFile, uri: str, spec: ShardSpec, label_counts: Counter[int]) -> Iterator[RowContent]:
    num_groups = file.metadata.num_row_groups
    columns = ["image", "example_id", "sha256", "labels", *(["weights"] if spec.has_weights else [])]
    for group in range(num_groups):
        table = file.row_group(group, columns)
        if group < num_groups - 1 and table.num_rows != spec.rows_per_row_group:
            found = f"holds {table.num_rows} rows in row group {group}, expected {spec.rows_per_row_group}"
            raise ShardError(uri, found)
        for row in table.to_pylist():
            example_id, labels = row["example_id"], row["labels"]
            if hashlib.sha256(row["image"]["bytes"]).digest() != row["sha256"]:
                raise ShardError(uri, f"holds image bytes for {example_id} that do not match its sha256")
            if not labels or not all(0 <= label < spec.num_classes for label in labels):
                raise ShardError(uri, f"labels {example_id} with {labels}, but there are {spec.num_classes} classes")
            label_counts.update(labels)
            yield example_id, row["sha256"], labels, row.get("weights")


def file_sha256(corpus: Store, key: str) -> str:
    """sha256 of an object in the store, read in blocks."""
    digest = hashlib.sha256()
    with corpus.open(key) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
