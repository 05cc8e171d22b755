"""Which rank writes and which one reads each tensor that every rank holds whole."""

from collections.abc import Mapping

from torch import Tensor

from vitline.vit.training.sharding.slices import is_dtensor, is_first_copy

MOST_WRITERS = 64
"""Ranks that write such tensors, the first ones of more. A file and an index of each of 1,000 ranks, most of them empty, would be work for
the store and for rank 0."""


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """The rank that each tensor, with so many bytes, belongs to: largest tensors first, each to the rank with the fewest bytes so far.

    Every rank computes the same assignment.
    """
    load = [0] * num_ranks
    owner = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


def num_writers(tensors: Mapping[str, Tensor], world_size: int) -> int:
    """How many ranks write, the first ones: all of them if the network is split."""
    return world_size if any(map(is_dtensor, tensors.values())) else min(world_size, MOST_WRITERS)


def share(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that a rank writes: of those that every rank holds whole the ones that it owns, of the others its slice, unless
    another rank writes the same one."""
    sliced = {name: value for name, value in tensors.items() if is_dtensor(value)}
    sizes = {name: value.nbytes for name, value in tensors.items() if name not in sliced}
    owner = owners(sizes, min(world_size, MOST_WRITERS))
    writes = {name for name, value in sliced.items() if is_first_copy(value)}
    return {name: value for name, value in tensors.items() if name in writes or owner.get(name) == rank}
