"""Priority between the trainings of a root: one that finds no room stops others of lower priority, one after the other."""

import time

from vitline.flows.catalog.stored_configs import JSON, RunFile
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import has_begun, run_store
from vitline.infra.ray_jobs import Job
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.run_state import request_stop
from vitline.infra.settings import Settings
from vitline.vit.config import ExecutionConfig
from vitline.vit.run.run_spec import START_TRY_S, read_progress

ROOM_S = 2 * START_TRY_S
"""Seconds after the end of a training in which Ray will have tried to place another one in its room."""


class RoomMaker:
    """Makes room for the run `key`. The trainings that it stops save a checkpoint and resume once there is room."""

    def __init__(self, services: Services, key: str, execution: ExecutionConfig) -> None:
        self._services, self._key, self._execution = services, key, execution
        self._asked, self._not_before = "", 0.0  # the job that was asked to stop, and when another one may be

    def __call__(self) -> None:
        """To be called again and again while there is no room. Asks the training of the lowest priority, of several the one that has
        begun last, if what the one before has left did not suffice."""
        jobs = [job for job in self._services.cluster.jobs.list() if not job.terminal]
        if self._asked in {job.id for job in jobs}:
            return
        if self._asked:
            self._asked, self._not_before = "", time.monotonic() + ROOM_S
        if time.monotonic() < self._not_before:
            return
        lower = [
            (found, -(job.started_at or 0), job) for job in jobs if (found := self._lower_priority(job)) is not None
        ]
        if lower:
            priority, _, job = min(lower, key=lambda found: found[:2])
            self._stop(priority, job)

    def _lower_priority(self, job: Job) -> int | None:
        """The priority of a training at work that is lower than ours, and whose room ours can use; else None."""
        key = job.metadata.get("run_key")
        if key in (None, self._key) or not has_begun(self._services, job):
            return None
        run = run_store(self._services.root, key)
        config: RunFile | None = run.read_json_or_none("config.json")
        if config is None or "config" not in config or (read_progress(run) or {}).get("waiting_for"):
            return None
        other = config["config"]["execution"]  # perhaps of another version of vitline
        priority: int = other.get("priority", 0)
        return priority if priority < self._execution.priority and self._can_use_room_of(job, other) else None

    def _can_use_room_of(self, job: Job, other: JSON) -> bool:
        if self._services.cluster.jobs.runs_one_training():
            return True
        ours, theirs = self._execution.placement, other.get("placement", {})
        labels = {**Settings().node_labels, **ours.node_labels}
        their_labels = {**job.node_labels, **theirs.get("node_labels", {})}
        pairs: list[tuple[str | None, str | None]]
        pairs = [(label, their_labels.get(name)) for name, label in labels.items()]
        pairs.append((ours.accelerator_type, theirs.get("accelerator_type")))
        pairs.append((self._execution.device, other.get("device")))
        return all(a == b or {a, b} & {None, "auto"} for a, b in pairs)

    def _stop(self, priority: int, job: Job) -> None:
        run = run_store(self._services.root, job.metadata["run_key"])
        lease = read_lease(run)
        if lease is None or lease.job_id != job.id:
            return
        ours = self._execution.priority
        by = f"to make room for {self._key}, whose priority is {ours}, not {priority}"
        request_stop(run, "preempted", by=by, attempt=lease.attempt)
        self._asked = job.id
        self._services.observer.say(
            f"{lease.run_key} (priority {priority}) was asked to make room for {self._key} (priority {ours}); it saves a checkpoint and "
            "resumes later"
        )
