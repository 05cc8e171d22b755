"""Tensors of which each rank holds a slice (DTensor of torch, split along the first dimension), and whole ones, by the same functions.

A slice is known by its place in the whole tensor, as checkpoints store it, so that any number of ranks reads what any other wrote.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ShardPlace(NamedTuple):
    """The place of a piece in a whole tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether each rank holds a slice of the tensor. Imports nothing: DTensor takes seconds to import."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> tuple[Tensor, ShardPlace]:
    """The values that this rank holds, without a copy, and their place. A whole tensor is its own slice."""
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return tensor, ShardPlace(shape, (0,) * len(shape))
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-shape[0] // mesh.size(mesh.ndim - 1))  # as torch.chunk splits; the last ranks may have less or nothing
    first = min(rows * mesh.get_coordinate()[-1], shape[0])
    assert local.shape[0] == min(rows, shape[0] - first), f"{tuple(local.shape)} is no slice of {shape} at row {first}"
    return local, ShardPlace(shape, (first, *(0 for _ in shape[1:])))


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the one that stores its slice: with HSDP several ranks hold the same one. False for an empty slice."""
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    *replicas, _ = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return local.numel() > 0 and not any(replicas)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. Every rank must call it for a sliced one."""
    if not is_dtensor(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def slice_of(values: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`; of a sliced one, or of the rows that this rank holds, all of it."""
    if is_dtensor(values) or not is_dtensor(like):
        return local_shard(values)[0]
    local, place = local_shard(like)
    if values.shape == local.shape:
        return values
    return values[place.offsets[0] : place.offsets[0] + local.shape[0]]


@torch.no_grad()
def fill(target: Tensor, values: Tensor) -> None:
    """Copies values of the whole tensor, or of another one sliced alike, or the rows that this rank holds, into `target`."""
    local_shard(target)[0].copy_(slice_of(values, target))


def sliced_like(parameter: Tensor, values: Tensor) -> Tensor:
    """A copy of `values` on the device of a parameter; sliced like it where it has the shape of the parameter or of its own slice."""
    if not is_dtensor(parameter) or values.shape not in (parameter.shape, local_shard(parameter)[0].shape):
        return values.to(parameter.device, copy=True)
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        slice_of(values, parameter).to(parameter.device, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
