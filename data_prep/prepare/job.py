"""Prepares corpora as one job: list, examine, plan, leakage, write, publish.

    python -m vitline.data_prep.prepare.job --run URI --attempt N

The run's config.json is a PrepareSpec. Several corpora share one Ray Data execution per stage, because starting one takes
seconds. Work that a killed attempt had finished is reused: records of examined chunks, and whole shards.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examine.examine import ChunkTask, examine_chunk, list_source
from vitline.data_prep.executors import IN_PROCESS, Executor, OnRay, Threads
from vitline.data_prep.find_corpus import corpus_store, prepared_corpus
from vitline.data_prep.plan.check_refused import NothingNew, check_reused
from vitline.data_prep.plan.corpus_stats import merged
from vitline.data_prep.plan.leakage import PlannedCorpus, find_leaks
from vitline.data_prep.plan.listed_ids import check_ids
from vitline.data_prep.plan.plan_shards import Base, ShardPlan, plan_corpus, select_examples
from vitline.data_prep.plan.sort_records import rows_key
from vitline.data_prep.prepare.publish import Planned, Preparation, publish
from vitline.data_prep.prepare.small_work import fits_here
from vitline.data_prep.progress import StageProgress
from vitline.data_prep.records import Chunks
from vitline.data_prep.shard_format import MANIFEST_KEY, Manifest, listed_shards, load_manifest
from vitline.data_prep.shards.verify_shards import ShardSpec
from vitline.data_prep.shards.write_shards import ShardTask, ensure_shard
from vitline.data_prep.sources.open_source import open_source
from vitline.infra.config import FrozenConfig
from vitline.infra.runs.attempt import Ending, driver_main, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.ray_work import start_ray
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)

_MOST_THREADS = 16
_LEAST_SHARE = 0.1  # of the chunks: from fewer than this share the time of all of them is not extrapolated


def prepare(requests: Sequence[CorpusConfig], root: str, executor: Executor = IN_PROCESS) -> list[Manifest]:
    """Prepare the requested corpora and return their manifests, in order. Corpora that are finished already are only loaded.

    Raises ValueError for a source or request that cannot be prepared, naming the file or field; FetchUnavailable if a source
    cannot be fetched; RuntimeError if source or store changed during the work.
    """
    store_root = open_store(root)
    stores = [corpus_store(store_root, config) for config in requests]
    missing = {s: config for s, config in zip(stores, requests, strict=True) if not s.exists(MANIFEST_KEY)}
    for store, config in zip(stores, requests, strict=True):
        if store not in missing:
            check_reused(config, store, store_root)
    preparations = [_list(config, store_root, store, executor) for store, config in missing.items()]
    _examine(preparations, store_root, executor)
    # Check the refused examples of all corpora before any shard is written.
    planned = [_plan(work, store_root, executor) for work in preparations]
    _look_for_leaks(planned, store_root, executor)
    _write_shards(planned, executor)
    for each in planned:
        _publish(each)
    return [load_manifest(store) for store in stores]


def _list(config: CorpusConfig, root: Store, store: Store, executor: Executor) -> Preparation:
    start = time.monotonic()
    StageProgress("list", [store]).begin(store.uri, 0, "files")
    base = None
    if config.add_to:
        base = Base(*prepared_corpus(root, config.add_to))
        base.check(config)
        for split in base.manifest.splits:  # its shard list becomes part of this corpus
            listed_shards(base.corpus, base.manifest, split)
    num_chunks = list_source(config, root, store)
    check_ids(config, store, root, base.shards() if base else (), executor)
    return Preparation(config, store, base, num_chunks, {"list": time.monotonic() - start})


def _examine(preparations: Sequence[Preparation], root: Store, executor: Executor) -> None:
    """Examine every chunk that has no records yet, for all corpora in one execution."""
    start, tasks, progress = time.monotonic(), [], _progress("examine", preparations)
    for work in preparations:
        uri, num_chunks = work.store.uri, work.num_chunks
        chunks = Chunks(work.store, work.config)
        chunks.forget_denied()
        finished = chunks.finished()
        todo = [chunk for chunk in range(num_chunks) if chunk not in finished]
        progress.begin(uri, num_chunks, "parts", done=num_chunks - len(todo))
        merged = bool(chunks.num_merged())
        tasks += [ChunkTask(corpus=uri, root=root.uri, chunk=chunk, any_merged=merged) for chunk in todo]
    lacking = set[str]()
    for done in executor.run(examine_chunk, tasks):
        progress.add(done.corpus, 1, done.num_refused, images=done.num_examples, num_bytes=done.num_bytes)
        lacking.update(done.lacking)
    if lacking:
        log.warning(
            "the system of the workers lacks protections of the decoding process: %s", "; ".join(sorted(lacking))
        )
    for work in preparations:
        work.seconds["examine"] = time.monotonic() - start
        share = len(tasks) / sum(each.num_chunks for each in preparations)
        work.examine_s = work.seconds["examine"] / share if share >= _LEAST_SHARE else None


def _plan(work: Preparation, root: Store, executor: Executor) -> Planned:
    start, config, uri = time.monotonic(), work.config, work.store.uri
    progress = _progress("plan", [work])
    progress.begin(uri)
    selection = select_examples(config, work.store, root, work.base, executor, progress)
    plan = plan_corpus(selection, open_source(config).views, config.recipe.sharding, work.base)
    progress.begin(uri, refused=selection.num_rejects)
    progress.add(uri)
    work.seconds["plan"] = time.monotonic() - start
    return Planned(work, selection, plan, selection.stats)


def _look_for_leaks(planned: Sequence[Planned], root: Store, executor: Executor) -> None:
    """Compare the training images with the test and val images of every corpus, prepared or being prepared here."""
    start, progress = time.monotonic(), _progress("leakage", [each.work for each in planned])
    for each in planned:
        progress.begin(each.work.store.uri, refused=each.selection.num_rejects)
    for each, leaks in zip(planned, find_leaks([_by_rows(p) for p in planned], root, executor, progress), strict=True):
        each.stats = merged(each.stats, leaks.stats) if leaks.stats else each.stats
        each.num_leaks_left = leaks.num_left
        each.work.seconds["leakage"] = time.monotonic() - start
        progress.begin(each.work.store.uri)
        progress.add(each.work.store.uri)


def _by_rows(planned: Planned) -> PlannedCorpus:
    store, selection = planned.work.store, planned.selection
    keys = {
        split: [rows_key(split, i) for i, num in enumerate(selection.rows(split)) if num]
        for split in planned.plan.segments
    }
    name, version = store.uri.split("/")[-2:]
    benchmark = bool(open_source(planned.work.config).benchmark_rows)
    return PlannedCorpus(store, name, version, len(selection.class_map.classes), keys, benchmark)


def _write_shards(planned: Sequence[Planned], executor: Executor) -> None:
    """Write every shard, for all corpora in one execution; finished shards are only checked."""
    start, tasks, planned_by_uri = time.monotonic(), [], {}
    progress = _progress("write", [each.work for each in planned])
    for each in planned:
        uri, shards = each.work.store.uri, each.plan.shards
        tasks += [_shard_task(each, shard) for shard in shards]
        planned_by_uri[uri] = each
        progress.begin(uri, len(shards), "shards", refused=each.selection.num_rejects)
    for info in executor.run(ensure_shard, tasks):
        planned_by_uri[info.corpus].shards[info.key] = info
        progress.add(info.corpus, images=info.num_rows, num_bytes=info.num_bytes)
    for each in planned:
        each.work.seconds["write"] = time.monotonic() - start


def _shard_task(planned: Planned, shard: ShardPlan) -> ShardTask:
    selection = planned.selection
    return ShardTask(
        corpus=planned.work.store.uri,
        spec=ShardSpec(
            corpus_name=planned.work.config.name,
            key=shard.key,
            num_rows=shard.num_rows,
            rows_per_row_group=planned.plan.layouts[shard.split].rows_per_row_group,
            num_classes=len(selection.class_map.classes),
            single_label=selection.single_label,
            has_weights=selection.has_weights,
        ),
        pieces=shard.pieces,
        origin=open_source(planned.work.config).origin,
    )


def _publish(planned: Planned) -> None:
    work, progress = planned.work, _progress("publish", [planned.work])
    progress.begin(work.store.uri, refused=planned.selection.num_rejects)
    publish(planned)
    Chunks(work.store, work.config).delete_spill()
    progress.add(work.store.uri)


def _progress(stage: str, preparations: Sequence[Preparation]) -> StageProgress:
    examine_s = preparations[0].examine_s if preparations else None
    return StageProgress(stage, [work.store for work in preparations], examine_s)


class PrepareSpec(FrozenConfig):
    """`config.json` of a preparation: the task of the job driver."""

    schema_version: int = 1
    run_key: str
    root: str
    """URI of the store that holds `corpora/`."""
    requests: tuple[CorpusConfig, ...]
    small: bool | None = None
    """Whether the work is small enough to need no Ray, if the submitter has checked that; None: the driver checks."""


def drive(run: Store, attempt: int) -> int:
    """Run one attempt of the job driver to its end and return the exit code. Small work is done in this process, without Ray.

    Invalid input ends the attempt in state `failed`, with a sentence that says what to change. After a stop, finished chunks
    and shards are kept.
    """
    spec = PrepareSpec.model_validate(run.read_json("config.json"))

    def work(_: Run) -> Ending:
        small = spec.small if spec.small is not None else _is_small(spec)
        watch = TaskWatch(run.uri, attempt)
        # On Ray, this process may wait for CPUs as long as other jobs take: its tasks are watched instead.
        with watch.over("prepare") if small else contextlib.nullcontext():
            if not small:
                start_ray()
            executor = Threads(most=_MOST_THREADS) if small else OnRay(watch)
            try:
                corpora = prepare(spec.requests, spec.root, executor)
            except NothingNew as nothing:
                log.info("%s", nothing)
                corpora = []
        return "finished", {"corpora": {m.name: {"version": m.version, "digest": m.digest} for m in corpora}}

    return run_attempt(run, attempt, work, expected=(ValueError, RuntimeError, OSError))


def _is_small(spec: PrepareSpec) -> bool:
    root = open_store(spec.root)
    missing = [config for config in spec.requests if not corpus_store(root, config).exists(MANIFEST_KEY)]
    # A Ray cluster may be busy with other jobs: only work that takes seconds is done without waiting for its CPUs.
    return fits_here(missing, root, one_machine=False)


if __name__ == "__main__":
    driver_main(__doc__, drive)
