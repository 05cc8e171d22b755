"""The folders of this machine for logs; folders and files that only their user can read."""

import os
import shutil
import tempfile
from pathlib import Path

from vitline.infra.settings import Settings
from vitline.infra.storage import raising_unwritable


def local_dir(settings: Settings) -> Path:
    """`VITLINE_HOME`, else the parent folder of a root on this machine, else (the root is remote) `./.vitline`."""
    if settings.home is not None:
        return settings.home.absolute()
    if "://" in settings.root and not settings.root.startswith("file://"):
        return Path.cwd() / ".vitline"
    return Path(settings.root.removeprefix("file://")).resolve().parent


def log_dir(settings: Settings) -> Path:
    """The folder of all logs: of Ray, jobs and services. Only its user can read it."""
    return make_private(local_dir(settings) / "logs")


def free_disk(settings: Settings) -> tuple[str, int]:
    """The folder that vitline uses on this machine, or the first above it that exists, and the free bytes of its disk."""
    where = local_dir(settings)
    existing = next(path for path in (where, *where.parents) if path.exists())
    return str(existing), shutil.disk_usage(existing).free


def make_private(path: Path) -> Path:
    """Makes a folder that only its user can read, or makes an existing one so."""
    with raising_unwritable(f"the folder {path}"):
        path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_private(path: Path, text: str) -> Path:
    """Writes a file that only its user can read. Readers see the old text or the new one; a full disk leaves no part of it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
