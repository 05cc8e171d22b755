"""Jobs that run as child processes, for work so small that starting Ray would take most of the time.

The interface is that of `RayJobs`, so a stage leases, follows and stops such a job like any other.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitline.infra.children import child_environment, end_with_parent
from vitline.infra.plain_text import plain
from vitline.infra.ray_jobs import Job, RayJobs


class ChildJobs(RayJobs):
    """Jobs of this process. They get SIGTERM if it is killed; `close` stops running jobs. Logs stay in `log_dir`."""

    def __init__(self, log_dir: Path) -> None:
        self.address, self._log_dir = "", log_dir
        self._jobs: dict[str, tuple[subprocess.Popen[bytes], Job]] = {}

    def submit(
        self, job_id: str, entrypoint: Sequence[str], env: Mapping[str, str], metadata: Mapping[str, str]
    ) -> None:
        """Starts `entrypoint`, a command that begins with `python`, with the Python of this process."""
        if job_id in self._jobs:
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "vitline.infra.local.child_jobs", str(os.getpid()), *entrypoint[1:]]
        with open(self._log(job_id), "wb") as log:
            process = subprocess.Popen(
                command,
                env=child_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this process, which then stops the job in order
            )
        self._jobs[job_id] = (
            process,
            Job(
                id=job_id, state="running", exit_code=None, message="", metadata=dict(metadata), started_at=time.time()
            ),
        )

    def find(self, job_id: str) -> Job | None:
        """The current state of the job, or None if this process did not start it."""
        if job_id not in self._jobs:
            return None
        process, job = self._jobs[job_id]
        code = process.poll()
        if code is not None and not job.terminal:
            message = "" if code == 0 else f"the process ended with exit code {code}"
            changes = {"state": "failed" if code else "succeeded", "exit_code": code, "message": message}
            job = job.model_copy(update={**changes, "ended_at": time.time()})
            self._jobs[job_id] = process, job
        return job

    def list(self, metadata: Mapping[str, str] | None = None, every_root: bool = False) -> "list[Job]":
        """The jobs of this process whose metadata contain these pairs. All are of one root."""
        found = [job for job_id in self._jobs if (job := self.find(job_id))]
        return [job for job in found if (metadata or {}).items() <= job.metadata.items()]

    def page(self, job_id: str) -> str:
        """The URI of the job's log, as there is no web page."""
        return self._log(job_id).as_uri()

    def stop(self, job_id: str, wait_s: float) -> Job:
        """Stops the job by SIGTERM, then SIGKILL after `wait_s`, and returns it once it has ended. Raises JobLost."""
        self._known(job_id)
        process = self._jobs[job_id][0]
        process.terminate()
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return self._known(job_id)

    def logs(self, job_id: str) -> str:
        """The output of the job so far. Raises JobLost."""
        self._known(job_id)
        return plain(self._log(job_id).read_text(errors="replace"))

    def close(self, wait_s: float) -> None:
        """Stops all running jobs."""
        for job in self.list():
            if not job.terminal:
                self.stop(job.id, wait_s)

    def _log(self, job_id: str) -> Path:
        return self._log_dir.absolute() / f"{job_id}.log"


def main() -> None:
    """Runs `python` with all arguments but the first, which is the pid of the parent; ends when that parent is killed."""
    parent, *arguments = sys.argv[1:]
    if end_with_parent(int(parent)):
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
