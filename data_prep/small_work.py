"""Whether preparing is so little work that one process does it sooner than a cluster starts."""

import contextlib
import tempfile
from collections.abc import Sequence

from data_prep.config import CorpusConfig
from data_prep.corpora.open_source import open_source
from data_prep.corpora.raw import Part, WorkFolder
from infra.storage import Store, open_store

MAX_BYTES = 1 << 30
TIMES_ON_ONE_MACHINE = 12
"""On one machine Ray takes 10 s to start and to end, and twice the CPU for each photograph of 10 KB (tests/benchmarks/README.md)."""
_LARGE_KINDS = frozenset({"imagenet21k", "ilsvrc2012", "transfer"})  # that much is known without listing them
_BYTES_PER_IMAGE = {"table": 32}  # at least, of a part that does not say how many it has: a row of a table
_FEWEST_BYTES = 1024


def is_small(requests: Sequence[CorpusConfig], root: Store, *, one_machine: bool) -> bool:
    """Whether requests for corpora that are not prepared yet are at most `execution.small_images` and MAX_BYTES together, as
    far as listing tells; it is listed no further than that. What cannot be listed is small: to say so takes no cluster.

    `root` has what else is needed to list. `one_machine`: there is no other that could do a part of the work.
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


def _images_of(part: Part, config: CorpusConfig) -> int:
    return part.num_examples or part.num_bytes // _BYTES_PER_IMAGE.get(config.source.kind, _FEWEST_BYTES)


def _size_of_file(config: CorpusConfig) -> int:
    """Bytes of a source that is one file; else 0."""
    folder, _, name = getattr(config.source, "path", "").rstrip("/").rpartition("/")
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        return open_store(folder).size(name) if folder and name else 0
    return 0
