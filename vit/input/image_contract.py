"""The image contract: from the bytes of an image to the input of a model. Imports neither torch nor Ray."""

from vitline.data_prep.decode import DecodePolicy
from vitline.infra.config import FrozenConfig
from vitline.vit.input.config import AugmentConfig


class ImageContract(FrozenConfig):
    """How bytes become the model's input. It is published with the weights, and every consumer applies it."""

    decode: DecodePolicy
    """From bytes to RGB pixels."""
    evaluation: AugmentConfig
    """Resize, antialias, crop and resolution of evaluation."""
    low: float = -1.0
    """Input value of a black pixel."""
    high: float = 1.0
    """Input value of a white pixel."""
