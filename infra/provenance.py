"""The versions of the running code. They are recorded, but never part of a run key."""

import contextlib
import functools
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitline.infra.settings import Settings

# Versions that must be equal where a job is submitted and where it runs, because both exchange configs and results. Another pyarrow
# writes other bytes of equal shards.
COMPARED = ("python", "vitline", "ray", "torch", "pyarrow")
PACKAGES = ("vitline", "torch", "ray", "numpy", "pyarrow", "pillow", "simplejpeg", "pydantic")


def versions() -> dict[str, str]:
    """Versions of the packages that results may depend on, and `commit` if the code is a git checkout."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = checkout_commit(Path(__file__).resolve().parents[1])
    return found | ({"commit": commit} if commit else {})


def cpu_model() -> str:
    """The model of this machine's processor, as Linux names it: kinds of processors round differently."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


@functools.cache  # each task of a job asks
def compared_versions() -> Mapping[str, str]:
    """The versions of COMPARED in this process, without build tags such as `+cu128`. Missing packages are left out."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in COMPARED[1:]:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package).partition("+")[0]
    return found


def differing(there: Mapping[str, str]) -> list[str]:
    """The packages that this process has in other versions than `there`, the compared versions of another process."""
    here = compared_versions()
    return [name for name in there if name in here and here[name] != there[name]]


def differing_versions() -> str:
    """In a process of a job: an error message if its versions differ from those of the process that submitted the job, else empty.

    Also empty if the submitting process sent no versions.
    """
    sent = Settings().submitted_from
    there: dict[str, str] = json.loads(sent) if sent else {}
    differ, here = differing(there), compared_versions()
    if not differ:
        return ""
    differences = ", ".join(f"{name} {here[name]} (submitted from {name} {there[name]})" for name in differ)
    return (
        f"{sys.executable} on {platform.node()} runs {differences}. Install the same versions there, or set "
        "VITLINE_JOB_PYTHON to a Python of the cluster that has them."
    )


def require_same_versions() -> None:
    """Called first by every worker and task of a job, because the nodes of a cluster may differ. Raises RuntimeError."""
    if differ := differing_versions():
        raise RuntimeError(differ)


def lacking(error: ModuleNotFoundError) -> RuntimeError:
    """The error of a task whose work needs a package that its node does not have."""
    return RuntimeError(
        f"{sys.executable} on {platform.node()} has no {error.name}. Install there what is installed where the job was submitted."
    )


def checkout_commit(folder: Path) -> str | None:
    """The commit of HEAD in a git checkout, read from its files; None outside of a checkout."""
    try:
        head = (folder / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        loose = folder / ".git" / name
        if loose.exists():
            return loose.read_text().strip()
        packed = (folder / ".git" / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None
