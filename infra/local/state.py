"""Files about a running stack: its state (stack.json), its processes, and restart requests."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil

from vitline.infra.children import birth_of, find_process
from vitline.infra.config import FrozenConfig, replace
from vitline.infra.local.paths import write_private


class Service(FrozenConfig):
    """One service of a stack."""

    name: str
    url: str | None
    """URL of the service; None if it does not listen."""
    ports: tuple[int, ...]
    """Fixed ports; the first is the port of the url."""
    pid: int | None
    birth: str = ""
    """Distinguishes its process from a later one with the same pid."""
    log: str
    state: Literal["starting", "up", "down", "failed"]
    """`down` will be started again; `failed` died too often and will not."""
    restarts: int
    problem: str
    """What is wrong, or why it died: exit code and the last error of the log, in one line."""


class StackState(FrozenConfig):
    """`stack.json`. It exists as long as the supervisor, and contains no secret."""

    schema_version: int = 1
    supervisor_pid: int
    supervisor_birth: str
    """Distinguishes the supervisor from a later process with the same pid."""
    services: tuple[Service, ...]
    env: dict[str, str]
    """The part of `stack_environment` without secrets."""


def read_state(directory: Path) -> StackState | None:
    """The content of `stack.json`; None if there is none, or none of this version."""
    with contextlib.suppress(OSError, ValueError):
        return StackState.model_validate_json((directory / "stack.json").read_text())
    return None


def with_ended_services(state: StackState) -> StackState:
    """The written state, with services `down` whose process has ended since; the supervisor notices that a little later."""
    services = (
        replace(service, state="down", problem=f"process {service.pid} has ended")
        if service.pid and service.birth and not find_process(service.pid, service.birth)
        else service
        for service in state.services
    )
    return state.model_copy(update={"services": tuple(services)})


def write_processes(directory: Path, processes: Sequence[psutil.Process]) -> None:
    """Records pid and birth of each process, so that exactly these can be ended if the supervisor is killed."""
    path, text = directory / "processes.json", json.dumps({p.pid: birth_of(p.pid) for p in processes})
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return
    write_private(path, text)


def read_processes(directory: Path) -> set[psutil.Process]:
    """The recorded processes that still run."""
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, str] = json.loads((directory / "processes.json").read_text())
        return {p for pid, birth in known.items() if (p := find_process(int(pid), birth))}
    return set()


def restart_request(directory: Path, service: str) -> Path:
    """The file that asks the supervisor to restart a service. The supervisor removes it once the restart has begun."""
    return directory / f"restart-{service}"
