"""VTAB's rules that turn annotations into classes (google-research/task_adaptation, data/*.py).

Thresholds are compared in float32, as in the original code: a value on a threshold belongs to the lower class.
"""

from collections.abc import Iterable, Sequence

import numpy as np

CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
"""Thresholds of the depth of the nearest object in a scene, in units of CLEVR's renderer."""
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
"""Thresholds of the distance to the nearest vehicle in metres."""
KITTI_VEHICLES = ("Car", "Van", "Truck")
_KITTI_NO_VEHICLE = 1000.0


def binned(value: float, thresholds: Sequence[float]) -> int:
    """The last class whose threshold is below the value. Raises ValueError if there is none, and for NaN."""
    below = np.flatnonzero(np.asarray(thresholds, np.float32) < np.float32(value))
    if not len(below):
        raise ValueError(f"{value} is not above {thresholds[0]}, the lower end of the first class")
    return int(below[-1])


def clevr_count(num_objects: int) -> int:
    """Class of a scene by its number of objects, 3 to 10."""
    if not 3 <= num_objects <= 10:
        raise ValueError(f"a scene has {num_objects} objects; CLEVR's scenes have 3 to 10")
    return num_objects - 3


def clevr_distance(depths: Iterable[float]) -> int:
    """Class of a scene by the depth of its nearest object; `depths`: third value of `pixel_coords` of the objects."""
    return binned(min(depths), CLEVR_DISTANCES)


def kitti_distance(objects: Iterable[tuple[str, float]]) -> int:
    """Class of an image by type and `location[2]` of its objects; 3 if there is no vehicle."""
    return binned(min([_KITTI_NO_VEHICLE, *(z for kind, z in objects if kind in KITTI_VEHICLES)]), KITTI_DISTANCES)


def dsprites_location(x_class: int) -> int:
    """Class of one of 32 horizontal positions: two positions per class."""
    return _in_range(x_class, 32, "horizontal position") // 2


def dsprites_orientation(orientation_class: int) -> int:
    """Class of one of 40 orientations: floor(c / 2.5), so three and two orientations alternate."""
    return 2 * _in_range(orientation_class, 40, "orientation") // 5


def smallnorb_azimuth(stored: int) -> int:
    """Class of an azimuth in steps of 20 degrees, stored as 0, 2, ..., 34."""
    if _in_range(stored, 36, "azimuth") % 2:
        raise ValueError(f"azimuth {stored} is odd; smallNORB stores even numbers")
    return stored // 2


def svhn_digit(stored: int) -> int:
    """Class of a digit, which is stored as 1 to 10."""
    if not 1 <= stored <= 10:
        raise ValueError(f"label {stored} is outside of 1 to 10, the labels of SVHN")
    return stored % 10


def _in_range(value: int, end: int, what: str) -> int:
    if not 0 <= value < end:
        raise ValueError(f"{what} {value} is outside of 0 to {end - 1}")
    return value
