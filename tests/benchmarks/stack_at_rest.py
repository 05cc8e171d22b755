"""What a local stack takes to start and while nobody uses it: CPU-seconds, share of a core and memory of each service.

python -m tests.benchmarks.stack_at_rest [--seconds 60]

Starts a stack of its own, without flows. The supervisor is not counted.
"""

import argparse
import contextlib
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from vitline.infra.local.stack import memory_bytes, processes_of, start_stack, stop_stack

SETTLE_S = 20.0


def cpu_s(directory: Path) -> Counter[str]:
    """CPU-seconds of the processes of each service, and of the children for which they have waited."""
    found: Counter[str] = Counter()
    for name, processes in processes_of(directory).items():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                found[name] += sum(process.cpu_times()[:4])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "stack"
        try:
            start_stack(directory, log_dir=Path(folder) / "logs", num_cpus=2, ends_with_caller=True, announce=print)
            time.sleep(SETTLE_S)
            started = cpu_s(directory)
            time.sleep(seconds)
            rest = cpu_s(directory) - started
            memory = memory_bytes(directory)
        finally:
            stop_stack(directory)
    print("| service | CPU-seconds to start | at rest, % of a core | memory, MB |\n|---|---|---|---|")
    for name in memory:
        print(f"| {name} | {started[name]:.1f} | {100 * rest[name] / seconds:.2f} | {memory[name] / 1e6:.0f} |")
    total = sum(started.values()), 100 * sum(rest.values()) / seconds, sum(memory.values()) / 1e6
    print(f"| all | {total[0]:.1f} | {total[1]:.2f} | {total[2]:.0f} |")


if __name__ == "__main__":
    main()
