"""Evaluation pictures that hide in what is trained on: found by perceptual hash, confirmed on thumbnails.

The hashes of all test and val pictures are one small table, which every task reads; the work is linear in the corpus.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.config import CorpusConfig
from data_prep.corpus_stats import CorpusStats, SampleRule, merged
from data_prep.dedup import DROPS_SCHEMA, LOCATOR_SCHEMA, drops_table
from data_prep.executors import Executor, in_process
from data_prep.find_corpus import prepared_corpora, prepared_corpus
from data_prep.locate_pictures import PictureReader
from data_prep.near_duplicates import HashIndex, as_words
from data_prep.records import PLAN, REQUEST_KEY, read_table, write_table
from data_prep.shard_format import Manifest, load_manifest, open_shard, segment_keys, segment_store
from infra.config import FrozenConfig
from infra.storage import Store, open_store

INDEX_KEY, DECONTAMINATE_KEY = f"{PLAN}/evaluation.parquet", f"{PLAN}/decontaminate.parquet"
EVALUATION_SPLITS = ("test", "val")
NEAREST = 16
"""Evaluation pictures with near hashes that a training picture is compared with: those with the nearest hashes."""
EVALUATION_SCHEMA = pa.schema(
    [
        pa.field("corpus", pa.string()),  # NAME/VERSION
        pa.field("split", pa.string()),
        pa.field("example_id", pa.string()),
        pa.field("phash", pa.binary()),
        *LOCATOR_SCHEMA,
        pa.field("row", pa.int64()),  # of the shard that base and key name; null: base and key are the source's
    ]
)
_ROW_COLUMNS = ["example_id", "labels", "split", "order_key", "phash", "phash_mirror", *LOCATOR_SCHEMA.names]
LEAKAGE_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("corpus", pa.string(), nullable=False),  # NAME/VERSION of the evaluation set
        pa.field("split", pa.string(), nullable=False),
        pa.field("evaluation_id", pa.string(), nullable=False),
    ]
)
"""leakage.parquet: training pictures that show a picture of an evaluation set, and which."""


@dataclass(frozen=True)
class PlannedCorpus:
    """A corpus whose rows are planned but in no shard yet."""

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
    """One planned file of training rows to compare with the evaluation pictures that the corpus has listed."""

    corpus: str
    rows_key: str
    found_key: str
    num_classes: int


class LeaksFound(FrozenConfig):
    """What one task found: statistics of pairs, and where they are listed."""

    corpus: str
    stats: dict


def find_leaks(planned: Sequence[PlannedCorpus], root: Store, executor: Executor) -> list[CorpusStats | None]:
    """For every corpus the pictures of its train split that show a test or val picture of another corpus, prepared
    below the root (its newest version) or planned here. None where there is no other, and for a benchmark."""
    tasks = []
    for each in planned:
        if each.is_benchmark:
            continue  # nobody pre-trains on it, and its splits are as published
        index = _evaluation_rows(each, planned, root)
        if len(index):
            write_table(each.store, INDEX_KEY, index)
            for i, key in enumerate(each.rows_keys.get("train", [])):
                found_key = f"{PLAN}/leaks/{i:05d}.parquet"
                tasks.append(
                    LeakTask(corpus=each.store.uri, rows_key=key, found_key=found_key, num_classes=each.num_classes)
                )
    small = all(len(each.rows_keys.get("train", [])) <= 1 for each in planned)
    totals: dict[str, CorpusStats] = {}
    for found in (in_process if small else executor)(look_for_leaks, tasks) if tasks else ():
        own = CorpusStats.from_json(found.stats)
        totals[found.corpus] = merged(totals[found.corpus], own) if found.corpus in totals else own
    return [totals.get(each.store.uri) for each in planned]


def leak_lists(corpus: Store) -> Iterator[pa.Table]:
    """What was found of a corpus, as LEAKAGE_SCHEMA, part by part."""
    for listed in corpus.scan(f"{PLAN}/leaks/"):
        yield read_table(corpus, listed.key)


def _evaluation_rows(own: PlannedCorpus, planned: Sequence[PlannedCorpus], root: Store) -> pa.Table:
    """The evaluation pictures of all corpora but this one (and other versions of it), as EVALUATION_SCHEMA."""
    whole = (found for found in prepared_corpora(root) if "view_of" not in found[1].provenance)
    newest = {manifest.name: (store, manifest) for store, manifest in whole}
    mates = {each.name: each for each in planned}
    tables = [EVALUATION_SCHEMA.empty_table()]
    for name in sorted((newest.keys() | mates.keys()) - {own.name}):
        if name in mates:
            tables += _planned_evaluation(mates[name])
        else:
            tables += published_evaluation(*newest[name])
    return pa.concat_tables(tables)


def _planned_evaluation(corpus: PlannedCorpus) -> Iterator[pa.Table]:
    if "test" not in corpus.rows_keys:
        return  # a corpus without a test split is no evaluation set; its val is its own affair
    for split in EVALUATION_SPLITS:
        for key in corpus.rows_keys.get(split, ()):
            with corpus.store.open(key) as file:
                rows = pq.read_table(file, columns=["split", "example_id", "phash", *LOCATOR_SCHEMA.names])
            rows = rows.append_column("corpus", pa.repeat(corpus.title, len(rows)))
            rows = rows.append_column("row", pa.nulls(len(rows), pa.int64()))
            yield rows.select(EVALUATION_SCHEMA.names).cast(EVALUATION_SCHEMA)


def published_evaluation(corpus: Store, manifest: Manifest) -> Iterator[pa.Table]:
    """The evaluation pictures of a finished corpus, as EVALUATION_SCHEMA; none where it has no test split."""
    if "test" not in manifest.splits:
        return
    for split in EVALUATION_SPLITS:
        if split not in manifest.splits:
            continue
        info = manifest.splits[split]
        for segment in info.segments:
            store = segment_store(corpus, segment)
            left = segment.num_rows
            for key in segment_keys(segment)[: info.shards_in_use(segment)]:
                file = open_shard(store, key)
                rows = file.read(columns=["example_id", "phash"], use_threads=False).slice(0, left)
                file.close(force=True)
                left -= len(rows)
                num = len(rows)
                columns = {
                    "corpus": pa.repeat(f"{manifest.name}/{manifest.version}", num),
                    "split": pa.repeat(split, num),
                    "example_id": rows["example_id"],
                    "phash": rows["phash"],
                    "base": pa.repeat(store.uri, num),
                    "key": pa.repeat(key, num),
                    "offset": pa.nulls(num, pa.int64()),
                    "length": pa.nulls(num, pa.int64()),
                    "row": pa.array(range(num), pa.int64()),
                }
                yield pa.table(columns).cast(EVALUATION_SCHEMA)


def look_for_leaks(task: LeakTask) -> LeaksFound:
    """Compare one file of planned training rows with the evaluation pictures."""
    corpus = open_store(task.corpus)
    config = CorpusConfig.model_validate(corpus.read_json(REQUEST_KEY))
    index = read_table(corpus, INDEX_KEY)
    with corpus.open(task.rows_key) as file:
        rows = pq.read_table(file, columns=[*_ROW_COLUMNS, "num_bytes", "width_px", "height_px", "format", "mode"])
    pairs = _pairs(rows, index, config)
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
    return LeaksFound(corpus=task.corpus, stats=stats.to_json())


def leaked_rows(records: pa.Table, corpus: Store, config: CorpusConfig) -> pa.Table:
    """Of accepted records those that show a picture of an evaluation set that `decontaminate` names, as DROPS_SCHEMA:
    what must not be in the corpus."""
    return _pairs(records, read_table(corpus, DECONTAMINATE_KEY), config)


def save_decontamination(config: CorpusConfig, corpus: Store, root: Store) -> None:
    """List the evaluation pictures of the corpora that `decontaminate` names, for `leaked_rows`."""
    tables = [EVALUATION_SCHEMA.empty_table()]
    for name in config.recipe.decontaminate:
        store = prepared_corpus(root, name)
        manifest = load_manifest(store)
        if "test" not in manifest.splits:
            raise ValueError(
                f"recipe.decontaminate names {name!r}, which has no test split ({', '.join(manifest.splits)}): there is "
                "nothing to keep out. Name evaluation sets."
            )
        tables += published_evaluation(store, manifest)
    write_table(corpus, DECONTAMINATE_KEY, pa.concat_tables(tables))


def _pairs(rows: pa.Table, index: pa.Table, config: CorpusConfig) -> pa.Table:
    """Every row with each evaluation picture that it shows, as DROPS_SCHEMA."""
    if not len(rows) or not len(index):
        return DROPS_SCHEMA.empty_table()
    found = _nearest(rows, index)
    with PictureReader(config.recipe.decode) as pictures:
        confirmed = [
            (i, j) for i, j in found if pictures.same(rows.slice(i, 1).to_pylist()[0], index.slice(j, 1).to_pylist()[0])
        ]
        goes = rows.take(pa.array([i for i, _ in confirmed], pa.int64()))
        stays = pictures.located(index.take(pa.array([j for _, j in confirmed], pa.int64())))
    return drops_table(
        goes,
        stays,
        reason="leakage",
        kinds=["near"] * len(goes),
        details=[f"shows {row['example_id']} of {row['split']} of {row['corpus']}" for row in stays.to_pylist()],
        labels_differ=[False] * len(goes),
        other_corpus=stays["corpus"].to_pylist(),
    )


def _nearest(rows: pa.Table, index: pa.Table) -> list[tuple[int, int]]:
    """Pairs (row, evaluation picture) with near hashes, at most NEAREST of a row: those at the smallest distance."""
    table = HashIndex.of(index["phash"])
    nearest: dict[tuple[int, int], int] = {}
    for column in ("phash", "phash_mirror"):
        for i, j, distance in zip(*(a.tolist() for a in table.search(as_words(rows[column].to_pylist()))), strict=True):
            nearest[i, j] = min(distance, nearest.get((i, j), distance))
    kept, seen = [], Counter[int]()
    for (i, j), _ in sorted(nearest.items(), key=lambda found: (found[0][0], found[1], found[0][1])):
        seen[i] += 1
        if seen[i] <= NEAREST:
            kept.append((i, j))
    return kept
