"""Prepares empty databases of MLflow and Prefect, once per installation. Creating the tables delays the first start of a
server by 3 to 40 s; copying a prepared database takes no time.

python -m infra.local.first_start
"""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from infra.local.processes import child_environment, tail
from infra.settings import NO_TELEMETRY


def prepared_database(package: str) -> Path:
    """The path of the empty database for the installed version of `package`, which may not exist yet."""
    return Path(sys.prefix) / "share" / "vitline" / f"{package}-{version(package)}.sqlite"


def copy_database(package: str, to: Path) -> bool:
    """Copies the prepared database to `to`, unless one exists there. False if none was prepared: the server creates its own."""
    if to.exists() or not (source := prepared_database(package)).exists():
        return to.exists()
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to.with_name(f".{to.name}"))
    to.with_name(f".{to.name}").replace(to)
    return True


def make_empty_databases() -> None:
    """Creates the databases that do not exist yet. Raises RuntimeError with the last lines of the program's output."""
    for package in ("mlflow", "prefect"):
        path = prepared_database(package)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "prefect.db"
            commands = {
                "mlflow": ["mlflow", "db", "upgrade", f"sqlite:///{made}"],
                "prefect": ["prefect", "server", "database", "upgrade", "--yes"],
            }
            _run(commands[package], Path(folder))
            part = path.with_name(f".{path.name}")
            part.unlink(missing_ok=True)
            with sqlite3.connect(made) as connection:  # includes data that is still in the write-ahead log
                connection.execute("VACUUM INTO ?", (str(part),))
            connection.close()
            part.replace(path)


def _run(command: list[str], folder: Path) -> None:
    environment = child_environment(
        {"PREFECT_HOME": str(folder), **NO_TELEMETRY},
        prefixes=("MLFLOW_", "PREFECT_"),
    )
    with open(folder / "log", "wb") as log:
        done = subprocess.run([sys.executable, "-P", "-m", *command], env=environment, stdout=log, stderr=log)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` ended with code {done.returncode}:\n{tail(folder / 'log')}\n"
            "Run `make install` again."
        )


if __name__ == "__main__":
    make_empty_databases()
