"""The artifact of a pipeline's flow run that shows its stages while it runs: state, time, and links to jobs, MLflow and reports."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vitline.infra.html.tables import markdown
from vitline.infra.html.text import clock

Url = Callable[[], str | None]
"""A page, or a link to one, that may not be there yet."""


@dataclass
class Job:
    """A run that a stage follows."""

    page: str
    mlflow: Url

    def links(self) -> list[str]:
        url = self.mlflow()
        return [f"[Ray job]({self.page})", *([f"[MLflow]({url})"] if url else [])]


@dataclass
class Stage:
    """A stage of a pipeline as a row of the page."""

    name: str
    state: str = "not started"
    now: str = ""
    """Its progress in words."""
    began: float | None = None
    """Unix seconds."""
    took_s: float | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    """By run key."""
    reports: dict[str, Url] = field(default_factory=dict)

    def row(self) -> list[str]:
        spent = "" if self.began is None else f"since {time.strftime('%H:%M:%S', time.gmtime(self.began))} UTC"
        if self.took_s is not None:
            spent = clock(self.took_s)
        runs = [f"`{key}` ({', '.join(job.links())})" for key, job in self.jobs.items()]
        reports = [f"{what}: {found}" for what, where in self.reports.items() if (found := where())]
        state = f"{self.state}: {self.now}" if self.now else self.state
        return [self.name, state, spent, "; ".join([*runs, *reports])]


class LivePage:
    """The stages of a pipeline. `send` writes the text of the page; it is called only where the text has changed."""

    def __init__(self, names: Sequence[str], links: Mapping[str, Url], send: Callable[[str], None]) -> None:
        self._stages, self._links, self._send = [Stage(name) for name in names], dict(links), send
        self._current, self._sent = Stage(""), ""

    def begin(self, name: str) -> None:
        """A stage begins: the first of this name that has not begun."""
        waiting = (stage for stage in self._stages if stage.name == name and stage.began is None)
        if (found := next(waiting, None)) is None:
            self._stages.append(found := Stage(name))
        self._current, found.state, found.began = found, "running", time.time()
        self.refresh()

    def follows(self, run_key: str, job_page: str, mlflow: Url) -> None:
        """The current stage has submitted a job."""
        self._current.jobs[run_key] = Job(job_page, mlflow)
        self.refresh()

    def report(self, what: str, where: Url) -> None:
        """The current stage has made, or found, something to look at."""
        self._current.reports[what] = where
        self.refresh()

    def end(self, state: str) -> None:
        """The current stage has ended in this state."""
        self._current.state, self._current.now = state, ""
        self._current.took_s = time.time() - (self._current.began or time.time())
        self.refresh()

    def refresh(self, state: str | None = None, now: str = "") -> None:
        """Sends the page again if it has changed, as when MLflow has a run by now; with a state the current stage is in it."""
        if state is not None:
            self._current.state, self._current.now = state, now
        known = {name: found for name, url in self._links.items() if (found := url())}
        table = markdown(("stage", "state", "time", ""), [stage.row() for stage in self._stages])
        text = "\n".join([table, "", *(f"- {name}: {target}" for name, target in known.items())])
        if text != self._sent:
            self._sent = text
            self._send(text)
