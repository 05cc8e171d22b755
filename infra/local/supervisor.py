"""The process that runs a local stack: it starts all services at once, checks that they work, logs which one died and why,
starts it again, and ends all processes when it is stopped.

python -m vitline.infra.local.supervisor --directory DIR --log-dir DIR --parent PID --services NAME,NAME
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vitline.infra.children import adopt_orphans, birth_of, end_children, end_descendants, end_with_parent, reap
from vitline.infra.local.paths import write_private
from vitline.infra.local.processes import STILL_S, Stillness, listening_ports, load, tail
from vitline.infra.local.service_logs import open_private, shorten
from vitline.infra.local.services import Program, programs
from vitline.infra.local.stack_config import OWNER_VARIABLE, StackConfig, load_stack_config
from vitline.infra.local.state import Service, StackState, restart_request, write_processes
from vitline.infra.plain_text import last_words

_SAY_EVERY_S = 30.0
ORDERLY_S = 5.0  # time to end after SIGTERM: MLflow and Ray need about 1 s, SeaweedFS 2 to 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_MAX_DEATHS, _DEATHS_WITHIN_S = 7, 600.0
_SHORTEN_EVERY_S = 10.0
_LOOK_EVERY_S, _RECORD_EVERY_S = 1.0, 5.0  # signals report ended processes at once, so polling can be slow to save CPU
_END_ORDER = (("prefect-worker",), ("sender",), ("ray", "mlflow", "prefect"), ("s3",))


@dataclass
class Running:
    """A service and its current process."""

    program: Program
    log: Path
    process: subprocess.Popen[bytes] | None = None
    state: str = "starting"
    birth: str = ""
    began: float = 0.0
    """Unix time at which the current process was started."""
    restarts: int = 0
    problem: str = ""
    deaths: list[float] = field(default_factory=list)
    try_again_at: float = 0.0
    stillness: Stillness = field(default_factory=Stillness)
    family: set[psutil.Process] = field(default_factory=set)
    """The running descendants of its process that were seen so far."""
    healthy: subprocess.Popen[bytes] | None = None
    """The process whose check succeeded. The checking thread sets only this field and `problem`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--services", required=True)
    parser.add_argument(
        "--ends-with-parent", action="store_true", help="end with the parent also once everything is up"
    )
    arguments = parser.parse_args()
    config = load_stack_config(arguments.directory)
    assert config, "start_stack writes the stack config first"
    supervisor = Supervisor(config, arguments.log_dir, arguments.services.split(","))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: supervisor.asked_to_end.append(number))
    supervisor.wake_at_signals()
    adopt_orphans()
    try:
        problem = supervisor.start(arguments.parent)
        answer({"error": problem} if problem else {"ready": True})
        if not problem:
            # Until here the stack ends with the process that started it. From now on only with --ends-with-parent.
            supervisor.keep(arguments.parent if arguments.ends_with_parent else None)
    finally:
        supervisor.end()


def answer(line: dict[str, object]) -> None:
    """Prints a line of JSON for the process that started the stack, if it still reads."""
    with contextlib.suppress(OSError):
        print(json.dumps(line), flush=True)


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Starts, watches and ends the services. Only the checks of starting services run outside of the main thread."""

    def __init__(self, config: StackConfig, log_dir: Path, names: Sequence[str]) -> None:
        self.config, self.log_dir, self.asked_to_end = config, log_dir, list[int]()
        every = programs()
        self.running = {name: Running(every[name], log_dir / f"{name}.log") for name in names}
        self._recorded: tuple[Service, ...] = ()
        self._woken: int | None = None
        self._recorded_at = self._shortened_at = 0.0
        self._not_shortened = ""

    def wake_at_signals(self) -> None:
        """Makes signals interrupt `_rest`: the end of a child, and requests to end."""
        signal.signal(signal.SIGCHLD, lambda number, _: None)
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def _rest(self, seconds: float) -> None:
        if self._woken is None:
            time.sleep(seconds)
        elif select.select([self._woken], [], [], seconds)[0]:
            os.read(self._woken, 4096)

    def start(self, parent: int) -> str:
        """Starts all services. Returns an empty text once all work, else what failed. Stops when `parent` has ended."""
        self.config.folder.mkdir(mode=0o700, exist_ok=self.config.only_ray)
        began, said_s, announced = time.monotonic(), 0.0, set[str]()
        while True:
            self._step(first=True)
            for running in self.running.values():
                if running.state == "up" and running.program.name not in announced:
                    announced.add(running.program.name)
                    answer({"up": running.program.name, "seconds": round(time.monotonic() - began, 1)})
            if self.asked_to_end or os.getppid() != parent:
                return "it was stopped before it was ready."
            if failed := [r for r in self.running.values() if r.state == "failed"]:
                return f"{failed[0].program.name} {failed[0].problem}"
            waiting = [r for r in self.running.values() if r.state != "up"]
            if not waiting:
                return ""
            for running in waiting:
                if running.process and running.stillness.seconds(running.process.pid) > STILL_S:
                    return (
                        f"{running.program.name} has done nothing for {STILL_S:.0f} s, and is not ready: {running.problem}. The end of "
                        f"its log: {last_words(tail(running.log))}"
                    )
            waited_s = time.monotonic() - began
            if waited_s > said_s + _SAY_EVERY_S:
                said_s = waited_s
                what = "; ".join(
                    f"{r.program.name}: {r.problem}" for r in waiting if r.problem
                )  # not what waits for others
                answer({"waiting": f"waiting for {what} ({waited_s:.0f} s, {load()})"})
            self._rest(0.05)

    def keep(self, parent: int | None) -> None:
        """Watches the services until a request to end, or until `parent` has ended."""
        say("all services are up")
        while not self.asked_to_end and (parent is None or os.getppid() == parent):
            if self.config.only_ray and self.running["ray"].state == "failed":
                return
            if not (self.config.directory / "stack-config.json").exists():
                say(f"{self.config.directory} was removed, so this stack could not be found any more")
                return
            try:
                self._step(first=False)
            except OSError as error:  # such as a full disk, which should not end running services
                say(f"could not update the files in {self.config.directory}: {error}")
            if time.monotonic() - self._shortened_at >= _SHORTEN_EVERY_S:
                self._shortened_at = time.monotonic()
                self.shorten_logs()
            self._rest(_LOOK_EVERY_S)

    def shorten_logs(self) -> None:
        """Shortens logs that have grown too large. What prevents it, such as a full disk, is said once."""
        problem = ""
        for log in (self.log_dir / "stack.log", *(running.log for running in self.running.values())):
            try:
                shorten(log)
            except OSError as error:
                problem = f"could not shorten {log}: {error}"
        if problem and problem != self._not_shortened:
            say(problem)
        self._not_shortened = problem

    def end(self) -> None:
        """Ends all services: the worker with its flow runs first, so that they can report their end, and the store last."""
        say("ending")
        self._note_families(psutil.Process().children(recursive=True))
        children = self._children()
        for names in _END_ORDER:
            phase = [self.running[name] for name in names if name in self.running]
            end_children([running.process for running in phase if running.process], ORDERLY_S)
            family = {process for running in phase for process in running.family}
            end_descendants(children, family.copy)
        end_descendants(children)
        for running in self.running.values():
            self._after(running)
        shutil.rmtree(self.config.folder, ignore_errors=True)
        for name in ("stack.json", "processes.json"):
            (self.config.directory / name).unlink(missing_ok=True)
        say("ended")

    def _step(self, first: bool) -> None:
        """Checks all services once and acts on changes.

        During the `first` start a service that dies is not started again, so that a wrong setting is reported at once, and there are no
        restart requests.
        """
        reap(self._children())
        for running in self.running.values():
            if running.process and running.process.returncode is not None:
                last_lines = tail(running.log)
                say(f"the last lines of {running.log}:\n{last_lines}")
                self._died(running, f"ended with code {running.process.returncode}: {last_words(last_lines)}", first)
            elif running.process and running.state == "starting" and running.healthy is running.process:
                running.state = "up"
            elif running.process is None and running.state != "failed" and time.monotonic() >= running.try_again_at:
                if all(self.running[n].state == "up" for n in running.program.needs if n in self.running):
                    self._launch(running, first)
            elif not first and restart_request(self.config.directory, running.program.name).exists():
                self._restart(running)
        self._record()

    def _launch(self, running: Running, first: bool = False) -> None:
        running.state, running.began, running.problem = "starting", time.time(), "starting"
        try:
            running.process, running.stillness = self._popen(running), Stillness()
            running.birth = birth_of(running.process.pid)
        except (OSError, RuntimeError) as error:  # such as a full disk, or a database of another version
            self._died(running, f"could not be started: {error}", first)
            return
        running.family = set()
        threading.Thread(target=self._watch_start, args=(running, running.process), daemon=True).start()

    def _popen(self, running: Running) -> subprocess.Popen[bytes]:
        running.program.before(self.config)
        with open(open_private(running.log), "ab") as log:
            return subprocess.Popen(
                running.program.command(self.config),
                env=running.program.full_environment(self.config),
                cwd=self.config.folder,  # the dashboard of Ray lets a worker of its own search the current folder first
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # because some services end their whole process group
                preexec_fn=end_with_parent,
            )

    def _watch_start(self, running: Running, process: subprocess.Popen[bytes]) -> None:
        while running.process is process and process.returncode is None:
            problem = running.program.check(self.config, running.began) or self._answers_elsewhere(running, process)
            if not problem:
                running.healthy = process
                return
            if running.process is process:
                running.problem = problem
            time.sleep(0.1)

    def _answers_elsewhere(self, running: Running, process: subprocess.Popen[bytes]) -> str:
        """Empty if `process` or a descendant listens on the port of the service, else what is wrong.

        Another process may answer there too, such as one that an earlier service has left.
        """
        name = running.program.name
        port = self.config.ports.get(name)
        if port is None or port in listening_ports(process.pid):
            return ""
        return f"a process that does not belong to {name} answers on port {port}"

    def _died(self, running: Running, problem: str, first: bool) -> None:
        name = running.program.name
        say(f"{name} {problem}")
        running.state, running.problem = "down", problem
        self._clear(running)
        now = time.monotonic()
        running.deaths = [t for t in running.deaths if now - t < _DEATHS_WITHIN_S] + [now]
        if first or self.config.only_ray or len(running.deaths) >= _MAX_DEATHS:
            running.state = "failed"
            say(f"{name} died {len(running.deaths)} times in {_DEATHS_WITHIN_S:g} s and is not started again")
            return
        wait_s = min(_FIRST_WAIT_S * 2 ** (len(running.deaths) - 1), _LONGEST_WAIT_S)
        running.try_again_at, running.restarts = now + wait_s, running.restarts + 1
        say(f"{name} will be started again in {wait_s:g} s")

    def _restart(self, running: Running) -> None:
        say(f"{running.program.name} is restarted on request")
        if running.process:
            end_children([running.process], ORDERLY_S)
        self._clear(running)
        running.state, running.problem, running.deaths, running.try_again_at = "starting", "restarting", [], 0.0
        running.restarts += 1
        self._launch(running)
        self._record(now=True)
        restart_request(self.config.directory, running.program.name).unlink(missing_ok=True)

    def _clear(self, running: Running) -> None:
        """Ends all processes of a service, so that its ports are free for the next process."""
        end_descendants(self._children(), lambda: running.family | self._members_of(running))
        running.process, running.birth = None, ""
        self._after(running)

    def _after(self, running: Running) -> None:
        try:
            running.program.after(self.config, self.log_dir)
        except OSError as error:
            say(f"could not clean up after {running.program.name}: {error}")

    def _members_of(self, running: Running) -> set[psutil.Process]:
        """Processes of a service: of the session that it was started in, or with its mark. The agents of Ray name themselves, which
        overwrites their environment; workers of Ray have sessions of their own."""
        session = running.process.pid if running.process else None
        found = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                marked = process.environ().get(OWNER_VARIABLE) == f"{self.config.id}/{running.program.name}"
                if marked or os.getsid(process.pid) == session:
                    found.add(process)
        return found

    def _children(self) -> dict[int, subprocess.Popen[bytes]]:
        return {r.process.pid: r.process for r in self.running.values() if r.process}

    def _record(self, now: bool = False) -> None:
        """Updates stack.json, and the list of all descendants, so that they can be ended even if this process is killed."""
        services = tuple(self._service(running) for running in self.running.values())
        if services != self._recorded or now:
            me = os.getpid()
            state = StackState(
                supervisor_pid=me,
                supervisor_birth=birth_of(me),
                services=services,
                env=self.config.open_environment(),
            )
            write_private(self.config.directory / "stack.json", state.model_dump_json(indent=1))
            self._recorded = services
        if time.monotonic() - self._recorded_at >= _RECORD_EVERY_S or now:
            self._recorded_at = time.monotonic()
            everyone = psutil.Process().children(recursive=True)  # called once, as it reads all of /proc
            self._note_families(everyone)
            write_processes(self.config.directory, [psutil.Process(), *everyone])

    def _note_families(self, everyone: Sequence[psutil.Process]) -> None:
        """Assigns each process to its service. A process whose parent has ended stays assigned."""
        owners = {r.process.pid: r for r in self.running.values() if r.process}
        tops = set(owners)
        for running in self.running.values():
            running.family &= set(everyone)
            owners |= {process.pid: running for process in running.family}
        for process in everyone:  # parents come before their children
            with contextlib.suppress(psutil.Error):
                if process.pid not in tops and (owner := owners.get(process.ppid())):
                    owner.family.add(process)
                    owners.setdefault(process.pid, owner)

    def _service(self, running: Running) -> Service:
        name, ports = running.program.name, self.config.ports
        return Service(
            name=name,
            url=self.config.url(name) if name in ports else None,
            ports=tuple(port for key, port in ports.items() if key == name or key.startswith(f"{name}.")),
            pid=running.process.pid if running.process else None,
            birth=running.birth,
            log=str(running.log),
            state=running.state,
            restarts=running.restarts,
            problem="" if running.state == "up" else running.problem,  # the last problem, until the service works again
        )


if __name__ == "__main__":
    main()
