"""CPU seconds of listing and help commands in an empty folder.

python tests/benchmarks/commands.py [--rounds 5]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

import psutil

COMMANDS = (
    "--help", "data --help", "data ls", "runs ls", "model ls", "model variants", "flows ls", "pretrain recipes",
    "evaluate protocols", "vtab files", "evaluate report", "stack status", "ops doctor",
)  # fmt: skip


def cpu_s(command: str, folder: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-m", "vitline.flows.cli.main", *command.split()], cwd=folder, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"load {psutil.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            runs = sorted(cpu_s(command, folder) for _ in range(arguments.rounds))
            print(f"{command:<16} {median(runs):.2f} s ({runs[0]:.2f} to {runs[-1]:.2f})")


if __name__ == "__main__":
    main()
