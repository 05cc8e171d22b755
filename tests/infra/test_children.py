"""Child processes: what they import, how they end."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from vitline.infra.children import how_it_ended, is_running, start_python

CHILD = """
import os, sys
from vitline.infra.children import end_with_parent
if not end_with_parent(int(sys.argv[1])):
    print("gone", flush=True)
    raise SystemExit
print(os.getpid(), flush=True)
import time
time.sleep(1000)
"""
PARENT = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from vitline.infra.children import start_python
child = start_python("of_the_test", str(os.getpid()), stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "of_the_test.py").write_text(CHILD)
    return tmp_path


def test_a_child_finds_a_module_of_a_folder_that_was_added_and_ends_with_its_parent(module):
    parent = subprocess.run([sys.executable, "-c", PARENT, str(module)], capture_output=True, text=True, timeout=240)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    child, deadline = int(parent.stdout), time.monotonic() + 120
    while psutil.pid_exists(child) and is_running(psutil.Process(child)):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def test_a_child_whose_parent_has_ended_before_is_told(module, monkeypatch):
    monkeypatch.syspath_prepend(str(module))
    child = start_python("of_the_test", "1" if os.getpid() != 1 else "2", stdout=subprocess.PIPE)
    assert child.communicate(timeout=240)[0] == b"gone\n"


def test_how_a_process_ended():
    assert how_it_ended(-signal.SIGKILL) == "ended by SIGKILL"
    assert how_it_ended(-99) == "ended by signal 99"
    assert how_it_ended(3) == "ended with exit code 3"
