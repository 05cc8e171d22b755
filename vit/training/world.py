"""The group of processes that train together. A process without torch.distributed is a world of size 1."""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank, world size and device of this process. The training loop needs only sums and texts of the other ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    node_rank: int = 0
    """Index of this process's machine; rank 0 is on machine 0."""
    local_rank: int = 0
    """Index of this process on its machine."""

    @classmethod
    def current(cls, node_rank: int = 0, local_rank: int = 0, device_type: str | None = None) -> "World":
        """The initialised process group, else a world of size 1, on a device of this type (cuda, cpu; None: a GPU if any).

        Raises RuntimeError if a GPU is requested and torch sees none.
        """
        wanted = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if wanted == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "This worker was assigned a GPU, but torch sees none. Install a CUDA build of torch on its node."
            )
        device = torch.device("cuda", torch.cuda.current_device()) if wanted == "cuda" else torch.device("cpu")
        if not dist.is_initialized():
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device, node_rank, local_rank)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks, bit for bit the same on each. Every rank must call it. One rank waits for no device."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def broadcast_int(self, value: int) -> int:
        """The integer of rank 0, on every rank. Every rank must call it."""
        return int(self.sum(torch.tensor([value if self.rank == 0 else 0], dtype=torch.int64))[0])

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """The tensor of a rank, bit for bit, on every rank; the others give one of its shape, dtype and device. Every rank must call it."""
        if self.size == 1 or not value.numel():
            return value
        sent = value.to(self.device).contiguous()
        dist.broadcast(sent.reshape(-1).view(torch.uint8), source)
        return sent.to(value.device)

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on every rank. Every rank must call it, with something small that can be pickled."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values
