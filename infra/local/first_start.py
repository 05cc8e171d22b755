"""Empty databases of MLflow and Prefect, made once per installation: making their tables takes a server's first start
3 to 40 s, a copy takes none.

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
    """Where the empty database of the installed version of `package` lies, or will."""
    return Path(sys.prefix) / "share" / "vitline" / f"{package}-{version(package)}.sqlite"


def copy_database(package: str, to: Path) -> bool:
    """Put a copy at `to`, unless there is a database already. False where none was prepared: the server makes its own."""
    if to.exists() or not (source := prepared_database(package)).exists():
        return to.exists()
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to.with_name(f".{to.name}"))
    to.with_name(f".{to.name}").replace(to)
    return True


def make_empty_databases() -> None:
    """Make the databases that are not there yet. Raises RuntimeError with the last lines of the program's output."""
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
            with sqlite3.connect(made) as connection:  # what is still in its write-ahead log comes along
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
            "Look whether `make install` ended well."
        )


if __name__ == "__main__":
    make_empty_databases()
