"""What every stage works with: the cluster, whoever looks on, the shipper to MLflow, and who asked."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flows import console
from flows.records import Origin
from flows.shipper import Shipper
from infra.local.paths import log_dir
from infra.local.ray_node import LocalRay
from infra.ray_jobs import RayJobs
from infra.run_state import StopReason
from infra.settings import Settings
from infra.storage import Unwritable, check_writable, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
# What MLflow may take of the time in which a cancelled flow is to end.
HURRY_S = 5.0
Progress = dict[str, Any]
Show = Callable[[Progress | None], None]


class StopRequested(Exception):
    """Raised by `Watch.check` in the middle of a stage: stop its job for this reason."""

    def __init__(self, reason: StopReason, text: str):
        super().__init__(text)
        self.reason: StopReason = reason


class Watch(Protocol):
    """Who looks on while stages run, and may stop them: a terminal, or a Prefect flow run."""

    def say(self, text: str) -> None:
        """A line about what is going on."""

    def stage(self, title: str) -> AbstractContextManager[Show]:
        """Shows the progress of one stage."""

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: str | None) -> None:
        """A stage's job was submitted; where to look at it."""

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        """A stage's job ended badly; the end of its log."""

    def check(self) -> None:
        """Called every second while a job runs. Raises StopRequested to end it."""

    def stop_reason(self, error: BaseException) -> StopReason | None:
        """Whether what interrupted the following is to stop the job; None leaves it at work."""

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

    def check(self) -> None:
        return None

    def stop_reason(self, error: BaseException) -> StopReason | None:
        if isinstance(error, StopRequested):
            return error.reason
        return "preempted" if isinstance(error, KeyboardInterrupt) else None

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


@dataclass
class Engines:
    """Handed through every flow; see the fields."""

    settings: Settings
    cluster: Cluster
    watch: Watch
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
def engines(settings: Settings, watch: Watch | None = None, origin: Origin | None = None) -> Iterator[Engines]:
    """The engines of one command or flow run; what was started for it ends with it, and MLflow is sent the rest."""
    looking, logs = watch or Terminal(), _logs(settings)
    with Cluster(settings, logs, looking.say) as cluster, Shipper(settings, logs) as shipper:
        try:
            yield Engines(settings, cluster, looking, shipper, origin or Origin())
        except BaseException:
            shipper.close(HURRY_S)
            raise
        if left := shipper.close():
            looking.say(f"MLflow has not got all of {', '.join(left)} yet; `vitline runs sync` sends the rest.")
