"""Work on all of a Ray cluster: each task in a process with a watchdog, and again in another process if that one ends.

Imports Ray on use. Ray repeats a task without limit, as it may lose any number of nodes; `TaskWatch` counts the processes that hung or
crashed, and ends a task after MOST_ENDS of them.
"""

import contextlib
import functools
import logging
import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from vitline.infra.children import sendable
from vitline.infra.provenance import lacking, require_same_versions
from vitline.infra.runs.stopping import joining_ray
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.settings import Settings

T = TypeVar("T")
_POLL_S = 1.0
_MAX_BLOCKS = 4096  # of one execution of Ray Data; with more tasks, several share a block


class RayTask(NamedTuple, Generic[T]):
    """A task and the resources of its process."""

    key: str
    """Names it in errors, and in the names of their files."""
    argument: T
    cpus: float = 1
    gpus: float = 0
    notes_progress: bool = True
    """Whether it calls `note_progress`; only then a hang can be told from work."""
    node: str = ""
    """Id of the one node that may run it. Empty: any; `run_many` takes any."""


def start_ray() -> dict[str, float]:
    """Joins the cluster that the job runs in, and returns the resources of the nodes that its tasks may use."""
    import ray

    with joining_ray():
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    total = Counter[str]()
    for node in usable_nodes():
        total.update(node["Resources"])
    return dict[str, float](total)


def living_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that Ray takes to be alive, as `ray.nodes()` describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def usable_nodes() -> list[dict[str, Any]]:
    """The living nodes with the labels of VITLINE_NODE_LABELS, on which the tasks of this job run."""
    labels = Settings().node_labels.items()
    return [node for node in living_nodes() if labels <= node["Labels"].items()]


def run_keyed(
    work: Callable[[T], Any],
    tasks: deque[RayTask[T]],
    *,
    watch: TaskWatch | None,
    stop: Callable[[], object] = lambda: None,
    grace_s: float = 0.0,
    keep: int = 0,
) -> Iterator[tuple[T, Any]]:
    """Runs `work(argument)` for each task, and yields the argument with each result as it comes: several if `work` is a generator.

    The caller may append tasks between two results. Once `stop()` is true, no task begins. Those that run have `grace_s` to end, then
    they are killed, and the results end. With `keep`, so many processes, each with the resources of the first task, stay until the end
    and keep what `work` has loaded.

    Raises the ValueError, RuntimeError or OSError of a task, and RuntimeError naming a task whose process ends again and again. Without
    a `watch`, each task has a process of its own and is not repeated.
    """
    import ray

    remote: Any = ray.remote
    any_process = (remote(max_retries=-1) if watch else remote(max_retries=0, max_calls=1))(_begun)
    pickled, labels = ray.cloudpickle.dumps(work), _label_selector()
    workers, idle = list[Any](), list[Any]()
    if keep and tasks:
        kept = remote(max_restarts=-1, max_task_retries=-1)(_Worker)
        kept = kept.options(num_cpus=tasks[0].cpus, num_gpus=tasks[0].gpus, label_selector=labels)
        workers = [kept.remote() for _ in range(min(keep, len(tasks)))]
    # What Ray runs: its task, and its worker where processes are kept. A worker gets no task before its process has started.
    running: dict[Any, tuple[RayTask[T] | None, Any]] = {worker.begin.remote(): (None, worker) for worker in workers}
    queued, kill_at = set[Any](), math.inf  # what waits for a process, of which a worker has its own
    try:
        while (tasks and kill_at == math.inf) or any(task for task, _ in running.values()):
            while tasks and kill_at == math.inf and (idle or not workers):
                task, worker = tasks.popleft(), idle.pop() if workers else None
                method = worker.run if worker else any_process
                placed: dict[str, Any] = {} if worker else {"num_cpus": task.cpus, "num_gpus": task.gpus}
                if task.node:
                    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                    placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(task.node, soft=False)
                elif not worker:
                    placed["label_selector"] = labels
                stream = method.options(name=task.key, num_returns="streaming", **placed).remote(
                    pickled, pickle.dumps(task.argument), task.key, watch
                )
                running[stream] = task, worker
                if not worker:
                    queued.add(stream)
            ready: list[Any] = ray.wait(list(running), num_returns=1, timeout=_POLL_S)[0]
            for stream in ready:
                begun, worker = running[stream]
                found: Any = next(stream, None) if begun else None
                if begun is None or found is None:
                    del running[stream]
                    idle.append(worker)
                    continue
                queued.discard(stream)
                if (answer := ray.get(found)) is None:
                    continue
                result, error = answer
                if error is not None:
                    raise error
                yield begun.argument, result
            if stop():
                kill_at = min(kill_at, time.monotonic() + grace_s)
                if time.monotonic() >= kill_at:
                    return
                for stream in queued:
                    ray.cancel(stream, force=True)
                    del running[stream]
                queued.clear()
    finally:
        for stream in running if not workers else ():
            ray.cancel(stream, force=True)
        for worker in workers:
            ray.kill(worker)


def run_many(work: Callable[[T], Any], tasks: Sequence[RayTask[T]], *, watch: TaskWatch | None = None) -> Iterator[Any]:
    """The results of `work(argument)` for up to hundreds of thousands of tasks, in any order, by one execution of Ray Data.

    Each task has one CPU. Raises like `run_keyed`.
    """
    import ray.data

    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # logs start and end of each execution; ray-data.log keeps these lines
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = False
    rows = [{**task._asdict(), "argument": pickle.dumps(task.argument)} for task in tasks]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))
    in_row = functools.partial(_row_result, work=ray.cloudpickle.dumps(work), watch=watch)
    for row in dataset.map(in_row, num_cpus=1, label_selector=_label_selector()).iter_rows():
        result, error = pickle.loads(row["result"])
        if error is not None:
            raise error
        yield result


def _label_selector() -> dict[str, str] | None:
    return dict(Settings().node_labels) or None


class _Worker:
    """A process that is kept."""

    def begin(self) -> None:
        """Returns once the process has started."""

    def run(self, *given: Any) -> Iterator[tuple[Any, Exception | None]]:
        yield from _results(*given)


def _begun(*given: Any) -> Iterator[tuple[Any, Exception | None] | None]:
    """None as the process of a task begins, then its results."""
    yield None
    yield from _results(*given)


def _row_result(row: dict[str, Any], work: bytes, watch: TaskWatch | None) -> dict[str, bytes]:
    (result,) = _results(work, row["argument"], row["key"], watch, row["notes_progress"])
    return {"result": pickle.dumps(result)}


def _results(
    work: bytes, argument: bytes, key: str, watch: TaskWatch | None, notes_progress: bool = True
) -> Iterator[tuple[Any, Exception | None]]:
    """In the process of a task: its results, then the error that ended it, as Ray would wrap an exception in pages of traceback."""
    try:
        require_same_versions()
        with watch.over(key, notes_progress) if watch else contextlib.nullcontext():
            made = _loaded(work)(pickle.loads(argument))
            for result in made if isinstance(made, Iterator) else [made]:
                yield result, None
    except ModuleNotFoundError as error:
        yield None, lacking(error)
    except (ValueError, RuntimeError, OSError) as error:
        yield None, sendable(error)


@functools.lru_cache(maxsize=1)
def _loaded(work: bytes) -> Callable[[Any], Any]:
    """Once in each process, which then keeps what `work` has loaded."""
    loaded: Callable[[Any], Any] = pickle.loads(work)
    return loaded
