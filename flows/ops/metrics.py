"""What is at work in a root, for Prometheus: `vitline ops metrics`.

Each scrape reads the store, and only that. So a training that is restarted loses no counts, jobs on a network that Prometheus does not
reach are seen, too, and one exporter is enough for a root. What Ray, Prefect and MLflow say of themselves comes from them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from vitline.flows import console
from vitline.flows.catalog.lists import pipeline_row, run_rows
from vitline.flows.catalog.records import attempt_records
from vitline.flows.catalog.run_status import AT_WORK, RunRow
from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.flows.nights.from_records import known_nights
from vitline.flows.nights.night_record import last_told
from vitline.flows.to_mlflow import outbox
from vitline.infra.runs.segments import list_segments, read_segments
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.names import find_checkpoints

log = logging.getLogger(__name__)
RUN = ("run", "stage")


class Metric(NamedTuple):
    """A gauge by its name without the prefix `vitline_`."""

    name: str
    help: str
    labels: tuple[str, ...] = RUN


METRICS = (
    Metric("root_up", "1 if the store of the root answered this scrape, else 0.", ()),
    Metric("runs", "Runs and pipelines by their newest state.", ("stage", "state")),
    Metric("run_step", "Finished steps, trials or units of a run at work."),
    Metric("run_total_steps", "Steps, trials or units that a run at work has in all."),
    Metric("run_images_per_second", "Images per second over all workers."),
    Metric("run_remaining_seconds", "Estimated seconds to the end of a run at work."),
    Metric("run_waiting", "1 while the workers of a run wait for room on the cluster, else 0."),
    Metric("run_attempts", "Attempts of a run at work; more than one after preemptions and lost nodes."),
    Metric("run_heartbeat_timestamp_seconds", "Newest heartbeat of a run at work, by the clock of its driver."),
    Metric("run_checkpoint_step", "Step of the newest checkpoint of a training at work; 0 before the first."),
    Metric("run_unsaved_seconds", "Training time since that checkpoint at the present speed: what a lost node costs."),
    Metric(
        "run_goodput_ratio", "Share of the time since the first attempt that the kept steps take at the present speed."
    ),
    Metric("run_metric", "Newest value of a metric in the journal of a training at work.", (*RUN, "metric")),
    Metric("night_timestamp_seconds", "Scheduled start of the newest night of a series that has ended.", ("series",)),
    Metric("night_verdict", "1 for the verdict of that night, or for why it has none.", ("series", "verdict")),
    Metric("mlflow_unsent", "Runs and pipelines of which MLflow may lack something.", ()),
)

Sample = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, and its value."""


class RootMetrics(Collector):
    """The metrics of a root, read anew at each scrape. A store that does not answer leaves `root_up` 0 and nothing else."""

    def __init__(self, root: str, clock: Callable[[], float] = time.time) -> None:
        self._root, self._clock = root, clock

    def describe(self) -> list[GaugeMetricFamily]:
        return list(_families().values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = _families()
        try:
            samples = [*_samples(open_store(self._root), self._clock()), ("root_up", (), 1.0)]
        except (OSError, RuntimeError, ValueError):
            log.warning("no metrics of %s: its store did not answer", self._root, exc_info=True)
            samples = [("root_up", (), 0.0)]
        for name, labels, value in samples:
            families[name].add_metric(labels, value)
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily]:
    return {each.name: GaugeMetricFamily(f"vitline_{each.name}", each.help, labels=each.labels) for each in METRICS}


def _samples(root: Store, now: float) -> Iterator[Sample]:
    with RootSnapshot.read(root, leases=True) as snapshot:
        runs = run_rows(snapshot)
        pipelines = [pipeline_row(root, stored.record) for stored in snapshot.pipelines.values()]
        for (stage, state), number in Counter((row["stage"], row["state"]) for row in [*runs, *pipelines]).items():
            yield "runs", (stage, state), number
        for row in runs:
            if row["state"] in AT_WORK:
                for name, value in _of_run(snapshot.runs[row["run"]], row, now).items():
                    yield name, (row["run"], row["stage"]), value
                for metric, value in _newest_values(snapshot.runs[row["run"]].store).items():
                    yield "run_metric", (row["run"], row["stage"], metric), value
    yield from _of_nights(root)
    yield "mlflow_unsent", (), len(outbox.listed(root))


def _of_run(run: StoredRun, row: RunRow, now: float) -> dict[str, float]:
    """The metrics of one run at work, by name."""
    known = {
        "run_step": row.get("step"),
        "run_total_steps": row.get("total_steps") or None,
        "run_images_per_second": row.get("images_per_s"),
        "run_remaining_seconds": row.get("remaining_s"),
        "run_waiting": float(row["state"] != "running"),
        "run_attempts": run.attempts,
        "run_heartbeat_timestamp_seconds": run.lease.heartbeat if run.lease else None,
    }
    config = run.config()
    if "config" in config:
        training, step, rate = config["config"], row.get("step"), row.get("images_per_s")
        saved = max((name.step for name in find_checkpoints(run.checkpoints).unmarked), default=0)
        known["run_checkpoint_step"] = saved
        if step and rate:
            first = (training.get("parent") or {}).get("step", 0)
            seconds = training["recipe"]["input"]["global_batch_size"] / rate
            known["run_unsaved_seconds"] = max(0, step - max(saved, first)) * seconds
            began = min(record.started_at for record in attempt_records(run.records))
            known["run_goodput_ratio"] = min(1.0, (step - first) * seconds / max(now - began, seconds))
    return {name: float(value) for name, value in known.items() if value is not None}


def _newest_values(run: Store) -> dict[str, float]:
    """The newest value of each metric in the last segment of each journal of the newest attempt."""
    segments = list_segments(run)
    newest = {each.journal: each for each in segments if each.attempt == segments[-1].attempt}
    return {record.key: record.value for records in read_segments(run, [*newest.values()]) for record in records}


def _of_nights(root: Store) -> Iterator[Sample]:
    nights = known_nights(root, lambda unreadable: log.warning("%s", unreadable), most=2)
    for series in dict.fromkeys(night.name for night in nights):
        if night := last_told([each for each in nights if each.name == series]):
            yield "night_timestamp_seconds", (series,), night.night.timestamp()
            yield "night_verdict", (series, night.verdict.word if night.verdict else night.outcome), 1.0


def serve(root: str, host: str, port: int) -> None:
    """Serves the metrics at `http://host:port/metrics` until the process is interrupted. Raises ValueError for an address that cannot be
    used."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(RootMetrics(root))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(
            f"Metrics cannot be served at {host}:{port} ({error.strerror}). Choose another --port or --host."
        ) from error
    with suppress(KeyboardInterrupt):  # there is nothing to resume
        console.say(f"metrics at http://{host}:{port}/metrics")
        thread.join()
    server.shutdown()


def metrics_text(root: str) -> str:
    """The metrics in Prometheus' text format, once."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(RootMetrics(root))
    return generate_latest(registry).decode()
