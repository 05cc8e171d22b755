"""Micro-batches, and the memory that they are in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from vitline.vit.input.decoding.several_labels import Labels, MultiLabels
from vitline.vit.input.schedule import RankBatch

_ALIGNMENT = 64
"""Bytes. Every tensor of a batch in shared memory begins at a multiple, as memory of torch does."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch of n images. The last `n - num_examples` are padding: black images of class 0, masked by `valid`.

    The tensors of a batch of input processes lie in one piece of memory, which is used again once all of them are gone.
    """

    images: Tensor
    """uint8 (n, size, size, 3), RGB; the network normalises them to [-1, 1] on the device."""
    labels: Labels
    """int64 (n,) class ids, or `MultiLabels` where an image may have several. Padding has class 0, or none."""
    valid: Tensor
    """bool (n,)."""
    first_slot: int
    """Position of the first example in the reading order (training), or its row in the split (evaluation)."""
    num_examples: int
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, text) of the bad examples of a training, in any order; the text names shard, row and reason. Their images are
    black, and `valid` masks them."""
    mixed_labels: Labels | None = None
    """Labels, like `labels`, of the examples that MixUp or CutMix has mixed in; None where the recipe mixes none."""
    lam: Tensor | None = None
    """float32 (n,), with `mixed_labels`: share of `labels` in the target, 1 where an image was not mixed. The rest is of
    `mixed_labels`."""

    @property
    def num_valid(self) -> int:
        """Number of examples that can be used: all but padding and bad ones."""
        return self.num_examples - len(self.bad)

    @property
    def several_labels(self) -> dict[str, MultiLabels]:
        """`labels` and `mixed_labels` by name, where an image may have several."""
        named = {"labels": self.labels, "mixed_labels": self.mixed_labels}
        return {name: labels for name, labels in named.items() if isinstance(labels, MultiLabels)}

    def pad(self) -> None:
        """Fills what is behind the examples."""
        end = self.num_examples
        self.images[end:] = 0
        self.valid[end:] = False
        for labels in (self.labels, self.mixed_labels):
            if isinstance(labels, Tensor):
                labels[end:] = 0
        if self.lam is not None:
            self.lam[end:] = 1


@dataclass(frozen=True)
class BatchShape:
    """The tensors of the micro-batches of one iteration, all of which have `size` images of `side_px`.

    `MultiLabels` are not among them, because their size is known only with the examples.
    """

    size: int
    side_px: int
    single_label: bool
    mixes: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of one micro-batch."""
        return sum(_aligned(dtype.itemsize * prod(shape)) for dtype, shape in self._tensors().values())

    @property
    def names(self) -> list[str]:
        """The names of these tensors in `Batch`."""
        return [*self._tensors()]

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
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "images": (torch.uint8, (n, side, side, 3)),
            "valid": (torch.bool, (n,)),
        }
        if self.mixes:
            found["lam"] = (torch.float32, (n,))
        if self.single_label:
            found |= {name: (torch.int64, (n,)) for name in ["labels", "mixed_labels"][: 1 + self.mixes]}
        return found


def blank_batch(tensors: Mapping[str, Tensor], first_slot: int, num_examples: int) -> Batch:
    """A micro-batch in these tensors. Examples and padding are still to be filled in."""
    no_labels, lam = MultiLabels.of([], len(tensors["valid"])), tensors.get("lam")
    return Batch(
        tensors["images"],
        tensors.get("labels", no_labels),
        tensors["valid"],
        first_slot,
        num_examples,
        mixed_labels=None if lam is None else tensors.get("mixed_labels", no_labels),
        lam=lam,
    )


def blank_batches(share: RankBatch, tensors: Sequence[Mapping[str, Tensor]], global_batch_size: int) -> list[Batch]:
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
