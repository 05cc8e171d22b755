"""Converts timm's Vision Transformers, hybrids and BiT ResNets to our networks and back, without importing timm.

A network that computes another function is refused with the reason. Tested with timm 1.0.31.
"""

from vitline.vit.convert.timm.mapping import BIT, HYBRID, STEM_ONLY, TRANSFORMER
from vitline.vit.convert.timm.reading import from_timm, read_timm
from vitline.vit.convert.timm.writing import to_timm, write_timm

__all__ = ["BIT", "HYBRID", "STEM_ONLY", "TRANSFORMER", "from_timm", "read_timm", "to_timm", "write_timm"]
