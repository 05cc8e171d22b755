"""What every stage works with: the cluster, whoever looks on, the shipper to MLflow, and who asked."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flows import console
from flows.records import Origin
from flows.to_mlflow.shipper import Shipper
from infra.local.child_jobs import ChildJobs
from infra.local.paths import log_dir
from infra.local.ray_node import LocalRay
from infra.ray_jobs import RayJobs
from infra.runs.run_state import StopReason
from infra.settings import Settings
from infra.storage import Unwritable, check_writable, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
# What MLflow may take of the time in which a cancelled flow is to end.
HURRY_S = 5.0
# What a child that is at work gets to end in order.
CHILD_GRACE_S = 5.0
Progress = dict[str, Any]
Show = Callable[[Progress | None], None]


class StopRequested(Exception):
    """Raised by `Observer.check` in the middle of a stage: stop its job for this reason. The text says who wants it."""

    def __init__(self, reason: StopReason, text: str):
        super().__init__(text)
        self.reason: StopReason = reason


class Suspended(StopRequested):
    """A stop after which the flow run is neither over nor failed: its job gives way with a checkpoint, and the same flow
    run goes on from there once it is resumed."""


class Observer(Protocol):
    """Who looks on while stages run, and may stop them: a terminal, or a Prefect flow run."""

    def say(self, text: str) -> None:
        """A line about what is going on."""

    def stage(self, title: str) -> AbstractContextManager[Show]:
        """Shows the progress of one stage."""

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: str | None) -> None:
        """A stage's job was submitted; where to look at it."""

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        """A stage's job ended badly; the end of its log."""

    def time_left(self) -> float | None:
        """Seconds until `check` raises StopRequested for the deadline; None without one."""

    def check(self) -> None:
        """Called every second while a job runs. Raises StopRequested to end it."""

    def stop(self, error: BaseException) -> StopRequested | None:
        """What interrupted the following as a stop of its job, in words for people; None leaves the job at work."""

    def part(self, name: str, title: str, request: dict[str, Any], body: Callable[[], T]) -> T:
        """Runs one part of a pipeline, as a subflow where there are flows."""


class Terminal:
    """A person at a shell: Ctrl-C asks for a checkpoint and stops."""

    def say(self, text: str) -> None:
        console.say(text)

    def stage(self, title: str) -> AbstractContextManager[Show]:
        return console.progress(title)

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: str | None) -> None:
        log.debug("run=%s job=%s uri=%s", run_key, job_page, run_uri)

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        log.debug("run=%s failed: %s", run_key, reason)

    def time_left(self) -> float | None:
        return None

    def check(self) -> None:
        return None

    def stop(self, error: BaseException) -> StopRequested | None:
        if isinstance(error, KeyboardInterrupt):
            return StopRequested("preempted", "stopped by Ctrl-C")
        return error if isinstance(error, StopRequested) else None

    def part(self, name: str, title: str, request: dict[str, Any], body: Callable[[], T]) -> T:
        return body()


class Cluster:
    """Where jobs are sent: the job server at RAY_ADDRESS, else a one-node Ray that is started at the first job.

    A command whose stages are all finished starts nothing. Leaving the context stops what was started here.
    """

    def __init__(self, settings: Settings, log_dir: Path, announce: Callable[[str], None] = log.info):
        self.settings, self.log_dir, self.announce = settings, log_dir, announce
        self.local: LocalRay | None = None
        self._jobs: RayJobs | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self.local is not None:
            self.local.__exit__(None, None, None)

    def restart(self) -> None:
        """After the cluster was lost: a local Ray is started anew at the next job, a remote one is asked again."""
        self.__exit__()
        self.local, self._jobs = None, None

    @property
    def python(self) -> str:
        """The Python of jobs: as set, else our own on a Ray that was started here, else whatever `python` is there."""
        return self.settings.job_python or (sys.executable if self.settings.ray_address is None else "python")

    @property
    def jobs(self) -> RayJobs:
        if self._jobs is None:
            address = self.settings.ray_address
            if address is None:
                self.announce("starting a one-node Ray (dashboard on loopback, token authentication)")
                self.local = LocalRay(self.log_dir)
                self.local.__enter__()
                env = self.local.env
                self._jobs = RayJobs(env["RAY_ADDRESS"], token_path=env["RAY_AUTH_TOKEN_PATH"])
            else:
                self._jobs = RayJobs(address)
        return self._jobs


class Here(Cluster):
    """Where small jobs are run without a cluster: as child processes of this one."""

    @property
    def python(self) -> str:
        return sys.executable

    def __exit__(self, *_: object) -> None:
        if self._jobs is not None:
            self.jobs.close(CHILD_GRACE_S)

    @property
    def jobs(self) -> ChildJobs:
        self._jobs = self._jobs or ChildJobs(self.log_dir)
        assert isinstance(self._jobs, ChildJobs)
        return self._jobs


@dataclass
class Engines:
    """Handed through every flow; see the fields."""

    settings: Settings
    cluster: Cluster
    observer: Observer
    shipper: Shipper
    origin: Origin = field(default_factory=Origin)
    """Who asked."""

    @property
    def root(self) -> str:
        return self.settings.root


def _logs(settings: Settings) -> Path:
    try:
        return log_dir(settings)
    except Unwritable:
        if settings.home is None:  # the folder is beside the root: where that cannot be written either, it is named
            check_writable(open_store(settings.root))
        raise


@contextlib.contextmanager
def open_engines(
    settings: Settings, observer: Observer | None = None, origin: Origin | None = None
) -> Iterator[Engines]:
    """The engines of one command or flow run; what was started for it ends with it, and MLflow is sent the rest."""
    observer, logs = observer or Terminal(), _logs(settings)
    with Cluster(settings, logs, observer.say) as cluster, Shipper(settings, logs) as shipper:
        try:
            yield Engines(settings, cluster, observer, shipper, origin or Origin())
        except BaseException:
            shipper.close(HURRY_S)
            raise
        if left := shipper.close():
            observer.say(
                f"MLflow has not got all of {', '.join(left)} yet; the stack's shipper sends the rest, as does "
                "`vitline runs sync`."
            )
