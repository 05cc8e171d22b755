"""What GPUs make of a training: images per second from peak FLOP/s and the operations of a network, and hours. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from vitline.infra.html.text import short
from vitline.vit.config import Precision, TrainRecipe
from vitline.vit.models.flops import forward_flops, training_flops
from vitline.vit.training.timing.gpus import Gpu, gpu_named

GPU, MFU = "H200", 0.5
"""What is assumed where nothing is said. 50 % is more than most trainings reach: an input that feeds it feeds them, too."""
TRAINING_MFU = 0.35
"""What plans count days with. B/16 and L/16 reached 0.37 and 0.33 on an H200 (tests/benchmarks/README.md)."""
GPUS_PER_NODE = 8
"""Most GPUs of one machine for which a plan counts."""


class PlanGpus(NamedTuple):
    """The GPUs of a plan."""

    name: str = GPU
    """As `gpu_named` takes it."""
    mfu: float = TRAINING_MFU
    """Share of the peak that is reached."""
    hour_price: float | None = None
    """What an hour of one GPU costs."""

    @property
    def gpu(self) -> Gpu:
        """Raises ValueError for a GPU that is not known."""
        return gpu_named(self.name)

    def flops(self, precision: Precision) -> float:
        """FLOP/s that one GPU reaches. Raises ValueError for a GPU that is not known, and for a share out of range."""
        if not 0 < self.mfu <= 1:
            raise ValueError(
                f"--mfu {self.mfu:g} must be more than 0 and at most 1, the share of the GPU's peak that training reaches."
            )
        return self.gpu.peak(precision) * self.mfu


ASSUMED = PlanGpus()


@dataclass(frozen=True)
class Demand:
    """What one GPU needs."""

    gpu: str | None
    """None where the rate was given."""
    mfu: float | None
    images_per_s: float
    origin: str


def flops_per_image(recipe: TrainRecipe, num_classes: int) -> float:
    """FLOPs of training on one image, in the mean over the steps, of which the first may train the head alone."""
    first = recipe.optim.head_first_steps / recipe.total_steps
    head, others = (training_flops(recipe.model, num_classes, frozen) for frozen in ("backbone", recipe.optim.frozen))
    return first * head + (1 - first) * others


def demand_of(recipe: TrainRecipe, num_classes: int, gpus: PlanGpus, images_per_s: float | None = None) -> Demand:
    """The images per second of a training on one GPU: as given, else the FLOP/s that the GPU reaches over the operations of training
    on one image. Raises ValueError like `PlanGpus.flops`, and for a rate out of range."""
    if images_per_s is not None:
        if not 0 < images_per_s < float("inf"):
            raise ValueError(f"--images-per-s {images_per_s:g} must be more than 0.")
        return Demand(None, None, images_per_s, "as given")
    reached, flops = gpus.flops(recipe.precision), forward_flops(recipe.model, num_classes)
    peak = short(gpus.gpu.peak(recipe.precision), "FLOP/s")
    needed = flops_per_image(recipe, num_classes)
    origin = f"{peak} in {recipe.precision} x {gpus.mfu:g} over {needed / flops:.3g} x {short(flops, 'FLOP')}"
    return Demand(gpus.gpu.name, gpus.mfu, reached / needed, origin)


def hours_of(work: float, per_s: float) -> float:
    """Hours of so many images, or operations, at a rate."""
    return work / per_s / 3600
