"""Where this machine keeps what is not an artifact: logs and downloads."""

from pathlib import Path

from infra.settings import Settings
from infra.storage import raising_unwritable


def local_dir(settings: Settings) -> Path:
    """`VITLINE_HOME`, else beside a store on this machine, else (the store is remote) `./.vitline`."""
    if settings.home is not None:
        return settings.home.absolute()
    if "://" in settings.root and not settings.root.startswith("file://"):
        return Path.cwd() / ".vitline"
    return Path(settings.root.removeprefix("file://")).resolve().parent


def log_dir(settings: Settings) -> Path:
    """The one folder of logs: Ray's and the jobs'."""
    return _made(local_dir(settings) / "logs")


def download_dir(settings: Settings) -> Path:
    """Cache of downloads, kept by checksum; safe to delete."""
    return _made(local_dir(settings) / "downloads")


def _made(path: Path) -> Path:
    with raising_unwritable(f"the folder {path}"):
        path.mkdir(parents=True, exist_ok=True)
    return path
