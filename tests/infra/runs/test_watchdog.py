"""Real processes that hang, and what their watchdog does about it."""

import signal
import subprocess
import sys

import psutil
import pytest

from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.runs.watchdog import Watchdog, watched
from vitline.infra.runs.watchdog_process import in_order, place
from vitline.infra.storage import open_store

WORK = """
import ctypes, os, sys, threading, time
from vitline.infra.runs.watchdog import Watchdog, watched

lock = threading.Lock()

def waits_for_a_lock():
    lock.acquire()
    lock.acquire()

def reads_and_keeps_the_interpreter_lock():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def reads_a_pipe_that_nobody_writes():
    os.read(os.pipe()[0], 1)

def another_thread_moves_for_twice_the_limit():
    def move():
        until = time.monotonic() + 2 * float(sys.argv[3])
        while time.monotonic() < until:
            watchdog.progress()
            time.sleep(0.01)
    thread = threading.Thread(target=move)
    thread.start()
    thread.join()

def another_thread_idles():
    threading.Event().wait()

threading.Thread(target=another_thread_idles, daemon=True).start()
notes_end = sys.argv[4] == "notes_end"
with Watchdog(sys.argv[1], 1, float(sys.argv[3]), who="rank3", fields={"rank": 3}, notes_end=notes_end) as watchdog:
    print("working", flush=True)
    globals()[sys.argv[2]]()
"""


@pytest.fixture
def run(tmp_path):
    run = open_store(tmp_path / "run")
    acquire_lease(run, "job-abc", job_state=lambda job: "failed", owner="test")
    return run


@pytest.fixture
def started(run):
    """started(work): a process with a watchdog that does this work."""
    processes = []

    def start(work, timeout_s=1.0, how=""):
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, run.uri, work, str(timeout_s), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "working\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def records(run):
    return [run.read_json(key) for key in run.list("errors/")]


@pytest.mark.parametrize(
    "work",
    [
        "reads_and_keeps_the_interpreter_lock",
        pytest.param("waits_for_a_lock", marks=pytest.mark.slow),
        pytest.param("reads_a_pipe_that_nobody_writes", marks=pytest.mark.slow),
    ],
)
def test_a_hung_process_leaves_its_stacks_in_store_and_log_and_is_killed(run, started, work):
    process = started(work)
    _, log = process.communicate()
    assert process.returncode == -signal.SIGKILL
    (record,) = records(run)
    assert record["rank"] == 3
    assert record["error"].startswith("no progress for 1 s: it is in ")
    assert record["error"].endswith(run.uri_of(record["stacks"]))
    assert work in record["error"]
    stacks = run.read(record["stacks"]).decode()
    assert stacks.index(work) < stacks.index("another_thread_idles")
    assert stacks in log
    assert "rank3: no progress" in log


@pytest.mark.slow
def test_a_stopped_process_is_killed_with_the_state_of_its_threads(run, started):
    process = started("waits_for_a_lock", timeout_s=5.0)
    process.send_signal(signal.SIGSTOP)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (record,) = records(run)
    assert "The process is stopped" in record["error"]
    assert "T (stopped)" in run.read(record["stacks"]).decode()


@pytest.mark.slow
def test_progress_of_any_thread_keeps_a_process_alive(run, started):
    process = started("another_thread_moves_for_twice_the_limit", timeout_s=4.0)
    (child,) = psutil.Process(process.pid).children()
    process.communicate()
    assert process.returncode == 0
    assert not child.is_running()
    assert run.list("errors/") == run.list("stacks/") == []


@pytest.mark.slow
def test_the_end_of_a_process_is_noted_where_it_is_asked_for_and_its_attempt_goes_on(run, started):
    def killed(how):
        process = started("waits_for_a_lock", timeout_s=1000.0, how=how)
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        psutil.wait_procs([child])
        return [record["error"] for record in records(run)]

    assert killed("") == []
    assert killed("notes_end") == ["its process was killed, perhaps for its memory, or crashed"]
    write_state(run, "cancelled", 1)
    assert len(killed("notes_end")) == 1


@pytest.mark.slow
def test_an_attempt_that_has_lost_its_lease_is_killed_and_writes_nothing(run, started):
    acquire_lease(run, "job-abc", job_state=lambda job: "failed", owner="its successor")
    process = started("waits_for_a_lock")
    _, log = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert "waits_for_a_lock" in log
    assert run.list("errors/") == run.list("stacks/") == []


def test_a_watchdog_ends_with_the_process_it_watches_and_leaves_no_file(started, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = started("reads_a_pipe_that_nobody_writes", timeout_s=1000.0)
    (child,) = psutil.Process(process.pid).children()
    assert list(tmp_path.glob("vitline-stacks-*"))
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone == [child]
    assert not list(tmp_path.glob("vitline-stacks-*"))


def test_without_a_limit_there_is_no_watchdog(run, processes):
    with Watchdog(run.uri, 1, None, who="rank0"):
        assert list(watched("abc")) == ["a", "b", "c"]
        assert processes("watchdog_process") == []


def test_a_watchdog_that_was_killed_does_not_disturb_the_work(run, processes, caplog):
    with Watchdog(run.uri, 1, 1000.0, who="rank0"):
        (child,) = processes("watchdog_process")
        child.kill()
        psutil.wait_procs([child])
        assert list(watched("abc")) == ["a", "b", "c"]
    assert caplog.text.count("the watchdog of rank0 is gone") == 1


def test_the_thread_at_work_comes_first_and_its_innermost_frames_name_the_place():
    text = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 7 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/code/read.py", line 12 in read
  File "/code/load.py", line 3 in load
  File "/code/train.py", line 9 in train
  File "/code/main.py", line 1 in main
"""
    ordered = in_order(text, 0x7F0000000002)
    assert ordered.startswith("Current thread")
    assert place(ordered) == "it is in read (read.py:12), called by load (load.py:3), called by train (train.py:9)"
