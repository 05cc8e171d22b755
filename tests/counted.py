"""Counts the requests to stores."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from vitline.infra.storage import Store
from vitline.infra.stores.file_store import FileStore

REQUESTS = ("read", "read_tagged", "list", "scan", "size", "create", "compare_and_swap", "write", "delete", "writer")


@contextlib.contextmanager
def counted(kind: type[Store] = FileStore) -> Iterator[Counter[str]]:
    """Requests to all stores of a kind meanwhile, by what is asked and first folder of the key."""
    found, within = Counter[str](), threading.local()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def request(self: Store, *given: Any, **options: Any) -> Any:
            if getattr(within, "one", False):
                return method(self, *given, **options)
            within.one = True
            place = "data" if "/corpora/" in self.uri else str(given[0] if given else "").partition("/")[0]
            found[f"{name} {place}"] += 1
            try:
                return method(self, *given, **options)
            finally:
                within.one = False

        return request

    with contextlib.ExitStack() as stack:
        for name in REQUESTS:
            stack.enter_context(patch.object(kind, name, counting(name, getattr(kind, name))))
        yield found
