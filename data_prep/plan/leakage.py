"""Leakage: finds evaluation images among training images by perceptual hash, and confirms them on thumbnails.

The hashes of all evaluation images form one small table that every task reads, so the work is linear in the size of the corpus.
A corpus with a test split is an evaluation set with its test and val splits. A corpus without one is an evaluation set with its
val split if the source names that split; a val split drawn from train is not compared with other corpora.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.executors import Executor
from vitline.data_prep.find_corpus import Corpora, FoundCorpus, prepared_corpus
from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.plan.confirm import PairFile, Same, confirm, located_pairs, same_images, save_pairs
from vitline.data_prep.plan.corpus_stats import CorpusStats, SampleRule, merged
from vitline.data_prep.plan.locate_images import PLACE_SCHEMA, ImageReader, listed_as_cell
from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA, drops_table
from vitline.data_prep.plan.similarity.near_duplicates import HashIndex, as_words
from vitline.data_prep.progress import StageProgress
from vitline.data_prep.records import PLAN, REQUEST_KEY
from vitline.data_prep.shard_format import KnownShard, Manifest, known_shards, open_shard
from vitline.data_prep.sources.splits import hashed_split, unit_key
from vitline.infra.config import FrozenConfig
from vitline.infra.records import UnreadableRecord
from vitline.infra.storage import Store, open_store

INDEX_KEY, DECONTAMINATE_KEY = f"{PLAN}/evaluation.parquet", f"{PLAN}/decontaminate.parquet"
EVALUATION_SPLITS = ("test", "val")
NEAREST = 16
"""Largest number of evaluation images that a training image is compared with: those with the nearest hashes."""
MAX_PAIRS = 1 << 16
"""Largest number of pairs compared per file of planned rows (about 100,000 rows): those with the nearest hashes."""
_PAIR_ORDER = ("other_base", "other_key", "other_row", "other_offset", "image")
_ROWS_LOOKED_AT = 256
EVALUATION_SCHEMA = pa.schema(
    [
        pa.field("corpus", pa.string()),  # NAME/VERSION
        pa.field("split", pa.string()),
        pa.field("example_id", pa.string()),
        pa.field("phash", pa.binary()),
        *PLACE_SCHEMA,
    ]
)
_SPLIT_COLUMNS = ["group", "pixel_sha256"]
_ROW_COLUMNS = ["example_id", "labels", "split", "order_key", "phash", "phash_mirror", *LOCATOR_SCHEMA.names]
LEAKAGE_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("corpus", pa.string(), nullable=False),  # NAME/VERSION of the evaluation set
        pa.field("split", pa.string(), nullable=False),
        pa.field("evaluation_id", pa.string(), nullable=False),
    ]
)
"""leakage.parquet: training images that show an image of an evaluation set, and which one."""


@dataclass(frozen=True)
class PlannedCorpus:
    """A corpus with planned rows that are not written to shards yet."""

    store: Store
    name: str
    version: str
    num_classes: int
    rows_keys: dict[str, list[str]]
    """Files of its planned rows, by split."""
    is_benchmark: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}/{self.version}"


class LeakTask(FrozenConfig):
    """A planned file of training rows, to be compared with the evaluation images that the corpus has listed."""

    corpus: str
    rows_key: str
    found_key: str
    num_classes: int
    older: tuple[str, ...] = ()
    """NAME/VERSION of evaluation sets that were skipped because a newer version is compared."""
    same: tuple[Same, ...] = ()
    """For `look_for_leaks`: the pairs that look the same."""

    @property
    def pairs_key(self) -> str:
        return self.rows_key.replace(f"{PLAN}/rows/", f"{PLAN}/leak-pairs/").replace(".parquet", ".bin")


class LeaksFound(FrozenConfig):
    """Statistics of the leaks of one file of training rows; the leaks are listed in the corpus."""

    corpus: str
    stats: dict[str, Any]


class Leaks(NamedTuple):
    """The leaks of one corpus."""

    stats: CorpusStats | None
    """None if the corpus was compared with nothing."""
    num_left: int
    """Pairs with near hashes that exceeded the limit and were not compared."""


def find_leaks(planned: Sequence[PlannedCorpus], root: Store, executor: Executor, show: StageProgress) -> list[Leaks]:
    """For every corpus, find the training images that show an evaluation image of another corpus, prepared below the root (its
    newest version) or planned here. A benchmark is not compared with anything."""
    tasks, known = list[LeakTask](), prepared_sets(root)
    for each in planned:
        if each.is_benchmark:
            continue  # not for pre-training, and its splits are as published
        index, older = _evaluation_rows(each, planned, known)
        if len(index):
            write_table(each.store, INDEX_KEY, index)
            for i, key in enumerate(each.rows_keys.get("train", [])):
                found_key = f"{PLAN}/leaks/{i:05d}.parquet"
                task = LeakTask(
                    corpus=each.store.uri,
                    rows_key=key,
                    found_key=found_key,
                    num_classes=each.num_classes,
                    older=older,
                )
                tasks.append(task)
    small = all(len(each.rows_keys.get("train", [])) <= 1 for each in planned)
    num_files = Counter(task.corpus for task in tasks)
    for corpus, number in num_files.items():
        show.begin(corpus, number, "files searched")
    listed = list[PairFile]()
    for pairs in executor.run(list_pairs, tasks, few=small, heavy=True):
        listed.append(pairs)
        show.add(pairs.corpus, 1)
    same = confirm(listed, executor, show)
    tasks = [task.model_copy(update={"same": tuple(same[task.corpus, task.pairs_key])}) for task in tasks]
    totals: dict[str, CorpusStats] = {}
    for found in executor.run(look_for_leaks, tasks, few=small, heavy=True):
        own = CorpusStats.from_json(found.stats)
        totals[found.corpus] = merged(totals[found.corpus], own) if found.corpus in totals else own
    left = Counter[str]()
    for pairs in listed:
        left[pairs.corpus] += pairs.num_left
    return [Leaks(totals.get(each.store.uri), left[each.store.uri]) for each in planned]


def list_pairs(task: LeakTask) -> PairFile:
    """Find the evaluation images whose hashes are near those of one file of training rows."""
    corpus = open_store(task.corpus)
    rows = read_table(corpus, task.rows_key, ["phash", "phash_mirror", *LOCATOR_SCHEMA.names])
    return save_pairs(corpus, task.pairs_key, *candidates(rows, read_table(corpus, INDEX_KEY), MAX_PAIRS))


def candidates(rows: pa.Table, index: pa.Table, max_pairs: int | None = None) -> tuple[pa.Table, int]:
    """The pairs to compare, as PAIRS_SCHEMA, and the number of pairs beyond `max_pairs`, which are left out."""
    found = _nearest_hashes(rows, index)
    kept = sorted(found, key=lambda pair: (pair[2], pair[:2]))[:max_pairs]
    image, other = (np.array([pair[i] for pair in kept], np.int64) for i in range(2))
    pairs = located_pairs(rows, image, index, other)
    return pairs.sort_by([(name, "ascending") for name in _PAIR_ORDER]), len(found) - len(kept)


def _nearest_hashes(rows: pa.Table, index: pa.Table) -> list[tuple[int, int, int]]:
    """(row, evaluation image, distance) of near hashes, at most the NEAREST nearest ones per row."""
    if not len(rows) or not len(index):
        return []
    table = HashIndex.of(index["phash"])
    nearest: dict[tuple[int, int], int] = {}
    for column in ("phash", "phash_mirror"):
        for i, j, distance in zip(*(a.tolist() for a in table.search(as_words(rows[column].to_pylist()))), strict=True):
            nearest[i, j] = min(distance, nearest.get((i, j), distance))
    kept, seen = [], Counter[int]()
    for (i, j), distance in sorted(nearest.items(), key=lambda found: (found[0][0], found[1], found[0][1])):
        seen[i] += 1
        if seen[i] <= NEAREST:
            kept.append((i, j, distance))
    return kept


def leak_lists(corpus: Store) -> Iterator[pa.Table]:
    """The leaks of a corpus, as LEAKAGE_SCHEMA, file by file."""
    for listed in corpus.scan(f"{PLAN}/leaks/"):
        yield read_table(corpus, listed.key)


_Prepared = tuple[Store, Manifest, tuple[str, ...]]


def prepared_sets(root: Store, known: Iterable[FoundCorpus] = ()) -> dict[str, list[_Prepared]]:
    """The evaluation sets below the root with their evaluation splits, by name, from old to new; subsets are skipped. `known`
    corpora are not read again. Raises UnreadableRecord: without a set that cannot be read, its leaks would be missing from the list."""
    found: dict[str, list[_Prepared]] = {}

    def refuse(odd: UnreadableRecord) -> None:
        raise odd

    for store, manifest in Corpora(root, known).all(refuse):
        if manifest.view_of is None and (splits := evaluation_splits(store, manifest)):
            found.setdefault(manifest.name, []).append((store, manifest, splits))
    return found


def _evaluation_rows(
    own: PlannedCorpus, planned: Sequence[PlannedCorpus], known: Mapping[str, Sequence[_Prepared]]
) -> tuple[pa.Table, tuple[str, ...]]:
    """The evaluation images of all other corpora (and not of other versions of this one), as EVALUATION_SCHEMA; and the
    evaluation sets, NAME/VERSION, that are skipped because of a newer version."""
    planned_by_name = {each.name: each for each in planned}
    tables, older = [EVALUATION_SCHEMA.empty_table()], list[str]()
    for name in sorted((known.keys() | planned_by_name.keys()) - {own.name}):
        versions = [*known.get(name, ())]
        if name in planned_by_name and (splits := _planned_splits(planned_by_name[name])):
            tables += _planned_evaluation(planned_by_name[name], splits)
        elif versions:
            tables += published_rows(*versions.pop())
        older += [f"{name}/{manifest.version}" for _, manifest, _ in versions]
    return pa.concat_tables(tables), tuple(older)


def evaluation_splits(corpus: Store, manifest: Manifest) -> tuple[str, ...]:
    """The evaluation splits of a finished corpus; none if it is not an evaluation set."""
    own = [name for name in EVALUATION_SPLITS if name in manifest.splits]
    if own == ["val"]:
        first = known_shards(corpus, manifest, "val")[0]
        with open_shard(open_store(first.home), first.listed) as file:
            rows = file.row_group(0, _SPLIT_COLUMNS).slice(0, _ROWS_LOOKED_AT)
        return () if _is_made_here(rows, manifest.provenance.get("request", {})) else ("val",)
    return tuple(own)


def _planned_splits(corpus: PlannedCorpus) -> tuple[str, ...]:
    """As `evaluation_splits`, for a planned corpus."""
    own = [name for name in EVALUATION_SPLITS if corpus.rows_keys.get(name)]
    if own == ["val"]:
        rows = read_table(corpus.store, corpus.rows_keys["val"][0], _SPLIT_COLUMNS).slice(0, _ROWS_LOOKED_AT)
        return () if _is_made_here(rows, corpus.store.read_json(REQUEST_KEY)) else ("val",)
    return tuple(own)


def _is_made_here(rows: pa.Table | pa.RecordBatch, request: Mapping[str, Any]) -> bool:
    """Whether the rows of a val split were put there by the recipe (or by the icons source for pre-training) rather than by the
    source. A drawn split is recognised by drawing it again."""
    recipe = request.get("recipe", {})
    if recipe.get("val_per_class") or request.get("source", {}).get("role") == "pretrain":
        return True
    fractions = recipe.get("val_fraction", 0.0), recipe.get("test_fraction", 0.0)
    units = zip(*(rows[name].to_pylist() for name in _SPLIT_COLUMNS), strict=True)
    return all(hashed_split(unit_key(*unit), *fractions) == "val" for unit in units)


def _planned_evaluation(corpus: PlannedCorpus, splits: Collection[str]) -> Iterator[pa.Table]:
    for split in splits:
        for key in corpus.rows_keys[split]:
            rows = read_table(corpus.store, key, ["split", "example_id", "phash", *LOCATOR_SCHEMA.names])
            rows = rows.append_column("corpus", pa.repeat(corpus.title, len(rows)))
            for field in (PLACE_SCHEMA.field(name) for name in ("row", "shard")):
                rows = rows.append_column(field, pa.nulls(len(rows), field.type))
            yield rows.select(EVALUATION_SCHEMA.names).cast(EVALUATION_SCHEMA)


def published_rows(corpus: Store, manifest: Manifest, splits: Collection[str]) -> Iterator[pa.Table]:
    """The images of some splits of a finished corpus, as EVALUATION_SCHEMA. Raises ShardError for a bad shard."""
    for split in splits:
        for shard in known_shards(corpus, manifest, split):
            rows = rows_of_shard(shard, ["example_id", "phash"])
            title = pa.repeat(f"{manifest.name}/{manifest.version}", len(rows))
            rows = rows.append_column("corpus", title).append_column("split", pa.repeat(split, len(rows)))
            yield rows.select(EVALUATION_SCHEMA.names).cast(EVALUATION_SCHEMA)


def rows_of_shard(shard: KnownShard, names: Sequence[str]) -> pa.Table:
    """Some columns of a shard and where the images are, as PLACE_SCHEMA. Raises ShardError for a bad shard."""
    with open_shard(open_store(shard.home), shard.listed) as file:
        rows = file.read(names).slice(0, shard.num_rows)
    num = len(rows)
    columns = {
        **{name: rows[name] for name in names},
        "base": pa.repeat(shard.home, num),
        "key": pa.repeat(shard.listed.key, num),
        "offset": pa.nulls(num, pa.int64()),
        "length": pa.nulls(num, pa.int64()),
        "row": pa.array(range(num), pa.int64()),
        "shard": pa.repeat(pa.scalar(listed_as_cell(shard.listed), PLACE_SCHEMA.field("shard").type), num),
    }
    return pa.table(columns)


def own_splits_text(manifest: Manifest) -> str:
    """A sentence on whether the splits of a corpus were compared with each other; empty if it has only one split."""
    if len([name for name, split in manifest.splits.items() if any(s.split == name for s in split.segments)]) < 2:
        return ""
    request = manifest.provenance.get("request", {})
    if request.get("recipe", {}).get("near_duplicates", "keep") == "keep":
        return (
            "The splits of this corpus were not compared with each other, so near duplicates across splits (scaled, "
            "recompressed or mirrored images) are possible. Prepare with recipe.near_duplicates=drop to remove them."
        )
    which = (
        "that were added were compared with each other, but not with the earlier ones" if request.get("add_to") else ""
    )
    left = manifest.provenance.get("near_pairs_not_compared", 0)
    return (
        f"The images in the splits of this corpus {which or 'were compared with each other'} (recipe.near_duplicates=drop)"
        f"{f'; {left:,} pairs exceeded the limit and were not compared' if left else ''}."
    )


def look_for_leaks(task: LeakTask) -> LeaksFound:
    """List and count the leaks of one file of planned training rows."""
    corpus = open_store(task.corpus)
    index = read_table(corpus, INDEX_KEY)
    rows = read_table(corpus, task.rows_key, [*_ROW_COLUMNS, "num_bytes", "width_px", "height_px", "format", "mode"])
    pairs = _drops(rows, index, task.same)
    listed = pa.table(
        {
            "example_id": pairs["example_id"],
            "corpus": pairs["other_corpus"],
            "split": pairs["other_split"],
            "evaluation_id": pairs["other_id"],
        }
    )
    write_table(corpus, task.found_key, listed.cast(LEAKAGE_SCHEMA))
    places = rows.take(pc.index_in(pairs["example_id"], rows["example_id"].combine_chunks()))
    for name in ("split", *LOCATOR_SCHEMA.names):
        pairs = pairs.append_column(name, places[name])
    pairs = pairs.append_column("left_out", pa.repeat(False, len(pairs)))
    compared = index.group_by(["corpus", "split"]).aggregate([]).to_pylist()
    stats = CorpusStats.of(
        rows.slice(0, 0),
        pa.table({name: pa.array([], pa.string()) for name in ("example_id", "reason", "detail")}),
        task.num_classes,
        SampleRule(),
        pairs,
        [(row["corpus"], row["split"]) for row in compared],
    )
    stats = dataclasses.replace(stats, older_versions=frozenset(task.older))
    return LeaksFound(corpus=task.corpus, stats=stats.to_json())


def leaked_rows(records: pa.Table, corpus: Store, config: CorpusConfig) -> pa.Table:
    """Accepted records that show an image of an evaluation set in `decontaminate`, as DROPS_SCHEMA: they must not enter the
    corpus."""
    index = read_table(corpus, DECONTAMINATE_KEY)
    pairs, _ = candidates(records, index)
    return _drops(records, index, same_images(pairs, ImageReader(config.recipe.decode)))


def save_decontamination(config: CorpusConfig, corpus: Store, root: Store) -> None:
    """List the test and val images of the corpora in `decontaminate`, for `leaked_rows`."""
    tables = [EVALUATION_SCHEMA.empty_table()]
    for name in config.recipe.decontaminate:
        store, manifest = prepared_corpus(root, name)
        tables += published_rows(store, manifest, splits_to_keep_out(name, manifest))
    write_table(corpus, DECONTAMINATE_KEY, pa.concat_tables(tables))


def splits_to_keep_out(name: str, manifest: Manifest) -> list[str]:
    """The splits that `decontaminate` refers to: test and val, drawn or not. Raises ValueError if there is neither."""
    if found := [split for split in EVALUATION_SPLITS if split in manifest.splits]:
        return found
    raise ValueError(
        f"recipe.decontaminate names {name!r}, which has neither a test nor a val split ({', '.join(manifest.splits)}): "
        "it has no evaluation images. Name corpora with a test or val split."
    )


def _drops(rows: pa.Table, index: pa.Table, same: Iterable[Same]) -> pa.Table:
    """Every row once per evaluation image that it shows, as DROPS_SCHEMA."""
    ordered = sorted(same)
    leaked = rows.take(pa.array([pair.image for pair in ordered], pa.int64()))
    evaluation = index.take(pa.array([pair.other for pair in ordered], pa.int64()))
    for name in ("offset", "length"):
        column = pa.array([getattr(pair, name) for pair in ordered], pa.int64())
        evaluation = evaluation.set_column(evaluation.column_names.index(name), name, column)
    return drops_table(
        leaked,
        evaluation,
        reason="leakage",
        kinds=["near"] * len(leaked),
        details=[
            f"shows {row['example_id']} of split {row['split']} of {row['corpus']}" for row in evaluation.to_pylist()
        ],
        labels_differ=[False] * len(leaked),
        other_corpus=evaluation["corpus"].to_pylist(),
    )
