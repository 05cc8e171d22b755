"""A Ray that does not start, and what its processes need. No Ray is started here."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vitline.infra.children import child_environment
from vitline.infra.local import processes, ray_node
from vitline.infra.local.processes import short_base
from vitline.infra.local.stack_config import StackConfig

SOCKET = "import multiprocessing.connection as c, tempfile; print(tempfile.gettempdir()); c.Listener(family='AF_UNIX')"


@pytest.mark.parametrize("length", [71, 200])
def test_processes_of_ray_can_make_sockets_below_a_long_tmpdir(tmp_path, monkeypatch, length):
    scratch = tmp_path / "scratch"
    scratch = scratch / ("x" * max(1, length - len(str(scratch))))
    scratch.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with tempfile.TemporaryDirectory(prefix="vl-", dir=short_base()) as folder:
        config = StackConfig(id="0a", directory=Path(folder), ports={"ray": 8265}, object_store=False, only_ray=True)
        environment = child_environment(ray_node.environment(config))
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


HANGS = """
import json, math, os, pathlib, sys
from vitline.infra.local import processes, ray_node, supervisor
from vitline.infra.local.stack_config import StackConfig, write_stack_config

config = StackConfig(id="0a", directory=pathlib.Path(sys.argv[1]), ports={"ray": 9}, object_store=False, only_ray=True)
write_stack_config(config)
processes._LOOK_AT_ACTIVITY_S, supervisor.STILL_S, supervisor._SAY_EVERY_S = 0.2, math.inf, 1.0
answer = supervisor.answer
def say(line):
    answer(line)
    if "does not answer" in line.get("waiting", "") and "asleep" in (config.directory / "ray.log").read_text():
        supervisor.STILL_S = 3.0  # from now on
supervisor.answer = say
ray_node.command = lambda config: [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(1000)"]
sys.argv[1:] = [f"--{name}={config.directory}" for name in ("directory", "log-dir")]
sys.argv += ["--services=ray", f"--parent={os.getppid()}"]
supervisor.main()
"""


@pytest.mark.slow
def test_a_ray_that_does_nothing_ends_in_a_sentence_that_says_what_it_waited_for(tmp_path):
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=240)
    *waiting, error = done.stdout.splitlines()
    assert "waiting for ray: its job server http://127.0.0.1:9 does not answer" in waiting[-1], done.stderr
    assert "ray has done nothing for 3 s, and is not ready: its job server" in error
    assert "The end of its log: asleep" in error
