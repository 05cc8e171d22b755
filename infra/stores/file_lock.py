"""File locks between processes, with a timeout: a stopped process keeps its locks."""

import fcntl
import time

_PAUSE_S = 0.001


def lock(file: int, wait_s: float = 0.0) -> bool:
    """Takes the exclusive lock of an open file, waiting up to `wait_s` for another process. Returns whether it did.

    The lock ends when the file is closed.
    """
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True
