"""What a running stack says of itself: stack.json, the list of its processes, and requests to it."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil

from infra.config import FrozenConfig, replace
from infra.local.processes import birth_of, find_process
from infra.local.stack_config import write_whole


class Service(FrozenConfig):
    """One service of a stack."""

    name: str
    url: str | None
    """Where it is reached; None for one that does not listen."""
    ports: tuple[int, ...]
    """Fixed ports, the first of them that of the url."""
    pid: int | None
    birth: str = ""
    """Tells its process from a later one of the same number."""
    log: str
    state: Literal["starting", "up", "down", "failed"]
    """`down` is started again, `failed` was left alone after it had died too often."""
    restarts: int
    problem: str
    """What is wrong, or of what it died: exit code and the last error of the log, in one line."""


class StackState(FrozenConfig):
    """`stack.json`: there while the supervisor is, and without a secret."""

    schema_version: int = 1
    supervisor_pid: int
    supervisor_birth: str
    """Tells the supervisor from a later process of the same number."""
    services: tuple[Service, ...]
    env: dict[str, str]
    """The part of `stack_environment` that is no secret."""


def read_state(directory: Path) -> StackState | None:
    """None where nothing was written, or nothing that this version understands."""
    with contextlib.suppress(OSError, ValueError):
        return StackState.model_validate_json((directory / "stack.json").read_text())
    return None


def as_it_stands(state: StackState) -> StackState:
    """The written state, where a service whose process has ended since is `down`: its supervisor notices a little later."""
    services = (
        replace(service, state="down", problem=f"process {service.pid} has ended")
        if service.pid and service.birth and not find_process(service.pid, service.birth)
        else service
        for service in state.services
    )
    return state.model_copy(update={"services": tuple(services)})


def write_processes(directory: Path, processes: Sequence[psutil.Process]) -> None:
    """Number and birth of each, so that they can be ended if the supervisor cannot do it, and nothing else is."""
    path, text = directory / "processes.json", json.dumps({p.pid: birth_of(p.pid) for p in processes})
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return
    write_whole(path, text)


def read_processes(directory: Path) -> set[psutil.Process]:
    """Those of the written processes that still run."""
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, str] = json.loads((directory / "processes.json").read_text())
        return {p for pid, birth in known.items() if (p := find_process(int(pid), birth))}
    return set()


def restart_request(directory: Path, service: str) -> Path:
    """The file whose existence asks the supervisor to restart a service; it removes it once it has begun."""
    return directory / f"restart-{service}"
