"""timm's Vision Transformers, hybrids and BiT ResNets <-> ours, by their names and their functions; timm is not imported.

What is not the same function is refused, with the reason. Checked against timm 1.0.31.
"""

from vit.convert.timm.names import BIT, HYBRID, STEM_ONLY, TRANSFORMER
from vit.convert.timm.reading import from_timm, read_timm
from vit.convert.timm.writing import to_timm, write_timm

__all__ = ["BIT", "HYBRID", "STEM_ONLY", "TRANSFORMER", "from_timm", "read_timm", "to_timm", "write_timm"]
