"""The databases of MLflow and Prefect in a local stack: copied from empty ones, migrated to the installed version.

Creating the tables delays the first start of a server by 3 to 40 s; copying an empty database takes no time. This creates the
empty ones, once per installation:

python -m vitline.infra.local.databases
"""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from itertools import count
from pathlib import Path

from vitline.infra.children import child_environment
from vitline.infra.local.processes import tail
from vitline.infra.plain_text import last_words
from vitline.infra.settings import NO_TELEMETRY

_PACKAGES = ("mlflow", "prefect")
_IN_WORK = ".migrating-"
_BUSY_S = 5.0  # how long a database may be locked, as by a server that is ending
_UNKNOWN = "Can't locate revision"  # Alembic's words for tables of a version that is not installed


def database_file(directory: Path, package: str) -> Path:
    """The database of `package` in the stack in `directory`."""
    return directory / package / f"{package}.db"


def check_database(directory: Path, package: str) -> None:
    """Raises RuntimeError for a database of another revision than the installed `package` has. The server itself would change it
    without a copy, or end."""
    path = database_file(directory, package)
    if (revision := _revision_of(path)) and revision != _revision_of(_empty_database(directory, package)):
        raise RuntimeError(
            f"the database {path} is of another version of {package} than {version(package)}. "
            "Run `vitline stack down`, then `vitline stack up`, which migrates it and keeps a copy."
        )


def prepare_database(directory: Path, package: str, announce: Callable[[str], None]) -> None:
    """Makes the database of `package` in the stack in `directory` one of the installed version: by copying an empty one where there is
    none, by migrating that of an older version.

    The migration works on a copy, which takes the place of the database once it is whole; the database as it was stays beside
    it. Raises RuntimeError, and leaves the database as it is, where it is in use, cannot be migrated, or is of a newer version.
    """
    path, empty = database_file(directory, package), _empty_database(directory, package)
    for left in path.parent.glob(f"{_IN_WORK}*"):  # of a start that was killed
        shutil.rmtree(left)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not empty.exists():
        announce(f"creating the tables of {package} {version(package)}")
        _create_empty(package, empty)
    if not path.exists():
        _copy(empty, path)
        return
    revision, newest = _revision_of(path), _revision_of(empty)
    if revision in ("", newest):  # without a revision, the server says what is wrong with the file
        return
    announce(f"migrating the database {path} to {package} {version(package)}")
    try:
        kept = _migrate(package, path, newest)
    except (OSError, RuntimeError, sqlite3.Error) as error:
        copies = ", ".join(str(copy) for copy in sorted(path.parent.glob(f"{path.name}.before-*")))
        way_out = (
            f"A newer version of {package} wrote it: install one that is at least as new"
            if _UNKNOWN in str(error)
            else "Fix the cause and run `vitline stack up` again; or install the version that wrote it"
        )
        raise RuntimeError(
            f"The database {path} is of another version of {package} and could not be migrated to {version(package)}: {error}\n"
            f"It was not changed. {way_out}; or move the file away to start with an empty database"
            f"{f', or with a copy from before a migration: {copies}' if copies else ''}."
        ) from error
    announce(f"migrated it; the database as it was is {kept}, which you may delete when you do not need it any more")


def prepared_database(package: str) -> Path:
    """The path of the installation's empty database for the installed version of `package`, which may not exist yet."""
    return Path(sys.prefix) / "share" / "vitline" / f"{package}-{version(package)}.sqlite"


def make_empty_databases() -> None:
    """Creates the installation's empty databases that do not exist yet. Raises RuntimeError with the last error of the output."""
    for package in _PACKAGES:
        if not (path := prepared_database(package)).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _create_empty(package, path)


def _empty_database(directory: Path, package: str) -> Path:
    """The empty database of the installed version: that of the installation, else one in the stack, which may not exist yet."""
    prepared = prepared_database(package)
    return prepared if prepared.exists() else directory / package / f"empty-{version(package)}.sqlite"


def _create_empty(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "prefect.db"
        _upgrade(package, made, path.with_suffix(".log"))
        _copy(made, path)


def _copy(source: Path, to: Path) -> None:
    part = to.with_name(f".{to.name}")
    shutil.copyfile(source, part)
    part.replace(to)


def _revision_of(path: Path) -> str:
    """The revision of the tables in the database at `path`; empty where it has none, and where there is no database.

    Raises RuntimeError while another program has locked it.
    """
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", _BUSY_S, uri=True)) as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise RuntimeError(
                f"The database {path} is in use by another program ({error}). End that program."
            ) from error
        return ""  # no such file or table, or no database
    return str(row[0]) if row else ""


def _migrate(package: str, path: Path, newest: str) -> Path:
    """Puts a migrated copy in the place of the database. Returns the path under which the database as it was is kept."""
    folder = Path(tempfile.mkdtemp(prefix=_IN_WORK, dir=path.parent))
    copied, work = folder / "copied", folder / "prefect.db"
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as held:
            # A write-ahead log that a killed server has left would be applied to the file that takes its place.
            held.execute("PRAGMA journal_mode = DELETE")
            held.execute("BEGIN IMMEDIATE")  # meanwhile nobody writes to it
            with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(copied)) as copy:
                original.backup(copy)
            shutil.copymode(path, copied)
            shutil.copy(copied, work)
            _upgrade(package, work, path.with_name("migration.log"))
            if (revision := _revision_of(work)) != newest:
                raise RuntimeError(f"the migrated database has the revision {revision or 'none'} instead of {newest}")
            name = f"{path.name}.before-{version(package)}"
            names = (path.with_name(name if number == 1 else f"{name}-{number}") for number in count(1))
            kept = copied.rename(next(free for free in names if not free.exists()))
            work.replace(path)
        return kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _upgrade(package: str, path: Path, log: Path) -> None:
    """Creates or changes the tables with the package's own command. `path` must end in prefect.db, which Prefect looks for in its home.
    Raises RuntimeError with the last error of the output."""
    command = {
        "mlflow": ["mlflow", "db", "upgrade", f"sqlite:///{path}"],
        "prefect": ["prefect", "server", "database", "upgrade", "--yes"],
    }[package]
    environment = child_environment(
        {"PREFECT_HOME": str(path.parent), **NO_TELEMETRY},
        prefixes=("MLFLOW_", "PREFECT_"),
    )
    with open(log, "wb") as output:
        done = subprocess.run([sys.executable, "-P", "-m", *command], env=environment, stdout=output, stderr=output)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` ended with code {done.returncode}: {last_words(tail(log))}\nIts output is in {log}."
        )
    with closing(sqlite3.connect(path)) as connection:  # the file is used without its write-ahead log
        connection.execute("PRAGMA journal_mode = DELETE")


if __name__ == "__main__":
    make_empty_databases()
