"""The observer of a Prefect flow run: artifacts on its page, lines in its log, cancellation, suspension and deadline.

The design follows from the behaviour of Prefect 3.8. A cancelled run whose worker died is not notified, so a thread reads the
state of the run every second. No task may run while a flow is cancelled, so there are no tasks. A hook for crashed flows would
stop trainings that should continue, so there is none. The server may be down at any time: then artifacts are skipped, and a
run that is about to end waits for the server.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from prefect import flow, get_client, runtime
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Pending

from vitline.flows.on_prefect.flow_states import state_of, word_of
from vitline.flows.on_prefect.live_page import LivePage, Url
from vitline.flows.runs.services import Observer, Show, StopRequested, Suspended
from vitline.infra.html.tables import markdown
from vitline.infra.ray_jobs import AWAY_S
from vitline.infra.redact import cleaned
from vitline.infra.runs.progress import RunProgress, position, progress_line
from vitline.infra.settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 1.0
SHOW_EVERY_S = 2.0
REFRESH_EVERY_S = 5.0
LOG_EVERY_S = 15.0
LOG_STILL_EVERY_S = 300.0
CANCELLED = "cancelled in Prefect"
SUSPENDED = "suspended in Prefect; Resume continues from the checkpoint"


def client() -> SyncPrefectClient:
    """A client that answers or fails within seconds. Raises RuntimeError if no server is configured, because Prefect would
    then start its own, in the home folder."""
    if Settings().prefect_api_url is None:
        raise RuntimeError("PREFECT_API_URL is not set. `make up` starts a server here; or set it to your own server.")
    return get_client(sync_client=True, httpx_settings={"timeout": 10.0})


def slug(text: str) -> str:
    """An artifact key: lower case, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class _StoreWarnings(logging.Handler):
    """Shows on the page of a flow run that the store is away or overloaded, and that its requests are repeated."""

    def __init__(self, run_log: logging.LoggerAdapter[Any] | logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._run_log = run_log

    def emit(self, record: logging.LogRecord) -> None:
        self._run_log.warning(cleaned(record.getMessage()))


class PrefectObserver(Observer):
    """Observer of one outermost flow run. As a context it reads the run's state."""

    def __init__(self, flow_run_id: UUID):
        self._flow_run_id = flow_run_id
        self._cancelled = self._suspended = False
        self.deleted = False
        """Whether somebody has deleted the flow run in Prefect. Its work continues, and Prefect shows it no longer."""
        self._away = False
        self._in_part = False
        self._part_id: UUID | None = None
        self._page: LivePage | None = None
        self._job: Callable[[], None] = lambda: None  # shows the job of a stage again
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read_state, name="flow-run-state", daemon=True)
        # One for all reads: each new client loads all certificates of the system again.
        self._client = client()

    def __enter__(self) -> "PrefectObserver":
        self._run_log = get_run_logger()
        self._store_warnings = _StoreWarnings(self._run_log)
        logging.getLogger("vitline.infra.stores").addHandler(self._store_warnings)
        self._client.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=15)
        self._client.__exit__()
        logging.getLogger("vitline.infra.stores").removeHandler(self._store_warnings)

    # Reports of a stage.

    def say(self, text: str) -> None:
        """Logs a line in the flow run and in the current subflow."""
        get_run_logger().info(cleaned(text))
        if self._in_part:
            self._run_log.info(cleaned(text))

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[Show]:
        """Shows the progress as a bar on the page and as a line in the log at intervals."""
        started = time.monotonic()
        key = slug(title.split()[0])
        # Prefect types its artifact functions as sync or async; called from a sync flow they are sync.
        artifact: Any = self._show(lambda: create_progress_artifact(0.0, key=key, description=title))
        drawn, logged, refreshed = [0.0], [started], [started]
        at = [position(None)]
        self.say(f"{title}: submitted")

        def show(progress: RunProgress | None) -> None:
            now = time.monotonic()
            text = progress_line(title, progress, now - started)
            waits = progress is not None and "waits" in progress
            if progress and (waits or progress["total_steps"]) and artifact and now - drawn[0] > SHOW_EVERY_S:
                drawn[0] = now
                share = 0.0 if waits else min(100.0, 100.0 * progress["step"] / progress["total_steps"])
                self._show(lambda: update_progress_artifact(artifact, share, description=text))
            if now - logged[0] > (LOG_EVERY_S if position(progress) != at[0] else LOG_STILL_EVERY_S):
                logged[0], at[0] = now, position(progress)
                self.say(text)
            if now - refreshed[0] > REFRESH_EVERY_S:
                refreshed[0] = now
                self._show(self._job)
                state = "waiting" if is_waiting(progress) else "running"
                self._on_page(lambda page: page.refresh(state, text.removeprefix(f"{title}: ")))

        yield show
        if artifact:
            self._show(lambda: update_progress_artifact(artifact, 100.0))

    def submitted(self, run_key: str, job_page: str, run_uri: str, mlflow_url: Url) -> None:
        links = {"run": f"`{run_key}`", "Ray job": f"[{job_page}]({job_page})", "store": f"`{run_uri}`"}
        self._on_page(lambda page: page.follows(run_key, job_page, mlflow_url))
        shown = self.links("job", f"Attempt of {run_key}", links)

        def again() -> None:
            if shown and (url := mlflow_url()):  # MLflow has the run a moment after its job was submitted
                self._job = lambda: None
                self._change(shown, links_text(links | {"MLflow": f"[{url}]({url})"}))

        self._job = again
        self._show(again)

    def outline(self, title: str, parts: Sequence[str], links: Mapping[str, Url]) -> None:
        """Shows the parts of a pipeline on the page of its flow run, from now on with state, time and links."""
        self._page = LivePage(parts, links, self._sender("progress", title))
        self._on_page(lambda page: page.refresh())

    def report(self, what: str, where: Url) -> None:
        self._on_page(lambda page: page.report(what, where))

    def _on_page(self, change: Callable[[LivePage], None]) -> None:
        """Changes the page of the pipeline, if this is one. Nothing that goes wrong there ends the work."""
        page = self._page
        if page is not None:
            self._show(lambda: change(page))

    def _sender(self, key: str, title: str) -> Callable[[str], None]:
        """A function that writes an artifact of the outermost flow run, also from within a subflow; each text replaces the last."""
        made = list[str]()

        def send(text: str) -> None:
            if made:
                self._change(made[0], text)
                return
            page = {"key": key, "type": "markdown", "description": title, "data": text}
            page["flow_run_id"] = str(self._flow_run_id)
            created = self._show(lambda: self._client.request("POST", "/artifacts/", json=page))
            made.extend([created.json()["id"]] if created is not None else [])

        return send

    def _change(self, artifact: object, text: str) -> None:
        self._show(
            lambda: self._client.request(
                "PATCH", "/artifacts/{id}", path_params={"id": str(artifact)}, json={"data": text}
            )
        )

    def failed(self, run_key: str, reason: str, log_tail: str) -> None:
        get_run_logger().error("%s: %s\nLast lines of its log:\n%s", run_key, reason, log_tail)
        if self._in_part:
            self._run_log.error("%s: %s", run_key, reason)
        text = f"**{run_key}** {reason}\n\nThe last lines of its job's log:\n\n```\n{log_tail}\n```\n"
        self._show(lambda: create_markdown_artifact(text, key="failure", description=f"Failure of {run_key}"))

    def links(self, key: str, description: str, links: Mapping[str, str]) -> object:
        """Shows a small table of links as an artifact; returns its id, or None if it was not sent."""
        return self._show(lambda: create_markdown_artifact(links_text(links), key=key, description=description))

    def table(self, key: str, description: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Shows a table as an artifact."""
        body = [dict(zip(columns, row, strict=True)) for row in rows]
        self._show(lambda: create_table_artifact(body, key=key, description=description))

    def page(self, key: str, description: str, markdown: Callable[[], str]) -> None:
        """Shows Markdown as an artifact; the text is only made if the server answers."""
        self._show(lambda: create_markdown_artifact(markdown(), key=key, description=description))

    # Stop requests.

    def check(self) -> None:
        if self._cancelled:
            raise StopRequested("cancelled", CANCELLED)
        if self._suspended:
            raise Suspended("suspended", SUSPENDED)
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise StopRequested("out_of_time", "the deadline of this run has passed")

    def stop(self, error: BaseException) -> StopRequested | None:
        """A cancelled run stops its job; if only the flow process is terminated, the job keeps running."""
        if isinstance(error, TerminationSignal):
            self._update_state()
            return StopRequested("cancelled", CANCELLED) if self._cancelled else None
        if isinstance(error, Pause):  # raised by Prefect, which checks between two subflows
            return Suspended("suspended", SUSPENDED)
        return super().stop(error)

    def part(self, name: str, title: str, request: dict[str, Any], body: Callable[[], T], row: str | None = None) -> T:
        """Runs the body as a subflow in this process, with its own page and the same states."""
        self._update_state()
        if self.deleted:  # Prefect refuses a part of a run that it does not know
            return body()
        self._release_parts()
        outcome: list[T] = []
        errors: list[BaseException] = []
        entered: list[str] = []

        def run(request: dict[str, Any]) -> Any:
            entered.append(runtime.flow_run.id)
            self._in_part, self._part_id = True, UUID(runtime.flow_run.id)
            self._on_page(lambda page: page.begin(row or name))
            try:
                outcome.append(body())
                self._on_page(lambda page: page.end("finished"))
                return None
            except BaseException as error:
                errors.append(error)
                ended = word_of(error)
                self._on_page(lambda page: page.end(ended))
                if isinstance(error, Suspended):
                    raise Pause(state=suspended_state()) from error
                if (state := state_of(error)) is None:
                    raise
                return state
            finally:
                self._in_part, self._part_id = False, None

        subflow = flow(name=name, flow_run_name=title, validate_parameters=False, persist_result=False)(run)
        state: Any
        try:
            state = subflow(request, return_state=True)
        except Pause as pause:
            for flow_run_id in entered:
                self._suspend_part(UUID(flow_run_id))
            raise (errors[0] if errors else Suspended("suspended", SUSPENDED)) from pause
        except ObjectNotFound:
            self._update_state()
            if not self.deleted:
                raise
            if not (outcome or errors):
                return body()
        if errors:
            raise errors[0]
        if not outcome:
            # Prefect ended it before the body was entered, as when the parent was cancelled meanwhile.
            self._update_state()
            self.check()
            raise RuntimeError(f"subflow {name} ended as {state.name}: {state.message}")
        return outcome[0]

    def _suspend_part(self, flow_run_id: UUID) -> None:
        """Shows a subflow as suspended, like its parent: Prefect itself suspends only the parent."""
        try:
            self._client.set_flow_run_state(flow_run_id, suspended_state(), force=True)
        except Exception as error:
            log.warning("could not show subflow %s as suspended: %s", flow_run_id, error)

    def _release_parts(self) -> None:
        """Lets subflows that were suspended run again: Prefect refuses to resume a run without a deployment."""
        suspended = {
            "parent_flow_run_id": {"any_": [self._flow_run_id]},
            "state": {"type": {"any_": [StateType.PAUSED]}},
        }
        for part in self._client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(suspended)):
            self._client.set_flow_run_state(part.id, Pending(), force=True)

    def wait_for_server(self) -> None:
        """Returns once Prefect answers: without the final state it would show the run as RUNNING for ever."""
        deadline, warned = time.monotonic() + AWAY_S, False
        while time.monotonic() < deadline:
            self._update_state()
            if not self._away:
                return
            if not warned:
                warned = True
                log.warning("Prefect does not answer; waiting up to %.0f s to report the end", AWAY_S)
            time.sleep(POLL_S)

    def _show(self, send: Callable[[], T]) -> T | None:
        """Sends an artifact; skips it if the server does not answer."""
        if self._away or self.deleted:
            return None
        try:
            return send()
        except Exception as error:
            log.warning("could not show an artifact: %s", error)
            return None

    def _read_state(self) -> None:
        while not self.deleted and not self._over.wait(POLL_S):
            self._update_state()

    def _update_state(self) -> None:
        try:
            state = self._client.read_flow_run(self._flow_run_id).state
            if state is not None and state.is_running() and (part := self._part_id) is not None:
                state = self._suspended_with_its_part(state, part)
            elif state is not None and state.is_paused() and state.state_details.pause_timeout is not None:
                state = self._keep_suspended(state, state.state_details.pause_timeout)
        except ObjectNotFound:
            if not self.deleted:
                log.warning("flow run %s was deleted in Prefect; its work continues unseen", self._flow_run_id)
            self.deleted, self._away = True, False
            return
        except Exception as error:
            if not self._away:
                log.warning("Prefect does not answer (%s); the run continues", error)
            self._away = True
            return
        self._away = False
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self._cancelled = True
        # If it was resumed within a second, it already waits for another process, for which this one must release its leases.
        if state is not None and (state.is_paused() or state.is_scheduled() or state.is_pending()):
            self._suspended = True

    def _suspended_with_its_part(self, seen: State, part: UUID) -> State:
        """The state of the run: somebody who suspends a part on its page suspends the whole run."""
        state = self._client.read_flow_run(part).state
        if state is None or not state.is_paused():
            return seen
        return self._keep_suspended(seen, state.state_details.pause_timeout)

    def _keep_suspended(self, seen: State, until: datetime | None) -> State:
        """Prefect's dialog promises that the run resumes by itself after a limit, and its server fails the run then. So the limit becomes
        the time at which reconcile resumes it. Returns the state of the run.

        Prefect cannot set a state only in place of the one that was `seen`. So what somebody did meanwhile, such as Resume, is set again.
        """
        self._client.set_flow_run_state(self._flow_run_id, suspended_state(until), force=True)
        history = sorted(self._client.read_flow_run_states(self._flow_run_id), key=lambda state: state.timestamp)
        *meanwhile, ours = [state for state in history if state.timestamp > seen.timestamp]
        if not meanwhile or meanwhile[-1].is_paused():
            return ours
        self._client.set_flow_run_state(self._flow_run_id, meanwhile[-1], force=True)
        return meanwhile[-1]


def is_waiting(progress: RunProgress | None) -> bool:
    """Whether a job has not begun, or its workers wait for room."""
    return progress is None or "waits" in progress or bool(progress.get("waiting_for"))


def links_text(links: Mapping[str, str]) -> str:
    """Links as a table of two columns."""
    return markdown(("", ""), links.items())


def suspended_state(until: datetime | None = None) -> State:
    """The state that Prefect's UI shows as suspended. After `until`, reconcile resumes the run."""
    message = SUSPENDED
    if until is not None:
        message += f"; without it the run resumes by itself soon after {until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    details = StateDetails(pause_reschedule=True, scheduled_time=until)
    return State(type=StateType.PAUSED, name="Suspended", message=message, state_details=details)
