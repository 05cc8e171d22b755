"""How many images per second a GPU trains on, from its peak FLOP/s and the operations of a network. Imports no torch."""

from dataclasses import dataclass

from vitline.infra.html.text import short
from vitline.vit.config import TrainRecipe
from vitline.vit.models.flops import forward_flops
from vitline.vit.training.timing.gpu_peaks import named_peak

GPU, MFU = "H200", 0.5
"""What is assumed where nothing is said. 50 % is more than most trainings reach: an input that feeds it feeds them, too."""
TRAINING_MFU = 0.35
"""What plans count days with. B/16 and L/16 reached 0.37 and 0.33 on an H200 (tests/benchmarks/README.md)."""


@dataclass(frozen=True)
class Demand:
    """What one GPU needs."""

    gpu: str | None
    """None where the rate was given."""
    mfu: float | None
    images_per_s: float
    origin: str


def demand_of(
    recipe: TrainRecipe, num_classes: int, *, gpu: str = GPU, mfu: float = MFU, images_per_s: float | None = None
) -> Demand:
    """The images per second of a training on one GPU: as given, else the GPU's peak times `mfu` over the operations of training
    on one image. Raises ValueError for a GPU whose peak is not known, and for a rate or share out of range."""
    if images_per_s is not None:
        if not 0 < images_per_s < float("inf"):
            raise ValueError(f"--images-per-s {images_per_s:g} must be more than 0.")
        return Demand(None, None, images_per_s, "as given")
    if not 0 < mfu <= 1:
        raise ValueError(
            f"--mfu {mfu:g} must be more than 0 and at most 1, the share of the GPU's peak that training reaches."
        )
    peak, flops = named_peak(gpu, recipe.precision), forward_flops(recipe.model, num_classes)
    origin = f"{short(peak, 'FLOP/s')} in {recipe.precision} x {mfu:g} over 3 x {short(flops, 'FLOP')}"
    return Demand(gpu, mfu, peak * mfu / (3 * flops), origin)
