"""What code is running: recorded at every attempt, never part of a key (DESIGN 3.3)."""

import contextlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.settings import Settings

# What has to be equal where a job is submitted and where it runs: configs and results pass between the two.
COMPARED = ("python", "vitline", "ray", "torch")
PACKAGES = ("vitline", "torch", "ray", "numpy", "pyarrow", "pillow", "simplejpeg", "pydantic")


def versions() -> dict[str, str]:
    """Versions of what results may depend on, and `commit` where the code is a git checkout."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = checkout_commit(Path(__file__).resolve().parents[1])
    return found | ({"commit": commit} if commit else {})


def compared_versions() -> dict[str, str]:
    """Versions of COMPARED here, without what names a build (`+cu128`); what is not installed is left out."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in COMPARED[1:]:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package).partition("+")[0]
    return found


def differing_versions() -> str:
    """In a job: which versions are not those of the process that submitted it, as a sentence with the next step; empty
    where all are, or where nothing was sent to compare with."""
    sent = Settings().submitted_from
    there: dict[str, str] = json.loads(sent) if sent else {}
    here = compared_versions()
    differ = [name for name in there if name in here and here[name] != there[name]]
    if not differ:
        return ""
    told = ", ".join(f"{name} {here[name]} (submitted from {name} {there[name]})" for name in differ)
    return (
        f"{sys.executable} on {platform.node()} runs {told}. Install the same there, or name with VITLINE_JOB_PYTHON a "
        "Python of the cluster that has them."
    )


def checkout_commit(folder: Path) -> str | None:
    """The commit that a checkout's HEAD names, read from its files; None outside of a checkout."""
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
