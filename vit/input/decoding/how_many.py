"""How many processes decode the batches of a worker. Imports no torch."""

from math import ceil

from vit.config import ExecutionConfig

THREADS_PER_PROCESS = 4
"""More threads than these wait for one interpreter's lock: of the time that an image takes, the lock is held for about a fourth
(tests/benchmarks/README.md, "Decoding processes")."""


def decode_processes(execution: ExecutionConfig, num_lanes: int, *, corpora_in_memory: bool = False) -> int:
    """`execution.decode_processes` as a number, 0 for threads of the worker itself.

    `auto` is one process for every four of `decode_threads`, where there are more than four, and at most one for each lane of a worker.
    """
    if execution.decode_processes != "auto":
        return execution.decode_processes
    if execution.decode_threads <= THREADS_PER_PROCESS or corpora_in_memory:
        return 0
    return min(ceil(execution.decode_threads / THREADS_PER_PROCESS), num_lanes // execution.num_workers)
