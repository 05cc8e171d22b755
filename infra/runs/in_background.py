"""Work that a thread does beside the code of a context."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def in_background(work: Callable[[threading.Event], None], *, name: str, join_s: float | None = None) -> Iterator[None]:
    """Until the context is closed: `work(over)` in a thread, which has to end once `over` is set. Closing waits for it, for at most
    `join_s`."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(join_s)
