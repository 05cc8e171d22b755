"""Checks of this machine and of what it is connected to; each failure comes with what to do about it."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement

from infra.local.paths import local_dir
from infra.settings import Settings
from infra.storage import open_store, probe_conditional_writes

MIN_FREE_DISK_BYTES = 5 * 10**9
MIN_MEMORY_BYTES = 6 * 10**9
JOB_SERVER_AWAY_S = 5.0


class Check(NamedTuple):
    """One finding."""

    name: str
    ok: bool
    found: str
    advice: str

    @property
    def mark(self) -> str:
        return "ok" if self.ok else "FAIL"


def examine(settings: Settings) -> list[Check]:
    """Every check, in the order in which to mend what fails. A check that raises is a failure with its message."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("memory", check_memory),
        ("disk", lambda: check_disk(settings)),
        ("store", lambda: check_store(settings)),
        ("accelerator", check_accelerator),
        ("ray", lambda: check_ray(settings)),
    ]
    return [attempt(name, check) for name, check in checks]


def attempt(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a doctor that dies tells nothing about the rest
        return Check(
            name, False, f"{type(error).__name__}: {error}"[:300], "Mend what the message names and ask again."
        )


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "python", sys.version_info >= (3, 11), found, "" if sys.version_info >= (3, 11) else "Use Python 3.11+."
    )


def check_packages() -> Check:
    """Installed versions against the ranges of this project's own metadata, extras that are installed included."""
    wrong = []
    for text in requires("vitline") or []:
        requirement = Requirement(text)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            if requirement.marker is None:
                wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier and not requirement.specifier.contains(found.split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} {found} is not {requirement.specifier}")
    advice = "Run `make install`: it installs the versions of constraints.txt." if wrong else ""
    shown = ", ".join(f"{p} {_version(p)}" for p in ("torch", "ray", "pyarrow", "pydantic"))
    return Check("packages", not wrong, "; ".join(wrong) or shown, advice)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def check_memory() -> Check:
    available = psutil.virtual_memory().available
    ok = available >= MIN_MEMORY_BYTES
    advice = "" if ok else f"The demo wants {MIN_MEMORY_BYTES / 1e9:.0f} GB free; close other programs."
    return Check("memory", ok, f"{available / 1e9:.1f} GB available, {os.cpu_count()} CPUs", advice)


def check_disk(settings: Settings) -> Check:
    where = local_dir(settings)
    existing = next(path for path in (where, *where.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    ok = free >= MIN_FREE_DISK_BYTES
    return Check("disk", ok, f"{free / 1e9:.1f} GB free at {existing}", "" if ok else "Free some, or set VITLINE_ROOT.")


def check_store(settings: Settings) -> Check:
    """A write, a read back, and conditional writes: claims rest on them."""
    store = open_store(settings.root)
    key, started = f"doctor/{os.getpid()}-{time.time_ns()}", time.perf_counter()
    store.write(key, b"vitline")
    try:
        if store.read(key) != b"vitline":
            return Check("store", False, f"{store.uri} gave back other bytes", "Do not use this store.")
    finally:
        store.delete(key)
    probe_conditional_writes(store)
    return Check(
        "store", True, f"{store.uri}: read, write, conditional writes ({time.perf_counter() - started:.2f} s)", ""
    )


def check_accelerator() -> Check:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Check("accelerator", True, f"{torch.cuda.device_count()} x {', '.join(sorted(names))}", "")
    if shutil.which("nvidia-smi"):
        return Check("accelerator", False, "an NVIDIA driver, but torch sees no GPU", "Install a CUDA build of torch.")
    return Check("accelerator", True, "none: training runs on the CPU", "")


def check_ray(settings: Settings) -> Check:
    """The configured job server answers; or, where none is configured, Ray's sockets will fit the temporary folder."""
    if settings.ray_address is None:
        length = len(str(Path(tempfile.gettempdir()).resolve()))
        ok = length < 40
        advice = "" if ok else "Ray's socket names would be too long: set TMPDIR to a short path such as /tmp."
        return Check("ray", ok, "no RAY_ADDRESS: commands start a one-node Ray of their own", advice)
    from infra.ray_jobs import RayJobs

    RayJobs(settings.ray_address, away_s=JOB_SERVER_AWAY_S).find("vitline-doctor")
    return Check("ray", True, f"{settings.ray_address} answers", "")
