"""A Ray that does not start, and what its processes need. No Ray is started here."""

import json
import os
import subprocess
import sys
import time

import pytest

from vitline.infra.children import child_environment
from vitline.infra.local import processes
from vitline.infra.local.processes import temporary_folder
from vitline.infra.local.ray_node import RayHead

SCRIPT = """
import os, pathlib, sys
from vitline.infra.local import processes, ray_node
folder = pathlib.Path(sys.argv[1])
words = "Traceback (most recent call last):\\\\n" + sys.argv[2]
program = f"print('{words}'); raise SystemExit(1)"
ray_node.RayHead.command = lambda self: [sys.executable, "-c", program]
sys.argv[1:] = ["--log-dir", str(folder), "--parent", str(os.getppid()), "--object-store-bytes", "100000000"]
ray_node.main()
"""


def start(script, *arguments):
    """The lines that the supervisor of Ray prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


SOCKET = "import multiprocessing.connection as c, tempfile; print(tempfile.gettempdir()); c.Listener(family='AF_UNIX')"


@pytest.mark.parametrize("length", [71, 200])
def test_processes_of_ray_can_make_sockets_below_a_long_tmpdir(tmp_path, monkeypatch, length):
    scratch = tmp_path / "scratch"
    scratch = scratch / ("x" * max(1, length - len(str(scratch))))
    scratch.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with temporary_folder() as folder:
        head = RayHead(folder / "ray", folder / "token", folder / "login", 8265)
        environment = child_environment(head.environment())
        done = subprocess.run([sys.executable, "-c", SOCKET], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert os.path.realpath(done.stdout.strip()) == str(scratch)
    assert scratch.exists()


def test_processes_that_compute_or_wait_for_a_processor_make_progress_and_others_do_not(monkeypatch):
    monkeypatch.setattr(processes, "_LOOK_AT_ACTIVITY_S", 0.2)
    works, sleeps = (
        subprocess.Popen([sys.executable, "-c", f"import time\nwhile True: {does}"])
        for does in ("pass", "time.sleep(9)")
    )
    try:
        of_work, of_sleep = processes.Stillness(), processes.Stillness()
        while of_sleep.seconds(sleeps.pid) < 2:
            of_work.seconds(works.pid)
            time.sleep(0.05)
        assert of_work.seconds(works.pid) < of_sleep.seconds(sleeps.pid)
    finally:
        for each in (works, sleeps):
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_ray_that_does_nothing_ends_in_a_sentence_that_says_what_it_waited_for(tmp_path):
    hangs = SCRIPT.replace("print('{words}'); raise SystemExit(1)", "import time; time.sleep(1000)")
    limits = "processes._LOOK_AT_ACTIVITY_S, ray_node.STILL_S, ray_node._SAY_EVERY_S = 0.2, 3.0, 1.0"
    lines = start(hangs.replace("ray_node.main()", f"{limits}\nray_node.main()"), tmp_path, "")
    waiting, error = lines[0]["waiting"], lines[-1]["error"]
    assert "Ray is starting: its job server http://127.0.0.1:" in waiting
    assert "does not answer" in error
    assert "its processes have done nothing for 3 s" in error


@pytest.mark.slow
def test_a_start_that_fails_ends_in_one_line_without_colours(tmp_path):
    words = r"Exception: \x1b[31mThe current node timed out during startup.\x1b[0m"
    (line,) = start(SCRIPT, tmp_path, words)
    assert line == {"error": "`ray start` ended with code 1: Exception: The current node timed out during startup."}
