"""Databases of MLflow and Prefect that another version has made: by the downgrades of their own Alembic."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version

import httpx
import pytest

from vitline.infra.children import child_environment
from vitline.infra.local import databases
from vitline.infra.local.databases import (
    check_database,
    database_file,
    make_empty_databases,
    prepare_database,
    prepared_database,
)
from vitline.infra.local.stack import find_stack, restart_service, start_stack, stop_stack
from vitline.infra.local.stack_config import load_stack_config, prepare_stack_config
from vitline.infra.local.supervisor import Supervisor
from vitline.infra.settings import NO_TELEMETRY

PACKAGES = ("mlflow", "prefect")
DOWNGRADE_MLFLOW = """
import sys, alembic.command
from mlflow.store.db.utils import _get_alembic_config
alembic.command.downgrade(_get_alembic_config("sqlite:///" + sys.argv[1]), "-2")
"""
DOWNGRADE = {
    "mlflow": ("-c", DOWNGRADE_MLFLOW),
    "prefect": ("-m", "prefect", "server", "database", "downgrade", "--yes", "-r", "-2"),
}
ADD_ROW = {
    "mlflow": "INSERT INTO experiments (experiment_id, name, artifact_location, lifecycle_stage, creation_time,"
    " last_update_time) VALUES (77, ?, 'mlflow-artifacts:/77', 'active', 1, 1)",
    "prefect": "INSERT INTO flow (id, name) VALUES ('00000000-0000-4000-8000-000000000077', ?)",
}
ROWS = {"mlflow": "SELECT name FROM experiments WHERE experiment_id = 77", "prefect": "SELECT name FROM flow"}
WRITER = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute(sys.argv[2], ("kept",))
os.kill(os.getpid(), signal.SIGKILL)
"""
MIGRATE = """
import pathlib, sys
from vitline.infra.local.databases import prepare_database
prepare_database(pathlib.Path(sys.argv[1]), sys.argv[2], print)
"""


def python(*arguments, **variables):
    environment = child_environment(variables | NO_TELEMETRY, prefixes=("PREFECT_", "MLFLOW_"))
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The folder of a stack whose databases are two revisions old, with a row in what a killed server left in the WAL."""
    directory = tmp_path_factory.mktemp("older")
    make_empty_databases()
    for package in PACKAGES:
        path = database_file(directory, package)
        path.parent.mkdir()
        shutil.copyfile(prepared_database(package), path)
        done = python(*DOWNGRADE[package], *([path] if package == "mlflow" else []), PREFECT_HOME=str(path.parent))
        assert done.returncode == 0, done.stderr
        python("-c", WRITER, path, ADD_ROW[package])
        assert path.with_name(f"{path.name}-wal").stat().st_size
    return directory


@pytest.fixture(params=PACKAGES)
def package(request):
    return request.param


@pytest.fixture
def stack_folder(older, tmp_path):
    return shutil.copytree(older, tmp_path / "stack")


def ask(path, query):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchone()[0]


def revision(path):
    return ask(path, "SELECT version_num FROM alembic_version")


def files(path):
    """What lies beside the database, but for the files that a reader of SQLite makes."""
    return {
        p.name
        for p in path.parent.glob("*")
        if p.name.startswith((path.name, ".")) and p.suffix[-4:] not in ("-wal", "-shm")
    }


def up(directory, package, said):
    return start_stack(
        directory,
        log_dir=directory.parent / "logs",
        services=(package,),
        root=str(directory.parent / "root"),
        ends_with_caller=True,
        announce=said.append,
    )


@pytest.mark.slow
def test_an_older_database_is_migrated_and_kept_as_it_was(stack_folder, package):
    path, said = database_file(stack_folder, package), []
    before, old_names = revision(path), set()
    mode = path.stat().st_mode
    for number in ("", "-2"):  # a name that is taken is not taken twice
        kept = path.with_name(f"{path.name}.before-{version(package)}{number}")
        prepare_database(stack_folder, package, said.append)
        assert revision(path) == revision(prepared_database(package))
        assert (revision(kept), ask(kept, ROWS[package]), ask(path, ROWS[package])) == (before, "kept", "kept")
        assert path.stat().st_mode == mode
        old_names.add(kept.name)
        assert files(path) == {path.name, *old_names}
        assert str(kept) in said[-1]
        shutil.copyfile(kept, path)


@pytest.mark.slow
def test_a_database_of_this_version_is_left_alone(stack_folder, package):
    path = database_file(stack_folder, package)
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    shutil.copyfile(prepared_database(package), path)
    prepare_database(stack_folder, package, pytest.fail)
    prepare_database(stack_folder / "new", package, pytest.fail)
    assert database_file(stack_folder / "new", package).read_bytes() == prepared_database(package).read_bytes()
    assert (path.read_bytes(), files(path)) == (prepared_database(package).read_bytes(), {path.name})


@pytest.mark.slow
def test_an_installation_without_empty_databases_makes_one_in_the_stack(tmp_path, package, monkeypatch):
    prepared, said = prepared_database(package), []
    monkeypatch.setattr(databases, "prepared_database", lambda package: tmp_path / "none")
    for _ in range(2):
        prepare_database(tmp_path, package, said.append)
        check_database(tmp_path, package)
    assert revision(database_file(tmp_path, package)) == revision(prepared)
    assert said == [f"creating the tables of {package} {version(package)}"]


@pytest.mark.slow
def test_a_newer_database_is_refused_and_not_changed(stack_folder, package):
    path, said = database_file(stack_folder, package), []
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0123456789ab'")
        connection.commit()
        connection.execute("PRAGMA journal_mode = DELETE")  # as each migration does first
    path.with_name(f"{path.name}.before-9.9").touch()
    before = path.read_bytes()
    with pytest.raises(
        RuntimeError, match=f"(?s){package}.db .*0123456789ab.*not changed.*newer version of {package}.*before-9.9"
    ):
        up(stack_folder, package, said)
    assert (find_stack(stack_folder), path.read_bytes()) == (None, before)


@pytest.mark.slow
def test_a_migration_that_fails_changes_nothing(stack_folder, package):
    path, said = database_file(stack_folder, package), []
    before = revision(path)
    with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(prepared_database(package))) as new, old:
        listed = "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL"
        missing = {*new.execute(listed)} - {*old.execute(listed)}
        for _, name in missing:
            old.execute(f'CREATE TABLE "{name}" (in_the_way)')
    assert missing, "the last two revisions add neither a table nor an index"
    with pytest.raises(
        RuntimeError,
        match=r"(?s)could not be migrated.*already.*output is in .*migration.log.*not changed.*stack up` again",
    ):
        prepare_database(stack_folder, package, said.append)
    assert (revision(path), ask(path, ROWS[package]), files(path)) == (before, "kept", {path.name})


@pytest.mark.slow
def test_a_killed_migration_is_done_again(stack_folder, package):
    path = database_file(stack_folder, package)
    before = revision(path)
    with subprocess.Popen(
        [sys.executable, "-c", MIGRATE, str(stack_folder), package], env=child_environment(), start_new_session=True
    ) as migration:
        while not any(path.parent.glob(".migrating-*/prefect.db")):
            assert migration.poll() is None
            time.sleep(0.01)
        os.killpg(migration.pid, signal.SIGKILL)
    assert (revision(path), ask(path, ROWS[package])) == (before, "kept")
    prepare_database(stack_folder, package, [].append)
    assert revision(path) == revision(prepared_database(package))
    assert files(path) == {path.name, f"{path.name}.before-{version(package)}"}


def test_a_database_in_use_is_not_migrated(stack_folder, package):
    path = database_file(stack_folder, package)
    with closing(sqlite3.connect(path, isolation_level=None)) as server:
        server.execute("BEGIN IMMEDIATE")
        server.execute("UPDATE alembic_version SET version_num = version_num")
        with pytest.raises(RuntimeError, match="database is locked"):
            prepare_database(stack_folder, package, [].append)
    assert files(path) == {path.name}


def test_a_restarted_service_neither_migrates_nor_uses_an_older_database(stack_folder, package):
    """The packages were upgraded below a running stack: Prefect would migrate its database without a copy."""
    config, _ = prepare_stack_config(stack_folder, {}, str(stack_folder.parent / "root"))
    before = revision(database_file(stack_folder, package))
    supervisor = Supervisor(config, stack_folder, [package])
    for running in supervisor.running.values():
        supervisor._launch(running)
        assert running.process is None
        assert "is of another version" in running.problem
        assert "`vitline stack up`, which migrates it" in running.problem
    assert revision(database_file(stack_folder, package)) == before


@pytest.mark.long
@pytest.mark.servers
def test_the_stack_serves_what_the_older_database_holds(stack_folder, package):
    said = []
    try:
        state = up(stack_folder, package, said)
        assert [line for line in said if f"{package}.db.before-{version(package)}" in line]
        login = tuple(load_stack_config(stack_folder).user_and_password().split(":"))
        path, body = {
            "mlflow": ("/api/2.0/mlflow/experiments/search", {"max_results": 9}),
            "prefect": ("/api/flows/filter", {}),
        }[package]
        reply = httpx.post(state.services[0].url + path, json=body, auth=login, timeout=60).raise_for_status().json()
        found = reply["experiments"] if package == "mlflow" else reply
        assert "kept" in {each["name"] for each in found}
        restart_service(stack_folder, package)
    finally:
        stop_stack(stack_folder)
