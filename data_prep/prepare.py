"""The preparation of corpora as one job: list, examine, plan, leakage, write, publish. The only file that imports Ray.

    python -m data_prep.prepare --run URI --attempt N

The run's config.json is a PrepareSpec. Several corpora share one execution of each pass, as starting one costs seconds.
What an attempt that was killed had finished stays: chunks of examined examples and whole shards.
"""

import argparse
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import PositiveInt

from data_prep.config import CorpusConfig
from data_prep.corpora.open_source import open_source
from data_prep.corpus_stats import CorpusStats, merged
from data_prep.examine.examine import ChunkTask, examine_chunk, list_source
from data_prep.executors import Executor, Threads, in_process
from data_prep.find_corpus import corpus_store, prepared_corpus
from data_prep.plan.check_refused import check_reused
from data_prep.plan.leakage import PlannedCorpus, find_leaks
from data_prep.plan.listed_ids import check_ids
from data_prep.plan.plan_shards import (
    Base,
    CorpusPlan,
    Selection,
    ShardPlan,
    known_shards,
    plan_corpus,
    select_examples,
)
from data_prep.plan.sort_records import rows_key
from data_prep.progress import Progress
from data_prep.publish import Finished, publish
from data_prep.records import Chunks, Listing
from data_prep.shard_format import MANIFEST_KEY, Manifest, load_manifest
from data_prep.shards.subsets import check_take
from data_prep.shards.verify_shards import ShardSpec
from data_prep.shards.write_shards import ShardInfo, ShardTask, ensure_shard
from data_prep.small_work import is_small
from infra.config import FrozenConfig
from infra.provenance import differing_versions
from infra.redact import cleaned
from infra.runs.claims import ClaimHolder
from infra.runs.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, write_state
from infra.runs.stopping import StopPoller, handlers_kept, stop_on_signals
from infra.storage import Store, open_store

T = TypeVar("T")
R = TypeVar("R")

_GRACE_S = 5.0
_MOST_THREADS = 16
_LEAST_SHARE = 0.1  # of less than this the time of the whole is not known
_MAX_BLOCKS = 4096  # of one execution: more tasks than this share blocks


@dataclass
class _AtWork:
    """A corpus that is being prepared."""

    config: CorpusConfig
    store: Store
    base: Base | None
    listing: Listing
    seconds: dict[str, float]
    examine_s: float | None = None
    """What examining all corpora takes, with what an earlier attempt had done; None: that had done nearly everything."""

    def progress(self, stage: str, total: int, unit: str, done: int = 0, refused: int = 0) -> Progress:
        return Progress(self.store, stage, total, unit, done, refused, self.examine_s)


class _Shown:
    """The progress files of corpora in a stage that finds out by and by how much it has to do."""

    def __init__(self, stage: str, at_work: Mapping[str, _AtWork], refused: Mapping[str, int]) -> None:
        self._stage, self._at_work, self._refused = stage, at_work, refused
        self._progress = dict[str, Progress]()
        for uri in at_work:
            self.begin(uri, 1, "corpus")

    def begin(self, corpus: str, total: int, unit: str) -> None:
        progress = self._at_work[corpus].progress(self._stage, total, unit, refused=self._refused.get(corpus, 0))
        self._progress[corpus] = progress

    def add(self, corpus: str, done: int) -> None:
        self._progress[corpus].add(done)

    def end(self, refused: Mapping[str, int]) -> None:
        """A corpus each, done."""
        self._refused = refused
        for uri in self._at_work:
            self.begin(uri, 1, "corpus")
            self.add(uri, 1)


@dataclass
class _Planned:
    """A corpus whose shards are known, and more and more of them finished."""

    work: _AtWork
    selection: Selection
    plan: CorpusPlan
    stats: CorpusStats
    shards: dict[str, ShardInfo] = field(default_factory=dict)
    num_leaks_left: int = 0


def prepare(
    requests: Sequence[CorpusConfig], root: str, executor: Executor = in_process, take: int | None = None
) -> list[Manifest]:
    """The manifests of the requested corpora, in order; what is finished already is only looked up.

    `take` rows of train will be asked for as a view: what cannot have more is refused as early as that is known.

    Raises ValueError for a source or request that cannot be prepared, with the file or field at fault,
    FetchUnavailable where a source cannot be fetched, and RuntimeError where the world changed under the work.
    """
    top = open_store(root)
    stores = [corpus_store(top, config) for config in requests]
    missing = {s: config for s, config in zip(stores, requests, strict=True) if not s.exists(MANIFEST_KEY)}
    for store, config in zip(stores, requests, strict=True):
        if store not in missing:
            check_reused(config, store, top)
    at_work = [_list(config, top, store, executor) for store, config in missing.items()]
    for work in at_work:
        if num_found := work.listing.num_examples:
            check_take(work.config.name, take, num_found + _train_rows(work.base))
    _examine(at_work, top, executor)
    # The refusals of all are judged before a shard of any is written.
    planned = [_plan(work, top, executor) for work in at_work]
    for each in planned:
        check_take(each.work.config.name, take, each.selection.num_rows("train") + _train_rows(each.work.base))
    _look_for_leaks(planned, top, executor)
    _write_shards(planned, executor)
    for each in planned:
        _publish(each)
    return [load_manifest(store) for store in stores]


def _list(config: CorpusConfig, root: Store, store: Store, executor: Executor) -> _AtWork:
    start = time.monotonic()
    Progress(store, "list", 0, "files")
    base = None
    if config.add_to:
        corpus = prepared_corpus(root, config.add_to)
        base = Base(corpus, load_manifest(corpus))
        base.check(config)
    listing = list_source(config, root, store)
    check_ids(config, store, root, known_shards(base) if base else (), executor)
    return _AtWork(config, store, base, listing, {"list": time.monotonic() - start})


def _train_rows(base: Base | None) -> int:
    return base.manifest.splits["train"].num_rows if base and "train" in base.manifest.splits else 0


def _examine(at_work: Sequence[_AtWork], root: Store, executor: Executor) -> None:
    """Every chunk without records, of all corpora, in one execution."""
    start, tasks, progress = time.monotonic(), [], {}
    for work in at_work:
        uri, num_chunks = work.store.uri, work.listing.num_chunks
        chunks = Chunks(work.store, work.config)
        chunks.forget_denied()
        finished = chunks.finished()
        todo = [chunk for chunk in range(num_chunks) if chunk not in finished]
        progress[uri] = work.progress("examine", num_chunks, "parts", done=num_chunks - len(todo))
        merged = bool(Chunks(work.store, work.config).num_merged())
        tasks += [ChunkTask(corpus=uri, root=root.uri, chunk=chunk, any_merged=merged) for chunk in todo]
    for done in _run(executor, examine_chunk, tasks):
        progress[done.corpus].add(1, done.num_refused, images=done.num_examples, num_bytes=done.num_bytes)
    for work in at_work:
        work.seconds["examine"] = time.monotonic() - start
        share = len(tasks) / sum(each.listing.num_chunks for each in at_work)
        work.examine_s = work.seconds["examine"] / share if share >= _LEAST_SHARE else None


def _plan(work: _AtWork, root: Store, executor: Executor) -> _Planned:
    start, config, uri = time.monotonic(), work.config, work.store.uri
    shown = _Shown("plan", {uri: work}, {})
    selection = select_examples(config, work.store, root, work.base, executor, shown)
    plan = plan_corpus(selection, open_source(config).views, config.recipe.sharding, work.base)
    shown.end({uri: selection.num_rejects})
    work.seconds["plan"] = time.monotonic() - start
    return _Planned(work, selection, plan, selection.stats)


def _look_for_leaks(planned: Sequence[_Planned], root: Store, executor: Executor) -> None:
    """Compare what is trained on with the test and val pictures of every corpus, prepared or at work here."""
    start, refused = time.monotonic(), {each.work.store.uri: each.selection.num_rejects for each in planned}
    shown = _Shown("leakage", {each.work.store.uri: each.work for each in planned}, refused)
    for each, leaks in zip(planned, find_leaks([_by_rows(p) for p in planned], root, executor, shown), strict=True):
        each.stats = merged(each.stats, leaks.stats) if leaks.stats else each.stats
        each.num_leaks_left = leaks.num_left
        each.work.seconds["leakage"] = time.monotonic() - start
    shown.end(refused)


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
    """Every shard, of all corpora, in one execution; those that lie there are only looked at."""
    start, tasks, at_work, progress = time.monotonic(), [], {}, {}
    for each in planned:
        uri, shards = each.work.store.uri, each.plan.shards
        tasks += [_shard_task(each, shard) for shard in shards]
        at_work[uri] = each
        progress[uri] = each.work.progress("write", len(shards), "shards", refused=each.selection.num_rejects)
    for info in _run(executor, ensure_shard, tasks):
        at_work[info.corpus].shards[info.key] = info
        progress[info.corpus].add(1, images=info.num_rows, num_bytes=info.num_bytes)
    for each in planned:
        each.work.seconds["write"] = time.monotonic() - start


def _shard_task(planned: _Planned, shard: ShardPlan) -> ShardTask:
    selection = planned.selection
    return ShardTask(
        corpus=planned.work.store.uri,
        spec=ShardSpec(
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


def ray_data(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """An executor: one Ray Data execution, a CPU to a task, results in the order in which they finish.

    Ray must be initialised. Tasks of workers that die are run again by Ray. Raises RuntimeError with the message of
    a task that failed for a reason of its own.
    """
    import ray.data

    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # says when each execution starts and ends; its own file keeps that
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = False
    rows = [{"task": pickle.dumps(task)} for task in tasks]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))
    for row in dataset.map(partial(_worked, work=work), num_cpus=1).iter_rows():
        result, error = pickle.loads(row["result"]), row["error"]
        if error:
            raise RuntimeError(error)
        yield result


def _worked(row: dict[str, Any], work: Callable[[Any], Any]) -> dict[str, Any]:
    # An error of ours comes back as a value: as an exception, Ray Data would wrap it in pages of traceback.
    try:
        return {"result": pickle.dumps(work(pickle.loads(row["task"]))), "error": ""}
    except (ValueError, RuntimeError, OSError) as error:
        return {"result": pickle.dumps(None), "error": f"{type(error).__name__}: {error}"}


class PrepareSpec(FrozenConfig):
    """`config.json` of a preparation: what the job driver is to do."""

    schema_version: int = 1
    run_key: str
    root: str
    """URI under which `corpora/` lies."""
    requests: tuple[CorpusConfig, ...]
    take: PositiveInt | None = None
    """Rows of train that a view will be made of, which is refused early where there are not so many."""
    small: bool | None = None
    """Whether it needs no Ray, where whoever asks has looked; None: the driver looks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The job driver: prepares what `config.json` of the run asks for, under the run's claim, and leaves `state.json`.
    What is small it does by itself, without Ray.

    Bad input ends as state `failed` with one sentence that says what to change.
    """
    parser = argparse.ArgumentParser(prog="python -m data_prep.prepare", description="Prepare corpora with Ray Data.")
    parser.add_argument("--run", required=True, help="URI of the run: <root>/runs/<run key>")
    parser.add_argument("--attempt", required=True, type=int)
    given = parser.parse_args(arguments)
    sys.exit(drive(open_store(given.run), given.attempt))


def drive(run: Store, attempt: int) -> int:
    """Runs one attempt to its end and gives the exit code. A stop loses nothing: finished chunks and shards stay."""
    spec = PrepareSpec.model_validate(run.read_json("config.json"))
    with ClaimHolder(run, attempt) as claim:
        write_state(run, "running", attempt)
        stop_on_signals(run.uri, attempt, grace_s=_GRACE_S)
        leave_when_stopped(run, attempt, claim)
        try:
            if differ := differing_versions():
                raise RuntimeError(differ)
            small = spec.small if spec.small is not None else _is_small(spec)
            executor = Threads(most=_MOST_THREADS) if small else _started_ray()
            corpora = prepare(spec.requests, spec.root, executor, spec.take)
        except (ValueError, RuntimeError, OSError) as error:
            reason = cleaned(" ".join(f"{type(error).__name__}: {error}".split()))
            print(f"error: {reason}", file=sys.stderr)
            claim.check()
            write_state(run, "failed", attempt, reason=reason)
            return OUTCOMES["failed"].exit_code
        claim.check()
        prepared = {m.name: {"version": m.version, "digest": m.digest} for m in corpora}
        write_state(run, "finished", attempt, corpora=prepared)
    return OUTCOMES["finished"].exit_code


def _is_small(spec: PrepareSpec) -> bool:
    root = open_store(spec.root)
    missing = [config for config in spec.requests if not corpus_store(root, config).exists(MANIFEST_KEY)]
    # Where a Ray runs, others may have its CPUs: only what takes seconds does not wait for them.
    return is_small(missing, root, one_machine=False)


def _started_ray() -> Executor:
    import ray

    with handlers_kept():
        ray.init(logging_level=logging.WARNING, ignore_reinit_error=True)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    return ray_data


def leave_when_stopped(run: Store, attempt: int, claim: ClaimHolder) -> None:
    """Ends the process, and its tasks with it, when a stop is asked for or the claim is in other hands."""

    def watch() -> None:
        with StopPoller(run, attempt) as stop:
            while stop.asked() is None and not claim.lost:
                time.sleep(0.5)
        if claim.lost:
            os._exit(CLAIM_LOST_EXIT_CODE)
        reason = stop.asked() or "preempted"
        write_state(run, reason, attempt, reason=stop.by)
        os._exit(OUTCOMES[reason].exit_code)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


if __name__ == "__main__":
    main()
