"""Runs a command with a Ray of its own on all nodes of a Slurm job: `vitline.sbatch` becomes this process, on the first node.

python -P -m vitline.infra.slurm.job COMMAND [ARGUMENT ...]

Its exit code is that of the command. SIGUSR1, which Slurm sends before the time limit, and SIGTERM stop the command by SIGTERM, after which
a training writes a checkpoint. After SIGUSR1 the job then requeues itself, unless nothing has begun to work in it.
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Self

from vitline.infra.children import child_environment, how_it_ended
from vitline.infra.local.access.mutual_tls import AUTHORITY, AUTHORITY_KEY
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.local.paths import log_dir, make_private
from vitline.infra.local.ray_node import FOREIGN_TO_RAY, TLS_FOLDER, address_to_join
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.runs.run_state import RunStateRecord, read_state, write_reconciled_state
from vitline.infra.settings import Settings, set_environment
from vitline.infra.slurm.allocation import (
    Allocation,
    address_of,
    address_towards,
    allocation,
    network_towards,
    share_of_this_node,
    slurm,
)
from vitline.infra.slurm.node import Invitation
from vitline.infra.storage import Store, open_store

STOPPED = 128 + signal.SIGTERM
"""Exit code of a command of vitline that was stopped by SIGTERM and can be resumed."""
_LIMIT_IS_NEAR = signal.SIGUSR1
_JOIN_S = 600.0
"""How long the other nodes may take to join."""
_TELL_EVERY_S = 30.0
_LOOK_S = 0.5
_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? \S+: ")
_NODES_END_S = 20.0
_AWAY_S = 2.0
"""A look at the jobs of Ray gives up after this time; the next one tries again."""
_LOOK_AT_RUNS_S = 5.0
_LOST_S = 3.0
"""How long a command may take to stop after its Ray has ended."""


class StoppedEarly(Exception):
    """A signal came before the command was started."""


class Signals:
    """The signals that Slurm sends to this process. Before `wait` is set, one raises StoppedEarly; from then on it is only noted."""

    def __init__(self) -> None:
        self.came, self.wait = list[int](), False
        for number in (_LIMIT_IS_NEAR, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        if not self.wait:
            self.wait = True  # a second one must not interrupt the end
            raise StoppedEarly(signal.Signals(number).name)


def main() -> None:
    signals, code, requeues = Signals(), 1, False
    try:
        job = allocation()
        with ray_of(job) as ray:
            runs = Runs(ray)
            code, requeues = run(sys.argv[1:], ray, runs, signals)
        runs.end(f"the Slurm job {job.job_id} ended")
    except StoppedEarly as early:
        say(
            f"{early} came before Ray had started on all nodes, so nothing was done; submit the job again, with more time"
        )
        code = STOPPED
    except (RuntimeError, OSError, ValueError) as error:
        say(f"error: {error}")
    signals.wait = True
    if requeues:
        say(f"requeueing job {job.job_id}: the same command resumes")
        try:
            slurm("scontrol", "requeue", job.job_id)
        except RuntimeError as error:
            say(f"{error}. Submit the same command again to resume.")
    sys.exit(code)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@contextlib.contextmanager
def ray_of(job: Allocation) -> Iterator[LocalRay]:
    """A Ray on all nodes of a job. Raises RuntimeError if it does not start on one of them."""
    logs, share = make_private(log_dir(Settings()) / f"slurm-{job.job_id}"), share_of_this_node()
    options: dict[str, object] = {"num_cpus": share.num_cpus, "object_store_bytes": share.object_store_bytes}
    if job.others:
        other = address_of(job.others[0])
        options |= {"more_nodes": True, "node_address": address_towards(other)}
        set_environment(network_towards(other))
    say(f"starting Ray on {job.nodes}")
    with LocalRay(make_private(logs / job.node), announce=say, **options) as ray:
        if not job.others:
            yield ray
            return
        while not (address := address_to_join(ray.config)):
            if ray.has_ended():
                raise RuntimeError(f"Ray has ended on {job.node}; its logs are in {logs}.")
            time.sleep(_LOOK_S)
        tls = ray.config.folder / TLS_FOLDER
        invitation = Invitation(
            address=address,
            logs=logs,
            token=ray.config.ray_token.read_text(),
            tls={name: (tls / name).read_text() for name in (AUTHORITY, AUTHORITY_KEY)},
        )
        with FurtherNodes(invitation, len(job.others)) as nodes:
            nodes.join(RayJobs(ray.address, ray.config.ray_token))
            yield ray


class FurtherNodes:
    """Context manager: the `srun` of the further nodes, which end with the context. What they say is printed."""

    def __init__(self, invitation: Invitation, number: int) -> None:
        self._invitation, self._number, self._failed = invitation, number, False

    def __enter__(self) -> Self:
        command = ["srun", "--relative=1", f"--nodes={self._number}", f"--ntasks={self._number}", "--ntasks-per-node=1"]
        # Without these a task may get one CPU of its node, wait for those of the batch script, or get no environment.
        command += ["--overlap", "--cpu-bind=none", "--mem=0", "--export=ALL"]
        command += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]  # a lost node does not end the others
        command += [sys.executable, "-P", "-m", "vitline.infra.slurm.node"]
        self._srun = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._srun.stdin is not None
        threading.Thread(target=self._print, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # `join` says that it has ended
            self._srun.stdin.write(f"{self._invitation.model_dump_json()}\n".encode())
            self._srun.stdin.flush()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._srun.stdin is not None
        with contextlib.suppress(OSError):
            self._srun.stdin.close()
        try:
            self._srun.wait(_NODES_END_S)
        except subprocess.TimeoutExpired:
            self._srun.terminate()
            self._srun.wait()

    def join(self, jobs: RayJobs) -> None:
        """Waits until all have joined. Raises RuntimeError if one ends before, or if they are not all there after `_JOIN_S`."""
        began = told = time.monotonic()
        number = self._number + 1
        while (joined := jobs.num_nodes()) < number:
            now = time.monotonic()
            if self._failed or self._srun.poll() is not None:
                raise RuntimeError(
                    f"Ray did not start on all nodes: {joined} of {number} have joined. The reason is above."
                )
            if now - began > _JOIN_S:
                raise RuntimeError(f"only {joined} of {number} nodes have joined Ray within {_JOIN_S:g} s")
            if now - told > _TELL_EVERY_S:
                told = now
                say(f"waiting for the other nodes: {joined} of {number} have joined Ray")
            time.sleep(_LOOK_S)
        say(f"{joined} nodes have joined Ray")

    def _print(self) -> None:
        assert self._srun.stdout is not None
        for line in self._srun.stdout:
            text = line.decode(errors="replace").rstrip()
            self._failed = self._failed or bool(_TASK_ENDED.match(text))
            say(text)


class Runs:
    """The runs that the command has given to its Ray, as the ids of their jobs and their keys."""

    def __init__(self, ray: LocalRay) -> None:
        self._jobs, self._looked = RayJobs(ray.address, ray.config.ray_token, _AWAY_S), 0.0
        self.known = dict[str, str]()

    def look(self) -> None:
        """Unless the last look was a moment ago, or Ray does not answer."""
        if time.monotonic() - self._looked >= _LOOK_AT_RUNS_S:
            with contextlib.suppress(RuntimeError, OSError):
                jobs = self._jobs.list()
                self.known |= {job.id: job.metadata["run_key"] for job in jobs if "run_key" in job.metadata}
            self._looked = time.monotonic()

    def have_begun(self) -> bool:
        """Whether one has begun to work. A requeued job that only waits would wait again, for ever. True where there is none, as small
        preparations run without Ray, and where the store does not answer."""
        try:
            return not self.known or any(state is not None for _, state in self._states())
        except (RuntimeError, OSError):
            return True

    def end(self, reason: str) -> None:
        """Gives an end state to those whose job has ended with Ray, before it could write one."""
        for run, state in self._states():
            if state is not None and state["state"] == "running":
                write_reconciled_state(run, "preempted", state["attempt"], reason)

    def _states(self) -> Iterator[tuple[Store, RunStateRecord | None]]:
        """Each run with its state, if that is of the attempt of this job."""
        root = open_store(Settings().root)
        for job, key in self.known.items():
            run = root.child(f"runs/{key}")
            state = read_state(run)
            yield run, state if state is not None and job.endswith(f"-a{state['attempt']}") else None


def run(command: Sequence[str], ray: LocalRay, runs: Runs, signals: Signals) -> tuple[int, bool]:
    """Runs the command to its end: its exit code, and whether the job is to be requeued."""
    signals.wait = True
    if signals.came:
        raise StoppedEarly(signal.Signals(signals.came[0]).name)
    env = child_environment(ray.env | {"VITLINE_JOB_PYTHON": sys.executable}, FOREIGN_TO_RAY)
    process, told, begun = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL), False, False
    while (code := process.poll()) is None:
        if ray.has_ended():  # also after `scancel`, which sends SIGTERM to all processes of the job
            say("Ray has ended on this node, so the command is ended")
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOST_S)
            process.kill()
            return 1, False
        if signals.came and not told:
            told, begun = True, runs.have_begun()  # when it is stopped, each gets a state
            say(f"{signal.Signals(signals.came[0]).name}: stopping the command, which saves what is done")
            process.terminate()
        runs.look()
        time.sleep(_LOOK_S)
    if code < 0:
        say(f"the command {how_it_ended(code)}")
        code = 128 - code
    limited = code == STOPPED and _LIMIT_IS_NEAR in signals.came and signal.SIGTERM not in signals.came
    if limited and not begun:
        say(
            "no run had begun when the time limit came, so the job is not requeued: has it room for the workers, and time?"
        )
    return code, limited and begun


if __name__ == "__main__":
    main()
