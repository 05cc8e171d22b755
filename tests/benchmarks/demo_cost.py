"""What the demo takes: wall time, peak memory and disk of a first run in an empty folder, and of a second run.

    .venv/bin/python tests/benchmarks/demo_cost.py [--profile smoke]

Memory is the sum of unique set sizes (what no other process shares) over the demo, the stack's supervisor and all their
descendants, once a second. Downloads and the start of the stack are part of the first run; it is up for the second.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from vitline.infra.local.stack import find_stack
from vitline.infra.settings import inherited_environment

SAMPLE_S = 1.0


def family(*pids: int) -> set[psutil.Process]:
    """The processes and all their descendants, each once: the demo is the parent of a stack that it starts."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def unique_bytes(processes: set[psutil.Process]) -> int:
    """The sum of unique set sizes; processes that end meanwhile count as zero."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().uss
    return total


def vitline(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The command, run in `folder`, with the code of this checkout."""
    environment = inherited_environment((), PYTHONPATH=str(Path(__file__).parents[2]))
    return subprocess.Popen([sys.executable, "-m", "vitline.flows.cli.main", *arguments], cwd=folder, env=environment)


def run(folder: Path, profile: str) -> tuple[float, int]:
    """(seconds, peak bytes) of one demo in `folder`; its output goes to this terminal."""
    started, peak = time.monotonic(), 0
    demo = vitline(folder, "demo", "--profile", profile)
    while demo.poll() is None:
        stack = find_stack(folder / ".vitline" / "stack")
        peak = max(peak, unique_bytes(family(demo.pid, *([stack.supervisor_pid] if stack else []))))
        time.sleep(SAMPLE_S)
    if demo.wait():
        raise SystemExit(f"the demo ended with {demo.returncode}")
    return time.monotonic() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="full", choices=["full", "smoke"])
    profile = parser.parse_args().profile
    with tempfile.TemporaryDirectory(prefix="vitline-demo-") as folder:
        try:
            runs = [run(Path(folder), profile) for _ in range(2)]
        finally:
            vitline(Path(folder), "stack", "down").wait()
        disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    for name, (seconds, peak) in zip(("first", "second"), runs, strict=True):
        print(f"{name} run: {seconds:.0f} s, peak memory {peak / 1e9:.2f} GB")
    print(f"store, servers and logs: {disk / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
