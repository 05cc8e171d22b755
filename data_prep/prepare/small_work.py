"""Decides whether a preparation is so small that one process finishes it before a cluster would start."""

import contextlib
import tempfile
from collections.abc import Sequence

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Store, open_store

MAX_BYTES = 1 << 30
TIMES_ON_ONE_MACHINE = 12
"""On one machine Ray takes 10 s to start and stop, and twice the CPU per photograph of 10 KB (tests/benchmarks/README.md)."""
_LARGE_KINDS = frozenset({"imagenet21k", "ilsvrc2012", "transfer"})  # known to be large without listing
_BYTES_PER_IMAGE = {"table": 32}  # lower bound for parts of unknown length: one table row
_FEWEST_BYTES = 1024


def fits_here(requests: Sequence[CorpusConfig], root: Store, *, one_machine: bool) -> bool:
    """Whether the requests (for corpora that are not prepared yet) have at most `execution.small_images` images and MAX_BYTES
    bytes together. Listing stops as soon as a limit is exceeded. A source that cannot be listed counts as small, because
    reporting its error needs no cluster.

    `root`: store with other data that listing needs. `one_machine`: no other machine could share the work.
    """
    times = TIMES_ON_ONE_MACHINE if one_machine else 1
    num_images, num_bytes, max_bytes = 0, 0, times * MAX_BYTES
    max_images = times * min((config.execution.small_images for config in requests), default=0)
    with tempfile.TemporaryDirectory(prefix="vitline-list-", ignore_cleanup_errors=True) as folder:
        for number, config in enumerate(requests):
            if config.source.kind in _LARGE_KINDS or _size_of_file(config) > max_bytes:
                return False
            with contextlib.suppress(ValueError, RuntimeError, OSError):
                work = WorkFolder(root, open_store(folder).child(str(number)), config.execution.examples_per_chunk)
                for part in open_source(config).parts(work):
                    num_images, num_bytes = num_images + _images_of(part, config), num_bytes + part.num_bytes
                    if num_images > max_images or num_bytes > max_bytes:
                        return False
    return True


def _images_of(part: SourcePart, config: CorpusConfig) -> int:
    return part.num_examples or part.num_bytes // _BYTES_PER_IMAGE.get(config.source.kind, _FEWEST_BYTES)


def _size_of_file(config: CorpusConfig) -> int:
    """Size in bytes of a source that is a single file; otherwise 0."""
    folder, _, name = getattr(config.source, "path", "").rstrip("/").rpartition("/")
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        return open_store(folder).size(name) if folder and name else 0
    return 0
