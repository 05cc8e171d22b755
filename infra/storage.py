"""Objects under a URI: `open_store` gives the store of its scheme, over files, S3 or memory.

What a store promises is in `infra/stores/store.py`; this is the one module that the rest of vitline imports.
"""

import contextlib
import importlib
import os
import uuid

from infra.stores.store import (
    Keys,
    Listed,
    PreconditionFailed,
    Store,
    StoreFailed,
    StoreRefused,
    Unwritable,
    checked_key,
    json_bytes,
    raising_unwritable,
)

__all__ = [
    "Keys",
    "Listed",
    "PreconditionFailed",
    "Store",
    "StoreFailed",
    "StoreRefused",
    "Unwritable",
    "check_writable",
    "checked_key",
    "json_bytes",
    "open_store",
    "probe_conditional_writes",
    "raising_unwritable",
]

_STORES = {
    "file": "infra.stores.file_store.FileStore",
    "memory": "infra.stores.memory_store.MemoryStore",
    "s3": "infra.stores.s3_store.S3Store",  # imported on use: s3fs takes half a second and is an extra
}
"""By scheme."""


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store below a URI: a plain path, file://, memory:// (one process) or s3://bucket/prefix.

    Nothing is read or made. Raises ValueError for another scheme.
    """
    text = os.fspath(uri)
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    if scheme not in _STORES or not rest or (scheme == "s3" and rest.startswith("/")):
        raise ValueError(f"{text!r} is no store; use a path, file:///path, s3://bucket/prefix or memory://name.")
    rest = os.path.abspath(rest) if scheme == "file" else rest.rstrip("/")
    module, _, name = _STORES[scheme].rpartition(".")
    kind: type[Store] = getattr(importlib.import_module(module), name)
    return kind.at(f"{scheme}://{rest}")


def probe_conditional_writes(store: Store) -> None:
    """Try both conditional writes on a key of its own. Raises RuntimeError when the store accepts one that it
    should refuse: claims would not hold there, and two jobs could write one run."""
    key = f"probe-{uuid.uuid4().hex}"
    first = store.create(key, b"first")
    try:
        second = store.compare_and_swap(key, b"second", first)
        refused = (
            ("create over an object", lambda: store.create(key, b"third")),
            ("swap with a stale tag", lambda: store.compare_and_swap(key, b"third", first)),
            ("swap of an absent object", lambda: store.compare_and_swap(f"{key}-absent", b"third", second)),
        )
        for what, attempt in refused:
            with contextlib.suppress(PreconditionFailed):
                attempt()
                raise RuntimeError(
                    f"{store.uri} accepted a {what}, so it does not honour conditional writes and cannot hold claims. "
                    "Use a store that answers 412 to them."
                )
    finally:
        store.discard(key)
        store.discard(f"{key}-absent")


def check_writable(store: Store) -> None:
    """Raises Unwritable where this machine does not let us write there."""
    key = f"probe-{uuid.uuid4().hex}"
    store.write(key, b"")
    store.discard(key)
