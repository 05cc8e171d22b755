"""What code is running: recorded at every attempt, never part of a key (DESIGN 3.3)."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
