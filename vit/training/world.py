"""The group of processes that train together. One process without torch.distributed is a world of size 1."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process; `sum` is the only thing the loop needs from its peers."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    node_rank: int = 0
    """Number of this process's machine among those of the group; rank 0 is on machine 0."""
    local_rank: int = 0
    """Number of this process on its machine."""

    @classmethod
    def current(cls, node_rank: int = 0, local_rank: int = 0, device_type: str | None = None) -> "World":
        """The initialised process group, or a world of one, on a device of the type (cuda, cpu); without one a GPU is taken
        when there is one. Raises RuntimeError where a GPU is asked for and torch sees none."""
        wanted = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if wanted == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("This worker was given a GPU, but torch sees none. Install a CUDA build of torch there.")
        device = torch.device("cuda", torch.cuda.current_device()) if wanted == "cuda" else torch.device("cpu")
        if not dist.is_initialized():
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device, node_rank, local_rank)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks, the same bits on each; every rank must call it."""
        values = values.to(self.device)
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: int) -> int:
        """Rank 0's integer, on every rank."""
        return int(self.sum(torch.tensor([value if self.rank == 0 else 0], dtype=torch.int64))[0])
