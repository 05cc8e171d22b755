"""Prepares corpora as one job: list, examine, plan, leakage, write, publish. The only file of data_prep that imports Ray.

    python -m vitline.data_prep.prepare.job --run URI --attempt N

The run's config.json is a PrepareSpec. Several corpora share one Ray Data execution per stage, because starting one takes
seconds. Work that a killed attempt had finished is reused: records of examined chunks, and whole shards.
"""

import contextlib
import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examine.examine import ChunkTask, examine_chunk, list_source
from vitline.data_prep.executors import Executor, Threads, in_process
from vitline.data_prep.find_corpus import corpus_store, prepared_corpus
from vitline.data_prep.plan.check_refused import NothingNew, check_reused
from vitline.data_prep.plan.corpus_stats import CorpusStats, merged
from vitline.data_prep.plan.leakage import PlannedCorpus, find_leaks
from vitline.data_prep.plan.listed_ids import check_ids
from vitline.data_prep.plan.plan_shards import (
    Base,
    CorpusPlan,
    Selection,
    ShardPlan,
    plan_corpus,
    select_examples,
)
from vitline.data_prep.plan.sort_records import rows_key
from vitline.data_prep.prepare.publish import Finished, publish
from vitline.data_prep.prepare.small_work import is_small
from vitline.data_prep.progress import Progress
from vitline.data_prep.records import Chunks, Listing
from vitline.data_prep.shard_format import MANIFEST_KEY, Manifest, listed_shards, load_manifest
from vitline.data_prep.shards.verify_shards import ShardSpec
from vitline.data_prep.shards.write_shards import ShardInfo, ShardTask, ensure_shard
from vitline.data_prep.sources.open_source import open_source
from vitline.infra.config import FrozenConfig
from vitline.infra.provenance import require_same_versions
from vitline.infra.runs.attempt import Ending, driver_main, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.stopping import joining_ray
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 16
_LEAST_SHARE = 0.1  # of the chunks: from fewer than this share the time of all of them is not extrapolated
_MAX_BLOCKS = 4096  # per execution; with more tasks, several share a block
_WATCHED = (ChunkTask, ShardTask)  # the tasks that say what they have done while they run


@dataclass
class _Preparation:
    """A corpus that is being prepared."""

    config: CorpusConfig
    store: Store
    base: Base | None
    listing: Listing
    seconds: dict[str, float]
    examine_s: float | None = None
    """Seconds to examine all corpora, including what earlier attempts had done; None if too little was left to estimate it."""

    def progress(self, stage: str, total: int, unit: str, done: int = 0, refused: int = 0) -> Progress:
        return Progress(self.store, stage, total, unit, done, refused, self.examine_s)


class _StageProgress:
    """The progress files of several corpora in a stage that learns its amount of work while it runs."""

    def __init__(self, stage: str, preparations: Mapping[str, _Preparation], refused: Mapping[str, int]) -> None:
        self._stage, self._preparations, self._refused = stage, preparations, refused
        self._progress = dict[str, Progress]()
        for uri in preparations:
            self.begin(uri, 1, "corpus")

    def begin(self, corpus: str, total: int, unit: str) -> None:
        progress = self._preparations[corpus].progress(self._stage, total, unit, refused=self._refused.get(corpus, 0))
        self._progress[corpus] = progress

    def add(self, corpus: str, done: int) -> None:
        self._progress[corpus].add(done)

    def end(self, refused: Mapping[str, int]) -> None:
        """Mark the stage as done for every corpus."""
        self._refused = refused
        for uri in self._preparations:
            self.begin(uri, 1, "corpus")
            self.add(uri, 1)


@dataclass
class _Planned:
    """A corpus with planned shards; `shards` fills as they are written."""

    work: _Preparation
    selection: Selection
    plan: CorpusPlan
    stats: CorpusStats
    shards: dict[str, ShardInfo] = field(default_factory=dict)
    num_leaks_left: int = 0


def prepare(requests: Sequence[CorpusConfig], root: str, executor: Executor = in_process) -> list[Manifest]:
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


def _list(config: CorpusConfig, root: Store, store: Store, executor: Executor) -> _Preparation:
    start = time.monotonic()
    Progress(store, "list", 0, "files")
    base = None
    if config.add_to:
        base = Base(*prepared_corpus(root, config.add_to))
        base.check(config)
        for split in base.manifest.splits:  # its shard list becomes part of this corpus
            listed_shards(base.corpus, base.manifest, split)
    listing = list_source(config, root, store)
    check_ids(config, store, root, base.shards() if base else (), executor)
    return _Preparation(config, store, base, listing, {"list": time.monotonic() - start})


def _examine(preparations: Sequence[_Preparation], root: Store, executor: Executor) -> None:
    """Examine every chunk that has no records yet, for all corpora in one execution."""
    start, tasks, progress = time.monotonic(), [], {}
    for work in preparations:
        uri, num_chunks = work.store.uri, work.listing.num_chunks
        chunks = Chunks(work.store, work.config)
        chunks.forget_denied()
        finished = chunks.finished()
        todo = [chunk for chunk in range(num_chunks) if chunk not in finished]
        progress[uri] = work.progress("examine", num_chunks, "parts", done=num_chunks - len(todo))
        merged = bool(Chunks(work.store, work.config).num_merged())
        tasks += [ChunkTask(corpus=uri, root=root.uri, chunk=chunk, any_merged=merged) for chunk in todo]
    lacking = set[str]()
    for done in _run(executor, examine_chunk, tasks):
        progress[done.corpus].add(1, done.num_refused, images=done.num_examples, num_bytes=done.num_bytes)
        lacking.update(done.lacking)
    if lacking:
        log.warning(
            "the system of the workers lacks protections of the decoding process: %s", "; ".join(sorted(lacking))
        )
    for work in preparations:
        work.seconds["examine"] = time.monotonic() - start
        share = len(tasks) / sum(each.listing.num_chunks for each in preparations)
        work.examine_s = work.seconds["examine"] / share if share >= _LEAST_SHARE else None


def _plan(work: _Preparation, root: Store, executor: Executor) -> _Planned:
    start, config, uri = time.monotonic(), work.config, work.store.uri
    stage_progress = _StageProgress("plan", {uri: work}, {})
    selection = select_examples(config, work.store, root, work.base, executor, stage_progress)
    plan = plan_corpus(selection, open_source(config).views, config.recipe.sharding, work.base)
    stage_progress.end({uri: selection.num_rejects})
    work.seconds["plan"] = time.monotonic() - start
    return _Planned(work, selection, plan, selection.stats)


def _look_for_leaks(planned: Sequence[_Planned], root: Store, executor: Executor) -> None:
    """Compare the training images with the test and val images of every corpus, prepared or being prepared here."""
    start, refused = time.monotonic(), {each.work.store.uri: each.selection.num_rejects for each in planned}
    stage_progress = _StageProgress("leakage", {each.work.store.uri: each.work for each in planned}, refused)
    for each, leaks in zip(
        planned, find_leaks([_by_rows(p) for p in planned], root, executor, stage_progress), strict=True
    ):
        each.stats = merged(each.stats, leaks.stats) if leaks.stats else each.stats
        each.num_leaks_left = leaks.num_left
        each.work.seconds["leakage"] = time.monotonic() - start
    stage_progress.end(refused)


def _by_rows(planned: _Planned) -> PlannedCorpus:
    store, selection = planned.work.store, planned.selection
    keys = {
        split: [rows_key(split, i) for i, num in enumerate(selection.rows(split)) if num]
        for split in planned.plan.segments
    }
    name, version = store.uri.split("/")[-2:]
    benchmark = bool(open_source(planned.work.config).benchmark_rows)
    return PlannedCorpus(store, name, version, len(selection.class_map.classes), keys, benchmark)


def _write_shards(planned: Sequence[_Planned], executor: Executor) -> None:
    """Write every shard, for all corpora in one execution; finished shards are only checked."""
    start, tasks, planned_by_uri, progress = time.monotonic(), [], {}, {}
    for each in planned:
        uri, shards = each.work.store.uri, each.plan.shards
        tasks += [_shard_task(each, shard) for shard in shards]
        planned_by_uri[uri] = each
        progress[uri] = each.work.progress("write", len(shards), "shards", refused=each.selection.num_rejects)
    for info in _run(executor, ensure_shard, tasks):
        planned_by_uri[info.corpus].shards[info.key] = info
        progress[info.corpus].add(1, images=info.num_rows, num_bytes=info.num_bytes)
    for each in planned:
        each.work.seconds["write"] = time.monotonic() - start


def _shard_task(planned: _Planned, shard: ShardPlan) -> ShardTask:
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


def _publish(planned: _Planned) -> None:
    work = planned.work
    progress = work.progress("publish", 1, "corpus", refused=planned.selection.num_rejects)
    publish(
        Finished(
            config=work.config,
            corpus=work.store,
            base=work.base,
            selection=planned.selection,
            stats=planned.stats,
            plan=planned.plan,
            shards=planned.shards,
            seconds=work.seconds,
            num_leaks_left=planned.num_leaks_left,
        )
    )
    Chunks(work.store, work.config).delete_spill()
    progress.add(1)


def _run(executor: Executor, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    return executor(work, tasks) if tasks else iter(())


def ray_data(work: Callable[[T], R], tasks: Sequence[T], /, watch: TaskWatch | None = None) -> Iterator[R]:
    """An executor: one Ray Data execution, one CPU per task, results in the order in which they finish.

    Ray must be initialised. Ray repeats the tasks of workers that die; `watch` ends those that hang, and those whose workers die
    each time. Raises RuntimeError with the message of the first task that fails with an error of its own, or is ended.
    """
    import ray.data

    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # logs start and end of each execution; ray-data.log keeps these lines
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = False
    rows = [{"task": pickle.dumps(task)} for task in tasks]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))
    for row in dataset.map(partial(_run_task, work=work, watch=watch), num_cpus=1).iter_rows():
        result, error = pickle.loads(row["result"]), row["error"]
        if error:
            raise RuntimeError(error)
        yield result


def _run_task(row: dict[str, Any], work: Callable[[Any], Any], watch: TaskWatch | None = None) -> dict[str, Any]:
    # Return our errors as values: Ray Data would wrap an exception in pages of traceback.
    try:
        require_same_versions()
        task = pickle.loads(row["task"])
        with watch.over(*_watched_as(task, work, row["task"])) if watch else contextlib.nullcontext():
            return {"result": pickle.dumps(work(task)), "error": ""}
    except (ValueError, RuntimeError, OSError) as error:
        return {"result": pickle.dumps(None), "error": f"{type(error).__name__}: {error}"}


def _watched_as(task: object, work: Callable[[Any], Any], pickled: bytes) -> tuple[str, bool]:
    """The name of a task for its watchdog, and whether it says what it has done."""
    if isinstance(task, _WATCHED):
        return task.title, True
    return f"{getattr(work, '__name__', 'task').strip('_')}-{hashlib.sha256(pickled).hexdigest()[:12]}", False


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
            executor = Threads(most=_MOST_THREADS) if small else _started_ray(watch)
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
    return is_small(missing, root, one_machine=False)


def _started_ray(watch: TaskWatch) -> Executor:
    import ray

    with joining_ray():
        ray.init(logging_level=logging.WARNING, ignore_reinit_error=True)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    return partial(ray_data, watch=watch)


if __name__ == "__main__":
    driver_main(__doc__, drive)
