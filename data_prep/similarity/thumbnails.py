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
_NUM_VALUES = 3 * THUMBNAIL_PX**2
_TOGETHER = 32  # pairs that are worked on at once: 800 KB an image


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """The picture (height, width, 3), uint8 RGB, averaged down (or blown up) to (32, 32, 3), its sides apart.

    Whole-number arithmetic of Pillow: equal on all machines. The gap of 2 makes large pictures 4 times as fast.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    size = (THUMBNAIL_PX, THUMBNAIL_PX)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


def same_picture(a: np.ndarray, b: np.ndarray) -> bool:
    """`same_pictures` of one pair, (32, 32, 3) uint8 each."""
    return bool(same_pictures(a[None], b[None])[0])


def same_pictures(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which pairs of thumbnails, two times (pairs, 32, 32, 3) uint8, show one picture, or one of them the mirror image of
    the other: (pairs,) bool.

    Symmetric. Two pictures without contrast are never the same.
    """
    same = np.zeros(len(a), bool)
    for start in range(0, len(a), _TOGETHER):
        some = slice(start, start + _TOGETHER)
        first, second = (image[some].transpose(0, 3, 1, 2).astype(np.float64, order="C") for image in (a, b))
        contrast = np.minimum(_deviation(first), _deviation(second))
        for view in (first, np.ascontiguousarray(first[..., ::-1])):
            left = np.flatnonzero((contrast >= _LEAST_CONTRAST) & ~same[some])
            same[some][left] = _alike(view[left], second[left])
    return same


# Below, an image is (pairs, 3, 32, 32) float64, and a number (pairs,). Pairs are worked on together as an image of this
# size takes less time than the call that works on it; what is decided of a pair does not depend on the others.


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = np.zeros(len(a), bool)
    left = np.flatnonzero(_correlation(a, b) >= _LEAST_CORRELATION)
    same[left] = _within(a[left], b[left], _MOST_UNLIKE, _WORST_SPOT)
    # One may be cut from the other. A thumbnail of the cut picture is sharper than the piece of the whole one's, so both
    # are blurred; as that forgives more, the cut must explain half of the difference.
    left = left[~same[left]]
    a, b = _blurred(a[left], 1), _blurred(b[left], 1)
    enough = np.minimum(_MOST_UNLIKE_CUT, _unlike(a, b) / 2)
    for whole, piece in ((a, b), (b, a)):
        open_ = np.flatnonzero(~same[left])
        piece = piece[open_]
        cut = _piece_like(whole[open_], piece)
        same[left[open_]] = _within(cut, piece, enough[open_], _WORST_SPOT_CUT)
    return same


def _within(a: np.ndarray, b: np.ndarray, most_unlike: np.ndarray | float, worst_spot: float) -> np.ndarray:
    """Whether two images differ little, over all and in every spot. The spots cost most, and few come so far."""
    within = _unlike(a, b) < most_unlike
    near = np.flatnonzero(within)
    within[near] = _spot(a[near], b[near]) < worst_spot
    return within


def _sum(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), _NUM_VALUES).sum(axis=1)


def _deviation(image: np.ndarray) -> np.ndarray:
    flat: np.ndarray = image.reshape(len(image), _NUM_VALUES).std(axis=1)
    return flat


def _each(number: np.ndarray) -> np.ndarray:
    """A number of each pair, to be combined with images."""
    return number[:, None, None, None]


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (image - _each(_sum(image) / _NUM_VALUES) for image in (a, b))
    return _sum(x * y) / np.sqrt(_sum(x * x) * _sum(y * y) + 1e-9)


def _unlike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far two images differ beyond brightness, over all, as a share of the contrast squared."""
    return np.minimum(_share(_as_light_as(a, b), b), _share(_as_light_as(b, a), a))


def _spot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same in the spot where they differ most."""
    views = ((a, b), (_as_light_as(a, b), b), (_as_light_as(b, a), a))
    return np.minimum.reduce([_worst_spot(*view) for view in views])


def _as_light_as(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a` made lighter or darker by the factor that brings it nearest to `b`; white stays white."""
    factor, not_white, products, squares = np.ones(len(a)), b < 254, a * b, a * a
    for _ in range(3):
        inside = (_each(factor) * a < 254) & not_white
        found = _sum(products * inside) / (_sum(squares * inside) + 1e-6)
        factor = np.where(_sum(inside) >= 30, found, factor)
    return np.minimum(_each(factor) * a, 255)


def _share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mean square of the difference, as a share of the square of b's contrast (noise added)."""
    return _sum((a - b) ** 2) / _NUM_VALUES / (_deviation(b) + _NOISE) ** 2


def _worst_spot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of all 7 x 7 spots the largest deviation that no brightness and contrast of the spot explains, in units of the
    contrast of the picture. Small changes of a drawing show here; clipped highlights and a softer scale hardly do."""
    mean_a, mean_b = _spots(a), _spots(b)
    var_a = np.maximum(_spots(a * a) - mean_a**2, 0)
    var_b = np.maximum(_spots(b * b) - mean_b**2, 0)
    cov = _spots(a * b) - mean_a * mean_b
    left = np.minimum(_left_over(var_a, var_b, cov), _left_over(var_b, var_a, cov))
    worst: np.ndarray = left.max(axis=(1, 2), initial=0.0)
    return np.sqrt(worst) / (np.minimum(_deviation(a), _deviation(b)) + _NOISE)


def _left_over(var_x: np.ndarray, var_y: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """Variance of y that is no multiple (0 to 1.3) of x."""
    slope = np.clip(cov / (var_x + 1), 0, 1.3)
    return var_y - 2 * slope * cov + slope**2 * var_x


def _spots(image: np.ndarray) -> np.ndarray:
    """Means over every 7 x 7 spot and the three channels."""
    total = np.zeros((len(image), THUMBNAIL_PX + 1, THUMBNAIL_PX + 1))
    total[:, 1:, 1:] = image.sum(axis=1).cumsum(axis=1).cumsum(axis=2)
    k = _SPOT_PX
    return (total[:, k:, k:] - total[:, :-k, k:] - total[:, k:, :-k] + total[:, :-k, :-k]) / (3 * k * k)


def _piece_like(whole: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """The window of `whole` that looks most like `piece`, blown up to a thumbnail: Gauss-Newton over its four edges,
    with brightness and contrast free, first on blurred pictures. (Lucas and Kanade, IJCAI 1981.)"""
    window = np.tile((0.0, 1.0, 0.0, 1.0), (len(whole), 1))
    for blur, num_steps in ((2, 5), (1, 3)):
        source, target = _blurred(whole, blur), _blurred(piece, blur)
        moving = np.arange(len(whole))
        for _ in range(num_steps):
            moved = _moved(source[moving], target[moving], window[moving])
            settled = np.abs(moved - window[moving]).max(axis=1, initial=0.0) < 5e-4
            window[moving] = moved
            moving = moving[~settled]
    return _cut(whole, window)


def _moved(source: np.ndarray, target: np.ndarray, window: np.ndarray) -> np.ndarray:
    """One step of the edges (left, right, top, bottom; shares of the side) toward the window that `target` shows."""
    view, size = _cut(source, window), THUMBNAIL_PX / (window[:, 1::2] - window[:, ::2])
    # How a pixel changes when an edge moves: its slope, times how much of the edge's move the pixel takes part in.
    right = (np.arange(THUMBNAIL_PX) + 0.5) / THUMBNAIL_PX
    bottom = right[:, None]
    across = view @ (_slope_matrix().T * _each(size[:, 0]))
    along = (_slope_matrix() * _each(size[:, 1])) @ view
    design = np.empty((len(source), 6, *source.shape[1:]))
    np.multiply(across, 1 - right, out=design[:, 0])
    np.multiply(across, right, out=design[:, 1])
    np.multiply(along, 1 - bottom, out=design[:, 2])
    np.multiply(along, bottom, out=design[:, 3])
    design[:, 4], design[:, 5] = view, 1
    design = design.reshape(len(source), 6, _NUM_VALUES)
    normal = design @ design.swapaxes(1, 2)
    diagonal = np.arange(6)
    normal[:, diagonal, diagonal] = normal[:, diagonal, diagonal] * (1 + 1e-4) + 1e-2
    found = np.linalg.solve(normal, design @ target.reshape(len(target), _NUM_VALUES, 1))[:, :, 0]
    contrast = np.where(np.abs(found[:, 4:5]) > 0.2, found[:, 4:5], 1.0)
    edges = window + np.clip(found[:, :4] / contrast, -0.04, 0.04)
    return np.clip(edges, (0, 1 - _MOST_CUT, 0, 1 - _MOST_CUT), (_MOST_CUT, 1, _MOST_CUT, 1))


def _cut(image: np.ndarray, window: np.ndarray) -> np.ndarray:
    """The windows of images (left, right, top, bottom; shares of the side) as 32 x 32, linearly interpolated."""
    return _two_sided(_interpolation(window[:, None, 2:]), image, _interpolation(window[:, None, :2]))


def _interpolation(edges: np.ndarray) -> np.ndarray:
    """The matrices, (..., 32, 32), that blow up what lies between two edges, (..., 2)."""
    side, start, end = THUMBNAIL_PX, edges[..., :1], edges[..., 1:]
    position = np.clip((start + (np.arange(side) + 0.5) / side * (end - start)) * side - 0.5, 0, side - 1)
    return np.maximum(1 - np.abs(position[..., None] - np.arange(side)), 0)


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
    """rows @ channel @ columns.T of each channel."""
    product: np.ndarray = rows @ image @ columns.swapaxes(-1, -2)
    return product
