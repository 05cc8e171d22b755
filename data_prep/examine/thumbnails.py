"""Thumbnails of 32 x 32 pixels: input of perceptual hashes, and confirmation that two images look the same.

A hash finds candidates; the two thumbnails decide. Two images look the same if one was scaled, recompressed, made lighter
or darker, mirrored, or cropped by up to an eighth at any edge. Different drawings of one series (another mouth, another emblem in
the folder) are not the same; tests/benchmarks/near_duplicates.py measures both.
"""

import functools

import numpy as np
from PIL import Image

THUMBNAIL_PX = 32

# Chosen among settings that were tried on 800 drawings of one collection, which were also used to develop hash and confirmation;
# the measured figures are of other images. Tighter limits lose lighter copies, whose near-white parts are clipped; looser limits
# confuse playing cards of one series.
_MOST_UNLIKE = 0.04  # remaining mean square difference of two copies, relative to squared contrast
_WORST_SPOT = 0.35  # the same in any 7 x 7 spot, as root mean square relative to contrast
_MOST_UNLIKE_CUT, _WORST_SPOT_CUT = 0.03, 0.25  # for blurred images, when looking for a crop
_MOST_CUT = 0.125  # share of a side that may be cropped at either edge
_LEAST_CORRELATION = 0.3  # pairs below this are never the same, cropped or not
_LEAST_CONTRAST = 1.0  # standard deviation in grey levels; a flat image resembles every other flat image
_SPOT_PX = 7
_NOISE = 6.0  # grey levels by which an image of little contrast may differ
_LEAST_PIXELS = 10  # from which a factor of brightness is estimated
_TOGETHER = 96  # channels per batch: 800 KB for either side


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """The image (height, width, 3), uint8 RGB, resized to (32, 32, 3) without keeping the aspect ratio.

    Pillow uses integer arithmetic, so the result is equal on all machines. The reducing gap of 2 makes large images 4 times as
    fast.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    size = (THUMBNAIL_PX, THUMBNAIL_PX)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


def looks_same(a: np.ndarray, b: np.ndarray) -> bool:
    """`same_images` for one pair, (32, 32, 3) uint8 each."""
    return bool(same_images(a[None], b[None])[0])


def same_images(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which pairs of thumbnails, two arrays (pairs, 32, 32, 3) uint8, look the same, possibly mirrored: (pairs,) bool.

    Symmetric. Two images without contrast are never the same.
    """
    same = np.zeros(len(a), bool)
    grey = _is_grey(a) & _is_grey(b)
    for chosen, channels in ((grey, 1), (~grey, 3)):  # the channels of grey images are equal, so one stands for all
        pairs = np.flatnonzero(chosen)
        for start in range(0, len(pairs), _TOGETHER // channels):
            some = pairs[start : start + _TOGETHER // channels]
            first, second = (
                image[some, :, :, :channels].transpose(0, 3, 1, 2).astype(np.float64, order="C") for image in (a, b)
            )
            contrast = np.minimum(_deviation(first), _deviation(second))
            for view in (first, np.ascontiguousarray(first[..., ::-1])):
                left = np.flatnonzero((contrast >= _LEAST_CONTRAST) & ~same[some])
                same[some[left]] = _alike(view[left], second[left])
    return same


def _is_grey(images: np.ndarray) -> np.ndarray:
    grey: np.ndarray = (images == images[..., :1]).all(axis=(1, 2, 3))
    return grey


# Below, an image is (pairs, 1 or 3, 32, 32) float64 and a number is (pairs,). Pairs are processed in batches, because a call takes
# longer than the arithmetic on a single pair. The result for a pair does not depend on the others.


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = np.zeros(len(a), bool)
    left = np.flatnonzero(_correlation(a, b) >= _LEAST_CORRELATION)
    same[left] = _within(a[left], b[left], _MOST_UNLIKE, _WORST_SPOT)
    # One image may be a crop of the other. The thumbnail of the crop is sharper than the same region in the thumbnail of the whole
    # image, so both are blurred. Blurring hides differences, so the crop must explain at least half of the difference.
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
    """Whether two images differ little, overall and in every spot. The spots are checked last because they take longest."""
    within = _unlike(a, b) < most_unlike
    near = np.flatnonzero(within)
    within[near] = _spot(a[near], b[near]) < worst_spot
    return within


def _sum(values: np.ndarray) -> np.ndarray:
    total: np.ndarray = _flat(values).sum(axis=1)
    return total


def _flat(image: np.ndarray) -> np.ndarray:
    """(pairs, values)."""
    return image.reshape(len(image), _num_values(image))


def _num_values(image: np.ndarray) -> int:
    return int(np.prod(image.shape[1:]))


def _deviation(image: np.ndarray) -> np.ndarray:
    deviation: np.ndarray = _flat(image).std(axis=1)
    return deviation


def _each(number: np.ndarray) -> np.ndarray:
    """One number per pair, shaped for arithmetic with images."""
    return number[:, None, None, None]


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (image - _each(_sum(image) / _num_values(image)) for image in (a, b))
    correlation: np.ndarray = _sum(x * y) / np.sqrt(_sum(x * x) * _sum(y * y) + 1e-9)
    return correlation


def _unlike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mean square difference of two images after matching brightness, relative to squared contrast."""
    smaller: np.ndarray = np.minimum(_share(_as_light_as(a, b), b), _share(_as_light_as(b, a), a))
    return smaller


def _spot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest difference of two images in any spot, after matching brightness."""
    views = ((a, b), (_as_light_as(a, b), b), (_as_light_as(b, a), a))
    least: np.ndarray = np.minimum.reduce([_worst_spot(*view) for view in views])
    return least


def _as_light_as(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a` scaled in brightness by the factor that brings it closest to `b`; white stays white."""
    factor, not_white, products, squares = np.ones(len(a)), b < 254, a * b, a * a
    for _ in range(3):
        inside = (_each(factor) * a < 254) & not_white
        found = _sum(products * inside) / (_sum(squares * inside) + 1e-6)
        factor = np.where(_sum(inside) >= _LEAST_PIXELS * a.shape[1], found, factor)
    scaled: np.ndarray = np.minimum(_each(factor) * a, 255)
    return scaled


def _share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mean square difference, relative to the squared contrast of b (plus noise)."""
    return _sum((a - b) ** 2) / _num_values(a) / (_deviation(b) + _NOISE) ** 2


def _worst_spot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest deviation in any 7 x 7 spot that brightness and contrast of the spot do not explain, relative to the contrast
    of the image. Small changes in a drawing are visible here; clipped highlights and softer scaling hardly are."""
    mean_a, mean_b = _spots(a), _spots(b)
    var_a = np.maximum(_spots(a * a) - mean_a**2, 0)
    var_b = np.maximum(_spots(b * b) - mean_b**2, 0)
    cov = _spots(a * b) - mean_a * mean_b
    left = np.minimum(_left_over(var_a, var_b, cov), _left_over(var_b, var_a, cov))
    worst: np.ndarray = left.max(axis=(1, 2), initial=0.0)
    relative: np.ndarray = np.sqrt(worst) / (np.minimum(_deviation(a), _deviation(b)) + _NOISE)
    return relative


def _left_over(var_x: np.ndarray, var_y: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """Variance of y that is not explained as a multiple (0 to 1.3) of x."""
    slope = np.clip(cov / (var_x + 1), 0, 1.3)
    left: np.ndarray = var_y - 2 * slope * cov + slope**2 * var_x
    return left


def _spots(image: np.ndarray) -> np.ndarray:
    """Means over every 7 x 7 spot and all channels."""
    total = np.zeros((len(image), THUMBNAIL_PX + 1, THUMBNAIL_PX + 1))
    total[:, 1:, 1:] = image.sum(axis=1).cumsum(axis=1).cumsum(axis=2)
    k = _SPOT_PX
    sums = total[:, k:, k:] - total[:, :-k, k:] - total[:, k:, :-k] + total[:, :-k, :-k]
    means: np.ndarray = sums / (image.shape[1] * k * k)
    return means


def _piece_like(whole: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """The window of `whole` that resembles `piece` most, resized to a thumbnail: Gauss-Newton over its four edges with free
    brightness and contrast, on blurred images first. (Lucas and Kanade, IJCAI 1981.)"""
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
    """One step of the window edges (left, right, top, bottom; shares of the side) toward the window that `target` shows."""
    view, size = _cut(source, window), THUMBNAIL_PX / (window[:, 1::2] - window[:, ::2])
    # Derivative of a pixel with respect to an edge: its slope, times the share of the edge's movement that reaches the pixel.
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
    design = design.reshape(len(source), 6, _num_values(source))
    normal = design @ design.swapaxes(1, 2)
    diagonal = np.arange(6)
    normal[:, diagonal, diagonal] = normal[:, diagonal, diagonal] * (1 + 1e-4) + 1e-2 * source.shape[1] / 3
    found = np.linalg.solve(normal, design @ _flat(target)[:, :, None])[:, :, 0]
    contrast = np.where(np.abs(found[:, 4:5]) > 0.2, found[:, 4:5], 1.0)
    edges = window + np.clip(found[:, :4] / contrast, -0.04, 0.04)
    inside: np.ndarray = np.clip(edges, (0, 1 - _MOST_CUT, 0, 1 - _MOST_CUT), (_MOST_CUT, 1, _MOST_CUT, 1))
    return inside


def _cut(image: np.ndarray, window: np.ndarray) -> np.ndarray:
    """The windows of images (left, right, top, bottom; shares of the side), interpolated linearly to 32 x 32."""
    return _two_sided(_interpolation(window[:, None, 2:]), image, _interpolation(window[:, None, :2]))


def _interpolation(edges: np.ndarray) -> np.ndarray:
    """The matrices, (..., 32, 32), that stretch the range between two edges, (..., 2), to the full side."""
    side, start, end = THUMBNAIL_PX, edges[..., :1], edges[..., 1:]
    position = np.clip((start + (np.arange(side) + 0.5) / side * (end - start)) * side - 0.5, 0, side - 1)
    weights: np.ndarray = np.maximum(1 - np.abs(position[..., None] - np.arange(side)), 0)
    return weights


def _blurred(image: np.ndarray, times: int) -> np.ndarray:
    """Each pixel becomes half of itself plus a quarter of either neighbour, in both directions, `times` times."""
    matrix = _blur_matrix(times)
    return _two_sided(matrix, image, matrix)


@functools.cache
def _blur_matrix(times: int) -> np.ndarray:
    padded = np.eye(THUMBNAIL_PX)[[0, *range(THUMBNAIL_PX), THUMBNAIL_PX - 1]]
    return np.linalg.matrix_power(padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4, times)


@functools.cache
def _slope_matrix() -> np.ndarray:
    """Derivative along an axis: half the difference of the neighbours; at the edges, the difference to the one neighbour."""
    slopes: np.ndarray = np.asarray(np.gradient(np.eye(THUMBNAIL_PX), axis=0))
    return slopes


def _two_sided(rows: np.ndarray, image: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """rows @ channel @ columns.T for each channel."""
    product: np.ndarray = rows @ image @ columns.swapaxes(-1, -2)
    return product
