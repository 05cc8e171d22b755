"""The preparation of corpora as one job: examine, gather, verify, publish. The only file that imports Ray.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from data_prep.config import CorpusConfig
from data_prep.examine import ChunkTask, examine_chunk, list_source
from data_prep.executors import Executor, in_process
from data_prep.find_corpus import corpus_store
from data_prep.plan_shards import CorpusPlan, Selection, plan_corpus, select_examples
from data_prep.progress import Progress
from data_prep.publish import publish
from data_prep.records import Chunks, SourcePlan
from data_prep.shard_format import MANIFEST_KEY, Manifest, load_manifest
from data_prep.verify_shards import ShardSpec
from data_prep.write_shards import ShardInfo, ShardTask, ensure_shard, finished_info, save_plan
from infra.claims import ClaimHolder
from infra.config import FrozenConfig
from infra.redact import cleaned
from infra.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, write_state
from infra.stopping import StopWatch, handlers_kept, stop_on_signals
from infra.storage import Store, open_store

T = TypeVar("T")
R = TypeVar("R")

_GRACE_S = 5.0
_MAX_BLOCKS = 4096  # of one execution: more tasks than this share blocks


@dataclass
class _Listed:
    """A corpus at work: its chunks are known."""

    config: CorpusConfig
    store: Store
    source: SourcePlan
    seconds: dict[str, float]


@dataclass
class _Planned:
    """A corpus at work: its shards are known, and more and more of them finished."""

    corpus: _Listed
    selection: Selection
    plan: CorpusPlan
    finished: dict[str, ShardInfo] = field(default_factory=dict)


def prepare(requests: Sequence[CorpusConfig], root: str, executor: Executor = in_process) -> list[Manifest]:
    """The manifests of the requested corpora, in order; what is finished already is only looked up.

    Raises ValueError for a source or request that cannot be prepared, with the file or field at fault,
    FetchUnavailable where a source cannot be fetched, and RuntimeError where the world changed under the work.
    """
    base = open_store(root)
    stores = [corpus_store(base, config) for config in requests]
    missing = {s: config for s, config in zip(stores, requests, strict=True) if not s.exists(MANIFEST_KEY)}
    listed = [_list(config, base, store) for store, config in missing.items()]
    _examine(listed, executor)
    planned = [_plan(corpus) for corpus in listed]  # the refusals of all are judged before a shard of any is written
    _gather(planned, executor)
    for each in planned:
        corpus = each.corpus
        publish(corpus.store, corpus.config, corpus.source, each.selection, each.plan, each.finished, corpus.seconds)
    return [load_manifest(store) for store in stores]


def _list(config: CorpusConfig, root: Store, store: Store) -> _Listed:
    start = time.monotonic()
    Progress(store, "list", 0, "files")
    source = list_source(config, root, store)
    return _Listed(config, store, source, {"list": time.monotonic() - start})


def _examine(listed: Sequence[_Listed], executor: Executor) -> None:
    """Every chunk without records, of all corpora, in one execution."""
    start, tasks, progress = time.monotonic(), [], {}
    for corpus in listed:
        recipe, size = corpus.config.recipe, corpus.config.execution.examples_per_chunk
        todo = Chunks(corpus.store, size).unfinished(corpus.source)
        uri, total = corpus.store.uri, corpus.source.num_examples
        left = sum(min(size, total - chunk * size) for chunk in todo)
        progress[uri] = Progress(corpus.store, "examine", total, "examples", done=total - left)
        tasks += [
            ChunkTask(
                corpus=uri, chunk=chunk, examples_per_chunk=size, order_seed=recipe.order_seed, policy=recipe.decode
            )
            for chunk in todo
        ]
    for done in _run(executor, examine_chunk, tasks):
        progress[done.corpus].add(done.num_examples, done.num_refused)
    for corpus in listed:
        corpus.seconds["examine"] = time.monotonic() - start


def _plan(corpus: _Listed) -> _Planned:
    start, config = time.monotonic(), corpus.config
    records = Chunks(corpus.store, config.execution.examples_per_chunk).load_records(corpus.source)
    selection = select_examples(records, corpus.source, config.recipe)
    selection.check_refused(config.name, config.execution.max_refused_fraction)
    planned = _Planned(corpus, selection, plan_corpus(selection, corpus.source.views, config.recipe.sharding))
    corpus.seconds["plan"] = time.monotonic() - start
    return planned


def _gather(planned: Sequence[_Planned], executor: Executor) -> None:
    """Every unfinished shard, of all corpora, in one execution."""
    start, tasks, at_work, progress = time.monotonic(), [], {}, {}
    for each in planned:
        store, shard_tasks = each.corpus.store, _shard_tasks(each)
        for task, shard in zip(shard_tasks, each.plan.shards, strict=True):
            if info := finished_info(task):
                each.finished[info.key] = info
            else:
                save_plan(task, shard)
                tasks.append(task)
        at_work[store.uri] = each
        refused, done = each.selection.rejects.num_rows, len(each.finished)
        progress[store.uri] = Progress(store, "gather", len(shard_tasks), "shards", done, refused)
    for info in _run(executor, ensure_shard, tasks):
        at_work[info.corpus].finished[info.key] = info
        progress[info.corpus].add(1)
    for each in planned:
        each.corpus.seconds["gather"] = time.monotonic() - start


def _shard_tasks(planned: _Planned) -> list[ShardTask]:
    selection, source = planned.selection, planned.corpus.source
    return [
        ShardTask(
            corpus=planned.corpus.store.uri,
            spec=ShardSpec(
                key=shard.key,
                num_rows=shard.rows.num_rows,
                rows_per_row_group=planned.plan.splits[shard.split].rows_per_row_group,
                num_classes=len(selection.class_map.classes),
                single_label=selection.single_label,
                has_weights=selection.has_weights,
            ),
            content_digest=shard.content_digest,
            origin=source.origin,
        )
        for shard in planned.plan.shards
    ]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The job driver: prepares what `config.json` of the run asks for, under the run's claim, and leaves `state.json`.

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
            import ray

            with handlers_kept():
                ray.init(logging_level=logging.WARNING, ignore_reinit_error=True)
            logging.getLogger("ray.data").setLevel(logging.WARNING)
            corpora = prepare(spec.requests, spec.root, ray_data)
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


def leave_when_stopped(run: Store, attempt: int, claim: ClaimHolder) -> None:
    """Ends the process, and its tasks with it, when a stop is asked for or the claim is in other hands."""

    def watch() -> None:
        with StopWatch(run, attempt) as stop:
            while stop.asked() is None and not claim.lost:
                time.sleep(0.5)
        if claim.lost:
            os._exit(CLAIM_LOST_EXIT_CODE)
        reason = stop.asked() or "preempted"
        write_state(run, reason, attempt, reason="stop.json asked for it")
        os._exit(OUTCOMES[reason].exit_code)

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


if __name__ == "__main__":
    main()
