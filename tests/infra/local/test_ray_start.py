"""A Ray that does not start: the number of tries, and the error. No Ray is started here."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, pathlib, sys
from infra.local import processes, ray_node
folder, busy = pathlib.Path(sys.argv[1]), sys.argv[2] == "busy"
ray_node.is_busy = lambda: busy
words = "Traceback (most recent call last):\\\\nException: \\\\x1b[31mThe current node timed out during startup.\\\\x1b[0m"
program = f"import pathlib; open('{folder}/tries', 'a').write('x'); print('{words}'); raise SystemExit(1)"
ray_node.RayHead.command = lambda self: [sys.executable, "-c", program]
sys.argv[1:] = ["--log-dir", str(folder), "--parent", str(os.getppid()), "--object-store-bytes", "100000000"]
ray_node.main()
"""


@pytest.mark.parametrize(("machine", "tries"), [("busy", 5), ("quiet", 1)])
def test_start_that_timed_out_is_retried_only_on_a_busy_machine(tmp_path, machine, tries):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), machine],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    error = json.loads(done.stdout)["error"]
    assert error.startswith("`ray start` ended with code 1: Exception: The current node timed out during startup."), (
        done
    )
    assert ("in 5 tries (load" in error) == (machine == "busy")
    assert "\n" not in error + error.replace("\x1b", "\n")
    assert (tmp_path / "tries").read_text() == "x" * tries
