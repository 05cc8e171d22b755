"""What the demo takes: wall time, peak memory and disk of a first run into an empty root, and of a second run.

    .venv/bin/python tests/benchmarks/demo_cost.py [--profile smoke]

Memory is the sum of unique set sizes (what no other process shares) over the demo and all its descendants, twice a
second. Downloads are part of the first run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from infra.settings import inherited_environment

SAMPLE_S = 0.5


def unique_bytes(process: psutil.Process) -> int:
    """Unique set size of a process and its descendants; those that end meanwhile count nothing."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def run(root: Path, profile: str) -> tuple[float, int]:
    """(seconds, peak bytes) of one demo into `root`; its output goes to this terminal."""
    started, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "flows.cli", "demo", "--profile", profile]
    demo = subprocess.Popen(command, env=inherited_environment((), VITLINE_ROOT=str(root)))
    process = psutil.Process(demo.pid)
    while demo.poll() is None:
        try:
            peak = max(peak, unique_bytes(process))
        except psutil.NoSuchProcess:
            break
        time.sleep(SAMPLE_S)
    if demo.wait():
        raise SystemExit(f"the demo ended with {demo.returncode}")
    return time.monotonic() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="full", choices=["full", "smoke"])
    profile = parser.parse_args().profile
    with tempfile.TemporaryDirectory(prefix="vitline-demo-") as folder:
        runs = [run(Path(folder) / "store", profile) for _ in range(2)]
        disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    for name, (seconds, peak) in zip(("first", "second"), runs, strict=True):
        print(f"{name} run: {seconds:.0f} s, peak memory {peak / 1e9:.2f} GB")
    print(f"store and logs: {disk / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
