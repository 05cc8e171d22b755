"""From the bytes of a picture to the numbers that a model sees. Imports neither torch nor Ray."""

from data_prep.decode import DecodePolicy
from infra.config import FrozenConfig
from vit.input.config import AugmentConfig


class ImageContract(FrozenConfig):
    """How bytes become the model's input; it travels with the weights and every consumer goes through it."""

    decode: DecodePolicy
    """Bytes to RGB pixels."""
    evaluation: AugmentConfig
    """Resize, antialias, crop and resolution of evaluation."""
    low: float = -1.0
    """Value of a black pixel."""
    high: float = 1.0
    """Value of a white pixel."""
