"""Pictures of 32 x 32 pixels: what perceptual hashes are made of, and what confirms that two pictures are one.

A hash finds candidates, the two thumbnails decide. The same picture is one that was scaled, compressed again, made
lighter or darker, mirrored, or of which up to an eighth was cut off at any edge. Another drawing of one series
(another mouth, another emblem in the folder) is not; tests/benchmarks/near_duplicates.py has the figures.
"""

import functools

import numpy as np
from PIL import Image

THUMBNAIL_PX = 32

# Chosen between settings that were tried on 800 drawings of one collection, on which hash and confirmation were made too;
# the figures are of others. Tighter loses copies made lighter, whose near-white parts are clipped; looser takes one
# playing card of a series for another.
_MOST_UNLIKE = 0.04  # what remains between two copies, as a share of the square of the contrast
_WORST_SPOT = 0.35  # the same in any 7 x 7 spot, as a deviation, in units of the contrast
_MOST_UNLIKE_CUT, _WORST_SPOT_CUT = 0.03, 0.25  # of blurred pictures
_MOST_CUT = 0.125  # of a side, at either edge
_LEAST_CORRELATION = 0.3  # below this nothing can be the same, not even when cut
_LEAST_CONTRAST = 1.0  # standard deviation in grey levels; a flat picture is like any other flat picture
_SPOT_PX = 7
_NOISE = 6.0  # grey levels by which a picture of little contrast may differ


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """The picture (height, width, 3), uint8 RGB, averaged down (or blown up) to (32, 32, 3), its sides apart.

    Whole-number arithmetic of Pillow: equal on all machines. The gap of 2 makes large pictures 4 times as fast.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    size = (THUMBNAIL_PX, THUMBNAIL_PX)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


def same_picture(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two thumbnails, (32, 32, 3) uint8, show one picture, or one of them the mirror image of the other.

    Symmetric. Two pictures without contrast are never the same.
    """
    first, second = a.astype(np.float64), b.astype(np.float64)
    if min(first.std(), second.std()) < _LEAST_CONTRAST:
        return False
    return any(_alike(view, second) for view in (first, first[:, ::-1]))


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    if _correlation(a, b) < _LEAST_CORRELATION:
        return False
    share, spot = _unlikeness(a, b)
    if share < _MOST_UNLIKE and spot < _WORST_SPOT:
        return True
    # One may be cut from the other. A thumbnail of the cut picture is sharper than the piece of the whole one's, so both
    # are blurred; as that forgives more, the cut must explain half of the difference.
    a, b = _blurred(a, 1), _blurred(b, 1)
    uncut, _ = _unlikeness(a, b)
    for whole, piece in ((a, b), (b, a)):
        share, spot = _unlikeness(_piece_like(whole, piece), piece)
        if share < min(_MOST_UNLIKE_CUT, uncut / 2) and spot < _WORST_SPOT_CUT:
            return True
    return False


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a - a.mean(), b - b.mean()
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum() + 1e-9))


def _unlikeness(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """How far two thumbnails differ beyond brightness: over all as a share of the contrast squared, and in the worst spot."""
    lighter_a, lighter_b = _as_light_as(a, b), _as_light_as(b, a)
    over_all = min(_share(lighter_a, b), _share(lighter_b, a))
    return over_all, min(_worst_spot(a, b), _worst_spot(lighter_a, b), _worst_spot(lighter_b, a))


def _as_light_as(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a` made lighter or darker by the factor that brings it nearest to `b`; white stays white."""
    factor = 1.0
    for _ in range(3):
        inside = (np.minimum(factor * a, 255) < 254) & (b < 254)
        if np.count_nonzero(inside) < 30:
            break
        factor = float((a[inside] * b[inside]).sum() / ((a[inside] ** 2).sum() + 1e-6))
    return np.minimum(factor * a, 255)


def _share(a: np.ndarray, b: np.ndarray) -> float:
    """Mean square of the difference, as a share of the square of b's contrast (noise added)."""
    return float(((a - b) ** 2).mean() / (b.std() + _NOISE) ** 2)


def _worst_spot(a: np.ndarray, b: np.ndarray) -> float:
    """Of all 7 x 7 spots the largest deviation that no brightness and contrast of the spot explains, in units of the
    contrast of the picture. Small changes of a drawing show here; clipped highlights and a softer scale hardly do."""
    mean_a, mean_b = _spots(a), _spots(b)
    var_a = np.maximum(_spots(a * a) - mean_a**2, 0)
    var_b = np.maximum(_spots(b * b) - mean_b**2, 0)
    cov = _spots(a * b) - mean_a * mean_b
    left = np.minimum(_left_over(var_a, var_b, cov), _left_over(var_b, var_a, cov))
    return float(np.sqrt(max(left.max(), 0.0)) / (min(a.std(), b.std()) + _NOISE))


def _left_over(var_x: np.ndarray, var_y: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """Variance of y that is no multiple (0 to 1.3) of x."""
    slope = np.clip(cov / (var_x + 1), 0, 1.3)
    return var_y - 2 * slope * cov + slope**2 * var_x


def _spots(values: np.ndarray) -> np.ndarray:
    """Means over every 7 x 7 spot and the three channels."""
    total = np.zeros((THUMBNAIL_PX + 1, THUMBNAIL_PX + 1))
    total[1:, 1:] = values.sum(axis=2).cumsum(axis=0).cumsum(axis=1)
    k = _SPOT_PX
    return (total[k:, k:] - total[:-k, k:] - total[k:, :-k] + total[:-k, :-k]) / (3 * k * k)


def _piece_like(whole: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """The window of `whole` that looks most like `piece`, blown up to a thumbnail: Gauss-Newton over its four edges,
    with brightness and contrast free, first on blurred pictures. (Lucas and Kanade, IJCAI 1981.)"""
    window = (0.0, 1.0, 0.0, 1.0)
    for blur, num_steps in ((2, 5), (1, 3)):
        source, target = _blurred(whole, blur), _blurred(piece, blur)
        for _ in range(num_steps):
            moved = _moved(source, target, window)
            settled = max(abs(new - old) for new, old in zip(moved, window, strict=True)) < 5e-4
            window = moved
            if settled:
                break
    return _cut(whole, window)


def _moved(source: np.ndarray, target: np.ndarray, window: tuple[float, ...]) -> tuple[float, float, float, float]:
    """One step of the edges (left, right, top, bottom; shares of the side) toward the window that `target` shows."""
    columns_of, rows_of, slope = _interpolation(*window[:2]), _interpolation(*window[2:]), _slope_matrix()
    view = _two_sided(rows_of, source, columns_of)
    # How a pixel changes when an edge moves: its slope, times how much of the edge's move the pixel takes part in.
    share = (np.arange(THUMBNAIL_PX) + 0.5) / THUMBNAIL_PX
    across = _two_sided(rows_of, source, slope @ columns_of) * (THUMBNAIL_PX / (window[1] - window[0]))
    along = _two_sided(slope @ rows_of, source, columns_of) * (THUMBNAIL_PX / (window[3] - window[2]))
    right, bottom = share[None, :, None], share[:, None, None]
    columns = (across * (1 - right), across * right, along * (1 - bottom), along * bottom, view, np.ones_like(view))
    design = np.stack(columns).reshape(len(columns), -1)
    normal = design @ design.T
    normal[np.diag_indices(len(columns))] *= 1 + 1e-4
    normal[np.diag_indices(len(columns))] += 1e-2
    found = np.linalg.solve(normal, design @ target.reshape(-1))
    contrast = found[4] if abs(found[4]) > 0.2 else 1.0
    left, right_edge, top, bottom_edge = np.array(window) + np.clip(found[:4] / contrast, -0.04, 0.04)
    return (
        float(np.clip(left, 0, _MOST_CUT)),
        float(np.clip(right_edge, 1 - _MOST_CUT, 1)),
        float(np.clip(top, 0, _MOST_CUT)),
        float(np.clip(bottom_edge, 1 - _MOST_CUT, 1)),
    )


def _cut(image: np.ndarray, window: tuple[float, ...]) -> np.ndarray:
    """The window of an image (left, right, top, bottom; shares of the side) as 32 x 32, linearly interpolated."""
    return _two_sided(_interpolation(window[2], window[3]), image, _interpolation(window[0], window[1]))


def _interpolation(start: float, end: float) -> np.ndarray:
    side = THUMBNAIL_PX
    position = np.clip((start + (np.arange(side) + 0.5) / side * (end - start)) * side - 0.5, 0, side - 1)
    below = np.minimum(position.astype(int), side - 2)
    matrix = np.zeros((side, side))
    matrix[np.arange(side), below] = 1 - (position - below)
    matrix[np.arange(side), below + 1] = position - below
    return matrix


def _blurred(image: np.ndarray, times: int) -> np.ndarray:
    """Each pixel a quarter of either neighbour and half of itself, `times` over, in both directions."""
    matrix = _blur_matrix(times)
    return _two_sided(matrix, image, matrix)


@functools.cache
def _blur_matrix(times: int) -> np.ndarray:
    padded = np.eye(THUMBNAIL_PX)[[0, *range(THUMBNAIL_PX), THUMBNAIL_PX - 1]]
    return np.linalg.matrix_power(padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4, times)


@functools.cache
def _slope_matrix() -> np.ndarray:
    """Change per pixel along an axis: half the difference of the neighbours, at the edges the difference to one."""
    slopes: np.ndarray = np.asarray(np.gradient(np.eye(THUMBNAIL_PX), axis=0))
    return slopes


def _two_sided(rows: np.ndarray, image: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """rows @ channel @ columns.T of each channel: two products of matrices, not one for each row."""
    side = THUMBNAIL_PX
    upright = (rows @ image.reshape(side, -1)).reshape(side, side, 3).swapaxes(0, 1)
    return (columns @ upright.reshape(side, -1)).reshape(side, side, 3).swapaxes(0, 1)
