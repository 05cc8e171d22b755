"""What needs a person and no process can mend: a training that makes no step, a scheduled run that did not start, a full disk.

Prefect shows what failed. These three fail nothing, so `reconcile` looks for them every time it runs.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from vitline.flows.catalog.run_status import progress_of
from vitline.flows.ops.flow_run_checks import schedule_problems
from vitline.infra.config import FrozenConfig
from vitline.infra.local.paths import free_disk
from vitline.infra.ray_jobs import Job
from vitline.infra.records import UnreadableRecord
from vitline.infra.settings import Settings
from vitline.infra.storage import Store

log = logging.getLogger(__name__)
SEEN = "ops/alerts.json"
Kind = Literal["stalled", "not-started", "disk"]


class Problem(NamedTuple):
    """Something that a person has to look at."""

    kind: Kind
    subject: str
    """What it is about: equal in every look, so that one problem is reported once."""
    text: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.subject}"


class SeenProgress(FrozenConfig):
    """The finished steps or units of a job, and since when they have been the same by the clock of reconcile."""

    step: int
    since: float


class AlertState(FrozenConfig):
    """`ops/alerts.json`: what the looks so far have seen. One that is lost costs one repeated alert."""

    schema_version: int = 1
    told: tuple[str, ...] = ()
    """Problems that were reported and are still there, as `kind subject`."""
    progress: dict[str, SeenProgress] = Field(default_factory=dict)
    """By run key."""


def read_alert_state(root: Store) -> AlertState:
    try:
        return AlertState.model_validate(root.read_json_or_none(SEEN) or {})
    except (ValueError, ValidationError):
        log.warning("%s cannot be read; what it held is reported again", root.uri_of(SEEN))
        return AlertState()


def notify_new(
    settings: Settings,
    root: Store,
    jobs: Iterable[Job],
    tell: Callable[[Problem], object],
    *,
    stalled_minutes: float,
    min_free_bytes: float,
) -> list[Problem]:
    """The problems of this moment. New ones are reported, and remembered until they are gone; what
    `tell` raises is raised here, and the next check reports them again."""
    seen, now = read_alert_state(root), time.time()
    progress = dict(progress_now(root, jobs, seen, now))
    found = [
        *stalled(progress, stalled_minutes, now),
        *not_started(settings),
        *disk_nearly_full(settings, min_free_bytes),
    ]
    for problem in found:
        if problem.name not in seen.told:
            tell(problem)
    told = tuple(sorted({problem.name for problem in found}))
    root.write_json(SEEN, AlertState(told=told, progress=progress).model_dump(mode="json"))
    return found


def progress_now(root: Store, jobs: Iterable[Job], seen: AlertState, now: float) -> Iterator[tuple[str, SeenProgress]]:
    """The progress of every training and preparation at work, by run key."""
    for job in jobs:
        if job.terminal or "run_key" not in job.metadata:
            continue
        key = job.metadata["run_key"]
        run = root.child(f"runs/{key}")
        try:
            progress = progress_of(root, run, run.read_json("config.json")) or {"step": 0}
        except (FileNotFoundError, UnreadableRecord):
            continue
        if progress.get("unit") == "trials":  # one may take hours, and ends by its own watchdog if it hangs
            continue
        known, step = seen.progress.get(key), progress["step"]
        yield key, known if known and known.step == step else SeenProgress(step=step, since=now)


def stalled(progress: dict[str, SeenProgress], minutes: float, now: float) -> Iterator[Problem]:
    for key, one in progress.items():
        if now - one.since >= 60 * minutes:
            still = f"{(now - one.since) / 60:,.0f} min"
            yield Problem("stalled", key, f"{key} has made no step for {still}: look at its log, or preempt it.")


def not_started(settings: Settings) -> Iterator[Problem]:
    if settings.prefect_api_url is None:
        return
    for problem in schedule_problems(settings):
        # Without the number of runs, which grows while nobody takes them.
        yield Problem("not-started", problem.rpartition("(")[2].rstrip(")"), f"{problem}.")


def disk_nearly_full(settings: Settings, min_free_bytes: float) -> Iterator[Problem]:
    """Of the machine where this runs; with the local stack, that is also the disk of its store."""
    folder, free = free_disk(settings)
    if free < min_free_bytes:
        text = f"{free / 1e9:.1f} GB are left on the disk of {folder}; `vitline ops collect-garbage` lists what can go."
        yield Problem("disk", folder, text)
