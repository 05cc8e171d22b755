"""The databases of MLflow and Prefect in a local stack: prepared empty, copied, migrated to the installed version.

Creating the tables delays the first start of a server by 3 to 40 s; copying a prepared database takes no time. This prepares
them, once per installation:

python -m vitline.infra.local.databases
"""

import ast
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import distribution, version
from itertools import count
from pathlib import Path

from vitline.infra.children import child_environment
from vitline.infra.local.processes import tail
from vitline.infra.plain_text import last_words
from vitline.infra.settings import NO_TELEMETRY

_REVISIONS = {  # the folder of each package with one file per revision of its tables
    "mlflow": "store/db_migrations/versions",
    "prefect": "server/database/_migrations/versions/sqlite",
}
_IN_WORK = ".migrating-"
_BUSY_S = 5.0  # how long a database may be locked, as by a server that is ending


def database_file(directory: Path, package: str) -> Path:
    """The database of `package` in the stack in `directory`."""
    return directory / package / f"{package}.db"


def ready_database(directory: Path, package: str) -> None:
    """Makes the database of a server ready for its start: copies the prepared one where there is none.

    Raises RuntimeError for one of another revision than the installed `package` has. The server itself would change it without
    a copy, or end.
    """
    path = database_file(directory, package)
    if not copy_database(package, path) or not (revision := _revision_of(path)):
        return  # the server creates its tables, or says what is wrong with the file
    if revision != _newest_revision(package, path, revision):
        raise RuntimeError(
            f"the database {path} is of an older version of {package} than {version(package)}. "
            "Run `vitline stack down`, then `vitline stack up`, which migrates it and keeps a copy."
        )


def copy_database(package: str, to: Path) -> bool:
    """Copies the prepared database to `to`, unless one exists there. False if none was prepared: the server creates its own."""
    if to.exists() or not (source := prepared_database(package)).exists():
        return to.exists()
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to.with_name(f".{to.name}"))
    to.with_name(f".{to.name}").replace(to)
    return True


def migrate_database(directory: Path, package: str, announce: Callable[[str], None]) -> None:
    """Migrates the database of `package` in the stack in `directory` where an older version has made it.

    The migration works on a copy, which takes the place of the database once it is whole; the database as it was stays beside
    it. Raises RuntimeError, and leaves the database as it is, where it is in use, cannot be migrated, or is of a newer version.
    """
    path = database_file(directory, package)
    for left in path.parent.glob(f"{_IN_WORK}*"):  # of a start that was killed
        shutil.rmtree(left)
    if not path.exists() or not (revision := _revision_of(path)):
        return
    newest = _newest_revision(package, path, revision)
    if revision == newest:
        return
    announce(f"migrating the database {path} to {package} {version(package)}")
    try:
        kept = _migrate(package, path, newest)
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise RuntimeError(
            f"The database {path} is of an older version of {package} and could not be migrated to {version(package)}: {error}\n"
            "It was not changed. Fix the cause and run `vitline stack up` again; or install the version that wrote it; or move "
            "the file away to start with an empty database."
        ) from error
    announce(f"migrated it; the database as it was is {kept}, which you may delete when you do not need it any more")


def prepared_database(package: str) -> Path:
    """The path of the empty database for the installed version of `package`, which may not exist yet."""
    return Path(sys.prefix) / "share" / "vitline" / f"{package}-{version(package)}.sqlite"


def make_empty_databases() -> None:
    """Creates the databases that do not exist yet. Raises RuntimeError with the last lines of the program's output."""
    for package in _REVISIONS:
        path = prepared_database(package)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "prefect.db"
            if problem := _upgrade(package, made, log := Path(folder) / "log"):
                raise RuntimeError(f"{problem}:\n{tail(log)}\nRun `make install` again.")
            part = path.with_name(f".{path.name}")
            part.unlink(missing_ok=True)
            with sqlite3.connect(made) as connection:  # includes data that is still in the write-ahead log
                connection.execute("VACUUM INTO ?", (str(part),))
            connection.close()
            part.replace(path)


def _revision_of(path: Path) -> str:
    """The revision of the tables in the database at `path`; empty where it has none, and where it is no database.

    Raises RuntimeError while another program has locked it.
    """
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise RuntimeError(
                f"The database {path} is in use by another program ({error}). End that program."
            ) from error
        return ""  # no such table
    except sqlite3.DatabaseError:
        return ""
    return str(row[0]) if row else ""


def _newest_revision(package: str, path: Path, revision: str) -> str:
    """The revision that the installed `package` works with. Raises RuntimeError where it does not know `revision`."""
    before = dict(_known_revisions(package))
    if revision not in before:
        copies = ", ".join(str(copy) for copy in sorted(path.parent.glob(f"{path.name}.before-*")))
        raise RuntimeError(
            f"The database {path} has the revision {revision}, which {package} {version(package)} does not know: a newer version "
            f"wrote it. It was not changed. Install a version of {package} that is at least as new; or move the file away to "
            f"start with an empty database{f', or with a copy from before a migration: {copies}' if copies else ''}."
        )
    (newest,) = before.keys() - {earlier for every in before.values() for earlier in every}
    return newest


def _known_revisions(package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each revision of the installed `package` with those it follows. Reads the files: importing the package takes seconds."""
    for file in Path(str(distribution(package).locate_file(package)), _REVISIONS[package]).glob("*.py"):
        values = {}
        for line in ast.parse(file.read_bytes()).body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and target.id in ("revision", "down_revision"):
                values[target.id] = ast.literal_eval(line.value)  # type: ignore[attr-defined]
        if "revision" in values:
            earlier = values["down_revision"] or ()
            yield values["revision"], (earlier,) if isinstance(earlier, str) else tuple(earlier)


def _migrate(package: str, path: Path, newest: str) -> Path:
    """Puts a migrated copy in the place of the database. Returns the path under which the database as it was is kept."""
    folder = Path(tempfile.mkdtemp(prefix=_IN_WORK, dir=path.parent))
    work = folder / "prefect.db"  # the name that Prefect gives it; MLflow takes any
    try:
        with _held(path):
            with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(work)) as copy:
                original.backup(copy)
            if problem := _upgrade(package, work, log := path.with_name("migration.log")):
                raise RuntimeError(f"{problem}: {last_words(tail(log))}\nIts output is in {log}.")
            _check_whole(work, newest)
            shutil.copymode(path, work)
            kept = _keep(path, f"{path.name}.before-{version(package)}", folder)
            os.replace(work, path)
        return kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Meanwhile nobody writes to the database, and all its data is in the file itself. A write-ahead log that a killed server has
    left would be applied to the file that takes its place."""
    with closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN IMMEDIATE")
        yield


def _check_whole(path: Path, newest: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise RuntimeError(f"the migrated database is damaged ({found})")
    if (revision := _revision_of(path)) != newest:
        raise RuntimeError(f"the migrated database has the revision {revision or 'none'} instead of {newest}")


def _keep(path: Path, name: str, work: Path) -> Path:
    """Gives a file a second name, with a number where that name is taken. Where a file has one name only, as on FAT, it is copied,
    in the folder `work` first."""
    for number in count(1):
        kept = path.with_name(name if number == 1 else f"{name}-{number}")
        if kept.exists():
            continue
        try:
            os.link(path, kept)
        except FileExistsError:
            continue
        except OSError:
            os.rename(shutil.copy2(path, work / "kept"), kept)
        return kept
    raise AssertionError("there is always another number")


def _upgrade(package: str, path: Path, log: Path) -> str:
    """Creates or changes the tables with the package's own command. Returns an empty text, or how the command failed."""
    command = {
        "mlflow": ["mlflow", "db", "upgrade", f"sqlite:///{path}"],
        "prefect": ["prefect", "server", "database", "upgrade", "--yes"],  # of prefect.db in its home
    }[package]
    environment = child_environment(
        {"PREFECT_HOME": str(path.parent), **NO_TELEMETRY},
        prefixes=("MLFLOW_", "PREFECT_"),
    )
    with open(log, "wb") as output:
        done = subprocess.run([sys.executable, "-P", "-m", *command], env=environment, stdout=output, stderr=output)
    return f"`{' '.join(command)}` ended with code {done.returncode}" if done.returncode else ""


if __name__ == "__main__":
    make_empty_databases()
