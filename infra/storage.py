"""Stores: `open_store` returns the store below a URI, on files, in memory, or of S3, Google Cloud and Azure.

`infra/stores/store.py` defines what a store guarantees. The rest of vitline imports only this module.
"""

import contextlib
import importlib
import os
import re
import uuid
from collections.abc import Callable

from vitline.infra.settings import expanded
from vitline.infra.stores.cached_records import cached_records
from vitline.infra.stores.disk_cache import DiskCache, disk_cache
from vitline.infra.stores.store import (
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
    "DiskCache",
    "Keys",
    "Listed",
    "PreconditionFailed",
    "Store",
    "StoreFailed",
    "StoreRefused",
    "Unwritable",
    "cached_records",
    "check_writable",
    "checked_key",
    "disk_cache",
    "in_bucket",
    "is_location",
    "json_bytes",
    "open_store",
    "probe_conditional_writes",
    "raising_unwritable",
    "read_small",
]

_STORES = {
    "file": "vitline.infra.stores.file_store.FileStore",
    "memory": "vitline.infra.stores.memory_store.MemoryStore",
    "s3": "vitline.infra.stores.s3_store.S3Store",  # imported on use: s3fs takes half a second to import and is an extra
    "gs": "vitline.infra.stores.object_store.ObjectStore",
    "az": "vitline.infra.stores.object_store.ObjectStore",
    **dict.fromkeys(("http", "https", "hf"), "vitline.infra.stores.read_only_store.ReadOnlyStore"),
}
"""The class of each scheme."""
_OF_OTHERS = re.compile(r"(s3|gs|az)\+[A-Za-z0-9._-]+")
_BUCKETS = ("s3", "gs", "az")


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store below a URI: a plain path (which may begin with `~`), file://, memory:// (one process), or s3://, gs:// or
    az://bucket/prefix; s3+NAME://bucket/prefix is one with endpoint and credentials of the AWS profile NAME, gs+NAME:// and az+NAME://
    with those of the variables that end with _NAME. http://, https:// and hf:// are only read.

    Reads and creates nothing. Raises ValueError for another scheme.
    """
    text = os.fspath(uri)
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    kind = scheme.partition("+")[0] if _OF_OTHERS.fullmatch(scheme) else scheme
    if kind not in _STORES or not rest or (kind in _BUCKETS and rest.startswith("/")):
        raise ValueError(
            f"{text!r} is not a store. Use a path, file:///path, s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix or memory://name."
        )
    rest = os.path.abspath(expanded(rest)) if scheme == "file" else rest.rstrip("/")
    module, _, name = _STORES[kind].rpartition(".")
    opened: type[Store] = getattr(importlib.import_module(module), name)
    return opened.at(f"{scheme}://{rest}")


def in_bucket(uri: str) -> bool:
    """True if a URI begins with a bucket (of Azure: a container), as s3://bucket does."""
    scheme = uri.partition("://")[0]
    return scheme in _BUCKETS or _OF_OTHERS.fullmatch(scheme) is not None


def is_location(name: str) -> bool:
    """True if a corpus or model is given as a path or URI, not by name."""
    return "://" in name or name.startswith(("/", "./", "../", "~"))


def read_small(uri: str, max_bytes: int) -> bytes:
    """A whole file at a path or URI that somebody has named, such as a recipe.

    Raises FileNotFoundError, also for a pipe or a device, and ValueError for a file of more than `max_bytes`.
    """
    folder, _, name = uri.rpartition("/")
    data = open_store(folder or ("/" if uri.startswith("/") else ".")).read(name, 0, max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{uri} has more than {max_bytes:,} bytes. Is it the right file?")
    return data


def probe_conditional_writes(store: Store) -> None:
    """Tries both conditional writes on a key of its own.

    Raises RuntimeError if the store accepts one that it should refuse: then leases would not work, and two jobs could
    write the same run.
    """
    key = f"probe-{uuid.uuid4().hex}"
    first = store.create(key, b"first")
    try:
        second = store.compare_and_swap(key, b"second", first)
        refused: tuple[tuple[str, Callable[[], object]], ...] = (
            ("create-if-absent of an existing object", lambda: store.create(key, b"third")),
            ("compare-and-swap with a stale tag", lambda: store.compare_and_swap(key, b"third", first)),
            (
                "compare-and-swap of an absent object",
                lambda: store.compare_and_swap(f"{key}-absent", b"third", second),
            ),
        )
        for what, attempt in refused:
            with contextlib.suppress(PreconditionFailed):
                attempt()
                raise RuntimeError(
                    f"{store.uri} accepted a {what}, so it does not support conditional writes, which leases need. "
                    "Use a store that answers 412 (precondition failed) to such a write."
                )
    finally:
        store.discard(key)
        store.discard(f"{key}-absent")


def check_writable(store: Store) -> None:
    """Raises Unwritable if the store is a place on this machine that this user cannot write to."""
    key = f"probe-{uuid.uuid4().hex}"
    store.write(key, b"")
    store.discard(key)
