"""The services that every stage works with: cluster, observer, sender to MLflow, settings, and the origin of the request."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vitline.flows import console
from vitline.flows.catalog.records import Origin
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.local.child_jobs import ChildJobs
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.local.paths import log_dir
from vitline.infra.ray_jobs import JobLost, RayJobs
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import StopReason
from vitline.infra.settings import Settings
from vitline.infra.storage import Unwritable, check_writable, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
# How long a running child job may take to stop by itself.
CHILD_GRACE_S = 5.0
# Lines of the log of a job that a terminal shows after its end.
LOG_LINES = 15
Show = Callable[[RunProgress | None], None]


class StopRequested(Exception):
    """Raised by `Observer.check` during a stage: stop its job for this reason. The text says what requested the stop."""

    def __init__(self, reason: StopReason, text: str):
        super().__init__(text)
        self.reason: StopReason = reason


class Suspended(StopRequested):
    """A stop for a suspended flow run, which has not ended: its job stops with a checkpoint, and the same flow run continues
    from there once it is resumed."""


class Observer:
    """Reports the progress of stages and can request a stop: a terminal, or a Prefect flow run. This one does nothing."""

    deadline: float | None = None
    """In `time.monotonic()` seconds."""

    def say(self, text: str) -> None:
        """Reports a line of text."""

    def stage(self, title: str) -> AbstractContextManager[Show]:
        """Shows the progress of one stage."""
        return contextlib.nullcontext(lambda progress: None)

    def table(self, key: str, description: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Shows a table; `key` tells it from others of the same stage."""

    def page(self, key: str, description: str, markdown: Callable[[], str]) -> None:
        """Shows a text in Markdown."""

    def links(self, key: str, description: str, links: Mapping[str, str]) -> object:
        """Shows a small table of links, whose texts are Markdown."""
        return None

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: Callable[[], str | None]) -> None:
        """Reports where the job of a stage can be seen after it was submitted. `mlflow_url()` is None until MLflow has the run."""

    def outline(self, title: str, parts: Sequence[str], links: Mapping[str, Callable[[], str | None]]) -> None:
        """Shows the parts of a pipeline before they begin, and links to pages that may come later."""

    def report(self, what: str, where: Callable[[], str | None]) -> None:
        """Shows where the current part has left something to look at."""

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        """Reports the end of the log of a job that did not finish."""

    def time_left(self) -> float | None:
        """Seconds until `check` raises StopRequested for the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        """Is called every second while a job runs. Raises StopRequested to stop it."""

    def stop(self, error: BaseException) -> StopRequested | None:
        """The stop request for the job that an error stands for; None leaves the job running."""
        return error if isinstance(error, StopRequested) else None

    def part(self, name: str, title: str, request: dict[str, Any], body: Callable[[], T], row: str | None = None) -> T:
        """Runs one part of a pipeline, in Prefect as a subflow. `row` is its name in the outline, if that is another one."""
        return body()


class ConsoleObserver(Observer):
    """Observer for a command in a shell: Ctrl-C, SIGTERM and SIGHUP stop the job with a checkpoint."""

    def say(self, text: str) -> None:
        console.say(text)

    def stage(self, title: str) -> AbstractContextManager[Show]:
        return console.progress(title)

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: Callable[[], str | None]) -> None:
        log.debug("run=%s job=%s uri=%s", run_key, job_page, run_uri)

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        console.say(f"The last lines of the log of {run_key}:\n" + "\n".join(log_tail.splitlines()[-LOG_LINES:]))

    def stop(self, error: BaseException) -> StopRequested | None:
        if isinstance(error, KeyboardInterrupt):
            return StopRequested("preempted", f"stopped by {str(error) or 'Ctrl-C'}")
        return super().stop(error)


class Cluster:
    """The cluster that runs jobs: the job server at RAY_ADDRESS, else a one-node Ray that is started for the first job.

    A command whose stages are all finished starts nothing. Leaving the context stops what it started.
    """

    def __init__(
        self,
        settings: Settings,
        log_dir: Path,
        announce: Callable[[str], None] = log.info,
        check: Callable[[], None] = lambda: None,
    ):
        self.settings, self.log_dir, self.announce, self.check = settings, log_dir, announce, check
        self._address = settings.job_server()
        self.local: LocalRay | None = None
        self._jobs: RayJobs | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self.local is not None:
            self.local.__exit__(None, None, None)

    def restart(self) -> None:
        """After the cluster was lost: the next job starts a local Ray again or connects to the remote one again."""
        self.__exit__()
        self.local, self._jobs = None, None

    @property
    def python(self) -> str:
        """The Python of jobs."""
        return self.settings.python_of_jobs()

    @property
    def jobs(self) -> RayJobs:
        if self._jobs is None:
            address, token = self._address, None
            if address is None:
                self.announce("starting a one-node Ray (dashboard on loopback, token authentication)")
                self.local = LocalRay(self.log_dir / "local-ray", announce=self.announce)
                self.local.__enter__()
                env = self.local.env
                address, token = env["RAY_ADDRESS"], env["RAY_AUTH_TOKEN_PATH"]
            root = open_store(self.settings.root).uri
            self._jobs = RayJobs(address, token, root=root, report=self.announce, while_away=self._while_away)
        return self._jobs

    def _while_away(self) -> None:
        """A stop that the observer requests does not wait for Ray, and a Ray of this process that has ended does not return."""
        self.check()
        if self.local is not None and self.local.has_ended():
            raise JobLost(f"the one-node Ray of this command has ended; its logs are in {self.log_dir}.")


class LocalProcesses(Cluster):
    """Runs small jobs as child processes of this one, without a cluster."""

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
class Services:
    """The services that a command or flow run works with; every stage gets them."""

    settings: Settings
    cluster: Cluster
    observer: Observer
    sender: SenderChild
    origin: Origin = field(default_factory=Origin)
    """The command or flow run that requested the work."""

    def follow(self, run_key: str) -> None:
        """Sends a started or finished run, and what it adds later, to MLflow."""
        self.sender.follow(run_key)

    def wait(self, seconds: float) -> None:
        """Waits, unless the observer requests a stop."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self.observer.check()
            time.sleep(min(left_s, 2.0))

    @property
    def root(self) -> str:
        return self.settings.root


def _logs(settings: Settings) -> Path:
    try:
        return log_dir(settings)
    except Unwritable:
        if settings.home is None:
            check_writable(open_store(settings.root))  # the folder is beside the root: the error names the root
        raise


@contextlib.contextmanager
def open_services(
    settings: Settings, observer: Observer | None = None, origin: Origin | None = None
) -> Iterator[Services]:
    """The services of one command or flow run. At its end, what it started is stopped and MLflow is sent the rest."""
    observer, logs = observer or ConsoleObserver(), _logs(settings)
    with (
        Cluster(settings, logs, observer.say, observer.check) as cluster,
        SenderChild(settings, logs) as sender,
    ):
        yield Services(settings, cluster, observer, sender, origin or Origin())
        if unsent := sender.close():
            observer.say(
                f"MLflow lacks parts of {', '.join(unsent)}; a sender that runs sends the rest, as does `vitline runs send`."
            )
