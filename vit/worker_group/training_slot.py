"""The slot of a training, on a cluster that runs one training at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.util import placement_group, remove_placement_group

from infra.ray_jobs import ONE_TRAINING


@contextmanager
def training_slot(try_s: float, begin: Callable[[], None], unplaced: Callable[[], None]) -> Iterator[None]:
    """Holds the resource ONE_TRAINING where the cluster has it, whichever node that is on.

    `begin()` is called first, and `unplaced()` each time that another training has held the slot for `try_s` more; what it raises ends
    the wait. Ray frees the slot when the job ends, however it ends.
    """
    if ONE_TRAINING not in ray.cluster_resources():
        yield
        return
    begin()
    slot = placement_group([{ONE_TRAINING: 1}])
    try:
        while not slot.wait(try_s):
            unplaced()
        yield
    finally:
        remove_placement_group(slot)
