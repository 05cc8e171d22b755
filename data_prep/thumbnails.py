"""Pictures 32 pixels wide, by which two that have near hashes are told to be one picture or two."""

import numpy as np
from PIL import Image

SIDE_PX = 32
_MAX_UNEXPLAINED = 0.06  # share of the contrast that the better of picture and mirror image leaves unexplained
_FLAT_CONTRAST = 2.0  # grey levels: below it there is nothing to correlate


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """(32, 32, 3) uint8 of pixels (height, width, 3) uint8: the whole picture, each pixel a mean."""
    image = Image.fromarray(pixels).resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX, reducing_gap=3.0)
    return np.asarray(image)


def same_picture(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two thumbnails show one picture, or one the other's mirror image."""
    return min(difference(a, b), difference(a, b[:, ::-1])) <= _MAX_UNEXPLAINED


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Share of the contrast of two thumbnails that brightness and contrast do not explain: 0 equal, 1 unrelated."""
    x, y = (t.astype(np.float64) - t.mean(axis=(0, 1)) for t in (a, b))
    if min(x.std(), y.std()) < _FLAT_CONTRAST:
        return float(np.abs(a.astype(np.float64) - b).mean() / 255)
    return float(1 - (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
