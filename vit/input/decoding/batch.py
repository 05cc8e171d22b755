"""Micro-batches, and the memory that they are in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from vit.input.schedule import Share

_ALIGNMENT = 64
"""Bytes. Every tensor of a batch in shared memory begins at a multiple, as memory of torch does."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch of n images. The last `n - num_examples` are padding: black images of class 0, masked by `valid`.

    The tensors of a batch of input processes lie in one piece of memory, which is used again once all of them are gone.
    """

    images: Tensor
    """uint8 (n, size, size, 3), RGB; the consumer normalises them to [-1, 1] on the device."""
    labels: Tensor
    """int64 (n,) class ids, or float32 (n, num_classes) class weights where an image may have several labels."""
    valid: Tensor
    """bool (n,)."""
    first_slot: int
    """Position of the first example in the reading order (training), or its row in the split (evaluation)."""
    num_examples: int
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, text) of the bad examples of a training, in any order; the text names shard, row and reason. Their images are
    black, and `valid` masks them."""
    partner_labels: Tensor | None = None
    """Labels, like `labels`, of the examples that MixUp or CutMix has mixed in; None where the recipe mixes none."""
    own_share: Tensor | None = None
    """float32 (n,), with `partner_labels`: share of `labels` in the target, 1 where an image was not mixed. The rest is of
    `partner_labels`."""

    @property
    def num_valid(self) -> int:
        """Number of examples that can be used: all but padding and bad ones."""
        return self.num_examples - len(self.bad)

    def pad(self) -> None:
        """Fills what is behind the examples."""
        end = self.num_examples
        self.images[end:] = 0
        self.labels[end:] = 0
        self.valid[end:] = False
        if self.partner_labels is not None and self.own_share is not None:
            self.partner_labels[end:] = 0
            self.own_share[end:] = 1


@dataclass(frozen=True)
class BatchShape:
    """The tensors of the micro-batches of one iteration, all of which have `size` images of `side_px`."""

    size: int
    side_px: int
    num_classes: int | None
    """None for class ids, else the width of multi-hot labels."""
    mixes: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of one micro-batch."""
        return sum(_aligned(dtype.itemsize * prod(shape)) for dtype, shape in self._tensors().values())

    def new(self) -> dict[str, Tensor]:
        """The tensors of one micro-batch by the names of `Batch`, each in memory of its own that is not filled."""
        return {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self._tensors().items()}

    def inside(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors of one micro-batch in `memory`, uint8 (num_bytes,)."""
        found, start = {}, 0
        for name, (dtype, shape) in self._tensors().items():
            num_bytes = dtype.itemsize * prod(shape)
            found[name] = memory[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)
        return found

    def _tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        n, side = self.size, self.side_px
        labels = (torch.int64, (n,)) if self.num_classes is None else (torch.float32, (n, self.num_classes))
        mixed = {"partner_labels": labels, "own_share": (torch.float32, (n,))} if self.mixes else {}
        return {"images": (torch.uint8, (n, side, side, 3)), "labels": labels, "valid": (torch.bool, (n,)), **mixed}


def blank_batch(tensors: Mapping[str, Tensor], first_slot: int, num_examples: int) -> Batch:
    """A micro-batch in these tensors. Examples and padding are still to be filled in."""
    return Batch(
        tensors["images"],
        tensors["labels"],
        tensors["valid"],
        first_slot,
        num_examples,
        partner_labels=tensors.get("partner_labels"),
        own_share=tensors.get("own_share"),
    )


def blank_batches(share: Share, tensors: Sequence[Mapping[str, Tensor]], global_batch_size: int) -> list[Batch]:
    """The micro-batches of a share, in these tensors."""
    size, first = len(tensors[0]["valid"]), share.step * global_batch_size
    batches = []
    for start, of_batch in zip(range(0, len(tensors) * size, size), tensors, strict=True):
        first = int(share.slots[start]) if start < len(share.slots) else first
        num_examples = max(0, min(size, len(share.slots) - start))
        batches.append(blank_batch(of_batch, first, num_examples))
    return batches


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
