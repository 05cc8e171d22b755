"""CPU seconds of listing and help commands in an empty folder, and the load of an idle stack.

python tests/benchmarks/commands.py [--rounds 5]
python tests/benchmarks/commands.py --stack .vitline/stack [--seconds 60]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from vitline.infra.local.stack import processes_of

COMMANDS = (
    "--help", "data --help", "data ls", "runs ls", "model ls", "model variants", "flows ls", "pretrain recipes",
    "vtab protocols", "vtab files", "vtab report", "stack status", "ops doctor",
)  # fmt: skip


def cpu_s(command: str, folder: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-m", "vitline.flows.cli.main", *command.split()], cwd=folder, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def idle(directory: Path, seconds: float) -> dict[str, float]:
    """Fractions of a core by service."""

    def look() -> dict[tuple[str, int], float]:
        found = {}
        for name, processes in processes_of(directory).items():
            for process in processes:
                times = process.cpu_times()
                found[name, process.pid] = times.user + times.system
        return found

    before = look()
    time.sleep(seconds)
    used: dict[str, float] = {}
    for (name, pid), total in look().items():
        used[name] = used.get(name, 0.0) + (total - before.get((name, pid), total)) / seconds
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stack", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    print(f"load {psutil.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    if arguments.stack:
        used = idle(arguments.stack, arguments.seconds)
        for name, fraction in (*used.items(), ("all", sum(used.values()))):
            print(f"{name:<16} {100 * fraction:.2f} % of a core")
        return
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            runs = sorted(cpu_s(command, folder) for _ in range(arguments.rounds))
            print(f"{command:<16} {median(runs):.2f} s ({runs[0]:.2f} to {runs[-1]:.2f})")


if __name__ == "__main__":
    main()
