"""On a cluster that runs one training at a time: a training holds the resource ONE_TRAINING from its first worker to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.util import placement_group, remove_placement_group

from vitline.infra.ray_jobs import ONE_TRAINING


@contextmanager
def exclusive_training(try_s: float, begin: Callable[[], None], unplaced: Callable[[], None]) -> Iterator[None]:
    """Holds the resource where the cluster has it, whichever node that is on.

    `begin()` is called first, and `unplaced()` each time that another training has held it for `try_s` more; what it raises ends the
    wait. Ray frees the resource when the job ends, however it ends.
    """
    if ONE_TRAINING not in ray.cluster_resources():
        yield
        return
    begin()
    held = placement_group([{ONE_TRAINING: 1}])
    try:
        while not held.wait(try_s):
            unplaced()
        yield
    finally:
        remove_placement_group(held)
