"""How many processes decode the batches of a worker. Imports no torch."""

from math import ceil
from typing import Literal

THREADS_PER_PROCESS = 4
"""More threads than these wait for one interpreter's lock: of the time that an image takes, the lock is held for about a fourth
(tests/benchmarks/README.md, "Input processes")."""


def decode_processes(asked: int | Literal["auto"], *, threads: int, lanes: int, in_memory: bool = False) -> int:
    """`execution.decode_processes` as a number, 0 for threads of the worker itself.

    `auto` is one process for every four threads, where there are more than four, and at most one for each of the `lanes` of a worker.
    Corpora `in_memory` of this process cannot be read by others.
    """
    if asked != "auto":
        return asked
    if threads <= THREADS_PER_PROCESS or in_memory:
        return 0
    return min(ceil(threads / THREADS_PER_PROCESS), lanes)
