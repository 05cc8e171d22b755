"""Finding errors in the logs of services, in the formats of the real services."""

import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from vitline.infra.local import service_logs
from vitline.infra.local.service_logs import logged_errors, open_private, repeated_errors, shorten
from vitline.infra.local.stack_config import prepare_stack_config
from vitline.infra.local.supervisor import Supervisor

# What Prefect 3.8.8 wrote once a minute with SQLAlchemy 2.1.9, while its pages showed an active schedule.
TICK = """\
2026-11-22 19:{minute}:30 | ERROR   | prefect.server.services.scheduler - Unexpected error in: InvalidRequestError
Traceback (most recent call last):
  File "/venv/lib/prefect/server/services/base.py", line {minute}, in start
    await self.run_once()
sqlalchemy.exc.InvalidRequestError: Can't evaluate bulk DML statement; please supply a bulk_dml decorated function
"""
CHAINED = """\
2026-11-22 19:34:30 | ERROR   | docket.dependencies - mark_deployments_ready
Traceback (most recent call last):
  File "/venv/lib/sqlalchemy/engine/base.py", line 2000, in _exec_single_context
    self.dialect.do_execute(
sqlite3.OperationalError: database is locked

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/lib/docket/worker.py", line 12, in run
    result = function()
             ^^^^^^^^^^
sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) database is locked
[SQL: BEGIN IMMEDIATE]
(Background on this error at: https://sqlalche.me/e/20/e3q8)
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/venv/lib/prefect/cli/worker.py", line 1, in start
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/venv/lib/httpx/client.py", line 2, in send
    | httpx.ConnectError: All connection attempts failed
    +------------------------------------
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "prefect.log"
    return lambda text: path.write_text(text) and path


def test_traceback_once_a_minute_is_one_repeated_error(log):
    path = log("Check out the dashboard\n" + "".join(TICK.format(minute=minute) for minute in range(40, 51)))
    (error,) = repeated_errors(path, now=datetime(2026, 11, 22, 20, 0, tzinfo=UTC))
    assert error.text.startswith("sqlalchemy.exc.InvalidRequestError: Can't evaluate bulk DML")
    assert (error.times, error.traceback) == (11, True)
    assert error.last == datetime(2026, 11, 22, 19, 50, 30, tzinfo=UTC)
    assert repeated_errors(path, now=datetime(2026, 11, 23, 20, 0, tzinfo=UTC)) == []


def test_chained_tracebacks_are_one_error_named_after_the_last(log):
    (error,) = logged_errors(log(CHAINED))
    assert error.text == "sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) database is locked"
    assert (error.times, error.traceback) == (1, True)
    assert repeated_errors(log(2 * CHAINED), now=error.last) == []
    assert [e.times for e in repeated_errors(log(3 * CHAINED), now=error.last)] == [3]


SENT = "write tcp 127.0.0.1:12393->127.0.0.1:60492: "


def test_reads_that_a_client_has_closed_are_no_fault_of_the_store(log):
    line = "E1125 14:17:33.939282 reader_at.go:270 fetching chunk &{{FileId:1,c87d288ba3 ViewOffset:{at}}}: {why}\n"
    for left in ("context canceled", f"{SENT}write: broken pipe", f"{SENT}write: connection reset by peer"):
        assert repeated_errors(log("".join(line.format(at=at, why=left) for at in range(5)))) == []
    for fault in ("unexpected EOF", f"{SENT}i/o timeout", "write /data/1.dat: broken pipe"):
        (error,) = repeated_errors(log("".join(line.format(at=at, why=fault) for at in range(5))))
        assert error.text.endswith(fault)


def test_error_lines_of_every_service_are_found_and_others_ignored(log):
    lines = (
        "2026-11-22 19:33:16 INFO:     127.0.0.1:58446 - GET /errors/ERRORS 200 OK",
        "E1122 19:34:30.123456 filer.go:12 volume 3 is full",
        "2026/11/22 19:35:02 ERROR mlflow.server: Exception on /api [GET]",
        "ERROR:    Exception in ASGI application",
        "2026-11-22 19:36:00,000\tINFO usage_lib.py:448 -- Usage stats collection is disabled.",
    )
    found = logged_errors(log("\n".join(lines)))
    assert [(error.text[:20], error.traceback) for error in found] == [
        ("E1122 19:34:30.12345", False),
        ("2026/11/22 19:35:02 ", False),
        ("ERROR:    Exception ", False),
    ]


def test_tracebacks_without_a_line_between_them_are_counted_separately(log):
    path = log(4 * 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n')
    assert [(error.text, error.times) for error in repeated_errors(path)] == [("ValueError: no", 4)]


def test_exception_groups_are_errors_and_a_missing_log_has_none(log, tmp_path):
    for rest in ("", "Worker stopped!\n"):
        (error,) = logged_errors(log(GROUP + rest))
        assert (error.text, error.traceback) == ("httpx.ConnectError: All connection attempts failed", True)
    assert logged_errors(tmp_path / "absent.log") == []


MIB = 1 << 20
# Each 50,000 lines are more than a log may have; it waits where it is two of such pieces ahead of those that shorten it.
COUNT = """
import pathlib, sys, time
for i in range(400_000):
    while i % 50_000 == 0 and len([*pathlib.Path(sys.argv[1]).glob("prefect.log.*")]) < i // 50_000 - 1:
        time.sleep(0.01)
    print(f"line {i:9d} of a service that writes and writes", flush=True)
"""


@pytest.mark.slow
def test_a_log_that_is_written_to_becomes_short_and_loses_no_line(tmp_path):
    log = tmp_path / "prefect.log"
    if not collapses(tmp_path):
        pytest.skip("this file system cannot take a piece out of a file")
    with open(open_private(log), "ab") as output:
        service = subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)], stdout=output)
    times = 0
    try:
        while service.poll() is None:
            times += shorten(log, most_bytes=2 * MIB, kept_bytes=MIB, files=1000)
    finally:
        service.kill()
        service.wait()
    times += shorten(log, most_bytes=2 * MIB, kept_bytes=MIB, files=1000)
    assert times > 3
    assert MIB <= log.stat().st_size <= 3 * MIB
    older = [tmp_path / f"prefect.log.{number}" for number in range(times, 0, -1)]
    lines = b"".join(path.read_bytes() for path in (*older, log)).splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(400_000))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == times + 1


def collapses(folder):
    probe = folder / "probe"
    probe.write_bytes(bytes(2 * MIB))
    file = os.open(probe, os.O_RDWR)
    try:
        return service_logs._take_out(file, MIB)
    finally:
        os.close(file)
        probe.unlink()


def test_a_log_on_another_file_system_is_copied_and_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr(service_logs, "_take_out", lambda file, size: False)
    log, text = tmp_path / "ray.log", os.urandom(3 * MIB + 17)
    log.write_bytes(text)
    with open(log, "ab") as service:
        assert shorten(log, most_bytes=2 * MIB, kept_bytes=MIB)
        assert ((tmp_path / "ray.log.1").read_bytes(), log.stat().st_size) == (text, 0)
        service.write(b"and on it goes\n")
    assert log.read_bytes() == b"and on it goes\n"
    assert not shorten(log, most_bytes=2 * MIB)
    assert not shorten(tmp_path / "absent.log")


def test_a_full_disk_leaves_a_log_as_it_is(tmp_path, full_disk):
    log = tmp_path / "ray.log"
    log.write_bytes(bytes(3 * MIB))
    (tmp_path / "ray.log.1").write_bytes(b"earlier")
    with full_disk(MIB), pytest.raises(OSError, match="too large"):
        shorten(log, most_bytes=2 * MIB, kept_bytes=MIB // 2)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {"ray.log": 3 * MIB, "ray.log.1": 7}


def test_the_supervisor_keeps_the_logs_of_a_service_within_a_bound(tmp_path):
    config, _ = prepare_stack_config(tmp_path / "stack", {})
    supervisor = Supervisor(config, tmp_path, ["prefect"])
    (tmp_path / "stack.log").write_bytes(b"ending\n")
    for round_ in range(6):
        with open(tmp_path / "prefect.log", "ab") as service:
            service.write(bytes([round_]) * (service_logs.MOST_BYTES + 1))
        supervisor.shorten_logs()
    logs = sorted(path.name for path in tmp_path.glob("*.log*"))
    assert logs == ["prefect.log", "prefect.log.1", "prefect.log.2", "prefect.log.3", "stack.log"]
    assert sum(path.stat().st_size for path in tmp_path.glob("prefect.log*")) < 5 * service_logs.MOST_BYTES
