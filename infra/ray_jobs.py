"""Ray jobs with ids that vitline chooses: submit, find, follow, stop, by the REST API of Ray's job server.

`ray.job_submission` asks the same, and takes 0.6 CPU-seconds and 40 MB in each flow run and command that loads it.

Observed behaviour of Ray 2.60 on which this module relies: a job id can be used only once; a job with
`entrypoint_num_cpus` cannot be stopped while it waits; a stop is answered before the job has stopped; an unknown id
is a 404.
"""

import http.client
import json
import logging
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field

from vitline.infra.config import FrozenConfig
from vitline.infra.environment.certificates import authority_of_jobs
from vitline.infra.environment.proxies import through_proxy
from vitline.infra.plain_text import plain
from vitline.infra.settings import LOGIN_IN_ADDRESS, Settings

log = logging.getLogger(__name__)
list_ = list  # RayJobs has a method named `list`

ONE_TRAINING = "vitline_training"
"""A Ray resource, of amount 1, of clusters that run one training at a time: each training takes all of it. The local
stack has it. On a cluster without it, trainings share the CPUs and GPUs."""

ROOT = "root"
"""Key in the metadata of a job: the URI of the root that it works for. Several roots may use one Ray."""

JobState = Literal["pending", "running", "succeeded", "failed", "stopped"]

_ALLOWED_NAMES = {
    "RAY_JOB_STOP_WAIT_TIME_S",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "MLFLOW_TRACKING_URI",
}
_ALLOWED_PREFIXES = ("RAY_TRAIN_", "VITLINE_")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD", re.IGNORECASE)
_REQUEST_TIMEOUT_S = 30
AWAY_S = 900.0
"""How long a client waits for a server that does not answer: Ray's job server, and Prefect at the end of a flow run. The local stack
restarts a lost server, which may take ten minutes on a busy machine."""
_TOLD_AFTER_S = 2.0
_NO_COMMAND = (126, 127)
"""Exit codes of a shell whose command cannot be executed or was not found."""
_LOG_FOLLOWS = ", last available logs"  # to the message of a failed job, Ray adds up to 20,000 characters of its log


class Job(FrozenConfig):
    """A job as Ray reports it."""

    id: str
    state: JobState
    exit_code: int | None
    """Exit code of the driver, -9 after a SIGKILL. None while it runs, and after a stop, whatever the exit code was."""
    message: str
    metadata: dict[str, str] = Field(default_factory=dict)
    """The metadata given to `submit`."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that it uses: VITLINE_NODE_LABELS of the process that submitted it."""
    started_at: float | None = None
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds; None while it runs."""

    @property
    def terminal(self) -> bool:
        return self.state in ("succeeded", "failed", "stopped")


class JobLost(RuntimeError):
    """Ray does not know the job: it was never submitted to this cluster, or the cluster was replaced."""


class JobServerAway(RuntimeError):
    """The job server did not answer within the allowed time. The state of the job is unknown; it may still run."""


class RayJobs:
    """The jobs of the cluster whose job server has this http address.

    With a `root`, jobs whose metadata name another root are unknown here: nothing finds, follows or stops them.
    The token is read from `token_path`, else from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. While the server does not answer,
    a request is repeated for up to `away_s` and then raises JobServerAway. Meanwhile `report` gets a sentence at the first and
    at the last failure, and `while_away` is called before each repetition; what it raises ends the request.
    """

    def __init__(
        self,
        address: str,
        token_path: str | Path | None = None,
        away_s: float = AWAY_S,
        *,
        root: str | None = None,
        report: Callable[[str], object] = log.warning,
        while_away: Callable[[], object] = lambda: None,
    ) -> None:
        self.address, self._away_s, self._report, self._while_away = address, away_s, report, while_away
        self._root = root
        self._token = Path(token_path).read_text().strip() if token_path else Settings().ray_token()

    def submit(
        self, job_id: str, entrypoint: Sequence[str], env: Mapping[str, str], metadata: Mapping[str, str]
    ) -> None:
        """Starts `entrypoint` as a driver. Does nothing if the job exists already, from an earlier try: follow it. Raises
        RuntimeError if that job has other metadata, so that it is not ours.

        The driver requests no resources. So it starts at once, waits for resources itself, and can be stopped meanwhile.
        `env` is set for the driver and its workers, with the private authority that this process trusts and the labels of the nodes
        that jobs use, and Ray's API shows it.
        Raises ValueError for a variable that is not on the allow-list (`SECURITY.md`).
        """
        labels = Settings().node_labels_text()
        of_all_jobs = authority_of_jobs() | ({"VITLINE_NODE_LABELS": labels} if labels else {})
        env_vars = checked_env({**of_all_jobs, **env})
        # With exec the driver replaces the shell, which might otherwise get the signal and determine the exit code.
        command = f"exec {shlex.join(entrypoint)}"

        # The variable is for the workers, which run in the folder where `ray start` was called.
        job = {
            "entrypoint": command,
            "submission_id": job_id,
            "runtime_env": {"env_vars": {"PYTHONSAFEPATH": "1", **env_vars}},
            "metadata": dict(metadata),
        }
        try:
            self._ask(f"submit {job_id}", "/api/jobs/", job)
        except RuntimeError as error:
            if "already exists" not in str(error):
                raise
            known = _job(job_id, self._ask(f"find {job_id}", _path(job_id)))
            if known.metadata != job["metadata"]:
                raise RuntimeError(
                    f"Ray at {self.address} already has another job {job_id}, of {known.metadata.get(ROOT, 'an unknown root')}, "
                    "so this one was not submitted. Run the same command again: its next attempt has a new job id."
                ) from error
            log.info("job %s was submitted before", job_id)

    def find(self, job_id: str) -> Job | None:
        """The current state of the job, or None if Ray does not know it."""
        try:
            info = self._ask(f"find {job_id}", _path(job_id))
        except RuntimeError as error:
            if _status(error) == 404:
                return None
            raise
        job = _job(job_id, info)
        return job if is_of(job, self._root) else None

    def list(self, metadata: Mapping[str, str] | None = None, every_root: bool = False) -> "list_[Job]":
        """All jobs, in any state, whose metadata contain these pairs; those of other roots only with `every_root`."""
        wanted = (metadata or {}).items()
        details = self._ask("list jobs", "/api/jobs/")
        jobs = [_job(info["submission_id"], info) for info in details if info.get("submission_id")]
        return [job for job in jobs if wanted <= job.metadata.items() and (every_root or is_of(job, self._root))]

    def version(self) -> str:
        """The Ray version of the cluster, such as "2.60.0"."""
        version: str = self._ask("ask for its version", "/api/version")["ray_version"]
        return version

    def num_cpus(self) -> int:
        """The number of CPUs that the living nodes with the labels of VITLINE_NODE_LABELS have declared to Ray."""
        cpus: float = sum(node["resources_total"].get("CPU", 0) for node in self._usable_nodes("count its CPUs"))
        return round(cpus)

    def num_nodes(self) -> int:
        """The number of living nodes."""
        return len(self._living_nodes("count its nodes"))

    def runs_one_training(self) -> bool:
        """Whether the cluster runs one training at a time, on whichever of its nodes."""
        return any(ONE_TRAINING in node["resources_total"] for node in self._living_nodes("look at its resources"))

    def has_usable_nodes(self) -> bool:
        """Whether a living node has the labels of VITLINE_NODE_LABELS."""
        return bool(self._usable_nodes("look for nodes with labels"))

    def _usable_nodes(self, what: str) -> "list_[dict[str, Any]]":
        labels = Settings().node_labels.items()
        return [node for node in self._living_nodes(what) if labels <= node["labels"].items()]

    def _living_nodes(self, what: str) -> "list_[dict[str, Any]]":
        nodes = self._ask(what, "/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        return [node for node in nodes if node["state"] == "ALIVE"]

    def page(self, job_id: str) -> str:
        """The job's page in the Ray dashboard."""
        return f"{self.address}/#/jobs/{job_id}"

    def follow(self, job_id: str, on_poll: Callable[[Job], None], poll_s: float = 1.0) -> Job:
        """Calls `on_poll` with the job every `poll_s` until it has ended, and returns it.

        An exception of `on_poll` is raised here and does not stop the job. Raises JobLost and JobServerAway.
        """
        while True:
            job = self._known(job_id)
            on_poll(job)
            if job.terminal:
                return job
            time.sleep(poll_s)

    def stop(self, job_id: str, wait_s: float) -> Job:
        """Stops a job (SIGTERM, then SIGKILL after its RAY_JOB_STOP_WAIT_TIME_S) and returns it once it has ended.

        Returns at once if it had ended before. Raises TimeoutError if it has not ended after `wait_s`, and JobLost and
        JobServerAway.
        """
        self._known(job_id)
        self._ask(f"stop {job_id}", f"{_path(job_id)}/stop", {})
        deadline = time.monotonic() + wait_s
        while not (job := self._known(job_id)).terminal:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {job_id} at {self.address} is still {job.state} {wait_s:g} s after the stop request "
                    f"({job.message}). See the log of its driver, or stop it again."
                )
            time.sleep(0.2)
        return job

    def logs(self, job_id: str) -> str:
        """The output of the driver so far, without the colours that Ray adds. Raises JobLost."""
        self._known(job_id)
        return plain(self._ask(f"read the log of {job_id}", f"{_path(job_id)}/logs")["logs"])

    def _known(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job is None:
            raise JobLost(f"Ray at {self.address} does not know job {job_id}; the cluster may have been replaced.")
        return job

    def _ask(self, what: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the job server answers, to a POST where there is a body."""
        began, wait_s, told = time.monotonic(), 0.2, False
        while True:
            try:
                answer = self._request(path, body)
                if told:
                    self._report(f"Ray at {self.address} answers again")
                return answer
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and (_status(error) < 500 or "already exists" in str(error)):
                    raise
                away_s = time.monotonic() - began
                if away_s > self._away_s:
                    raise JobServerAway(
                        f"could not {what}: {self.address} has not answered for {away_s:.0f} s ({error})"
                        f"{through_proxy(self.address)}. Check that Ray runs. The job may still be running."
                    ) from error
                if not told and away_s > _TOLD_AFTER_S:
                    told = True
                    self._report(
                        f"Ray at {self.address} does not answer ({error}); waiting up to {self._away_s / 60:.0f} minutes for it"
                    )
            self._while_away()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Raises OSError where there is no whole answer, and RuntimeError with the status of one that is an error."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"})
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            # Without a timeout, a network that drops packets would block the flow and its cancellation for ever.
            with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code in (401, 403):
                text = f"{text.rstrip('. ')}. Set RAY_AUTH_TOKEN_PATH to the file with the token of this cluster."
            raise RuntimeError(f"Request failed with status code {error.code}: {text}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def is_of(job: Job, root: str | None) -> bool:
    """Whether the metadata of a job name this root, or none."""
    return root is None or job.metadata.get(ROOT, root) == root


def no_start(python: str, job: Job, log: str) -> str:
    """Why the Python of jobs could not run one, and what to do; empty if something else has ended the job."""
    missing = re.search(r"No module named '?([\w.]+)", log)
    if job.exit_code not in _NO_COMMAND and not missing:
        return ""
    what = f"has no {missing[1]}" if missing else "cannot be run"
    return (
        f"{python} {what} on the nodes of the cluster: install vitline[train] there, or set VITLINE_JOB_PYTHON to a Python of the "
        "nodes that has it"
    )


def _path(job_id: str) -> str:
    return f"/api/jobs/{quote(job_id, safe='')}"


def _job(job_id: str, info: Mapping[str, Any]) -> Job:
    """Converts Ray's job info, whose times are in milliseconds."""
    began_ms, ended_ms = info.get("start_time"), info.get("end_time")
    labels = ((info.get("runtime_env") or {}).get("env_vars") or {}).get("VITLINE_NODE_LABELS", "")
    return Job.model_validate(
        {
            "id": job_id,
            "state": info["status"].lower(),
            "exit_code": info.get("driver_exit_code"),
            "message": plain(info.get("message") or "").partition(_LOG_FOLLOWS)[0],
            "metadata": info.get("metadata") or {},
            "node_labels": dict(pair.split("=", 1) for pair in labels.split(",") if "=" in pair),
            "started_at": began_ms and began_ms / 1000,
            "ended_at": ended_ms and ended_ms / 1000,
        }
    )


def checked_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, if all of it may be shown by Ray's API. Raises ValueError naming the first variable that must not be sent."""
    for name, value in env.items():
        if _SECRET.search(name) or LOGIN_IN_ADDRESS.search(value):
            raise ValueError(
                f"{name} looks like a secret, and Ray's API shows the environment of jobs. "
                "Set it on the nodes before Ray starts (docs/guides/own-cluster.md)."
            )
        if name not in _ALLOWED_NAMES and not name.startswith(_ALLOWED_PREFIXES):
            allowed = ", ".join([*sorted(_ALLOWED_NAMES), *(f"{prefix}*" for prefix in _ALLOWED_PREFIXES)])
            raise ValueError(f"{name} must not be sent to jobs. infra/ray_jobs.py allows {allowed}.")
    return dict(env)


def _status(error: RuntimeError) -> int:
    """The HTTP status in an error of Ray's client, or 0."""
    found = re.search(r"status code (\d+)", str(error))
    return int(found[1]) if found else 0
