"""VTAB's classes from counts, distances and angles: the thresholds, in float32."""

import math
from collections import Counter

import numpy as np
import pytest

from vitline.data_prep.benchmarks import label_rules as rules


def test_value_at_a_threshold_has_the_class_below():
    just_above = float(np.nextafter(np.float32(8.0), np.float32(9)))
    assert [rules.clevr_distance([x, 50.0]) for x in (7.0, 8.0, just_above, 8.5, 9.0, 9.5, 10.0)] == [
        0,
        0,
        1,
        1,
        2,
        3,
        4,
    ]
    assert rules.clevr_distance([10.1]) == 5
    assert rules.clevr_distance([8.0 + 1e-9]) == 0, "float32, as the originals compare"


def test_distance_counts_vehicles_only():
    assert [rules.kitti_distance([("Car", z)]) for z in (-3.0, 8.0, 8.1, 20.0, 20.1)] == [0, 0, 1, 1, 2]
    assert rules.kitti_distance([("Pedestrian", 2.0), ("Tram", 3.0), ("Van", 30.0)]) == 2
    assert rules.kitti_distance([("Cyclist", 2.0)]) == rules.kitti_distance([]) == 3


def test_angles_and_positions_map_to_classes():
    assert [rules.dsprites_orientation(c) for c in range(10)] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert Counter(map(rules.dsprites_orientation, range(40))) == {i: 2 + (i % 2 == 0) for i in range(16)}
    assert all(rules.dsprites_orientation(c) == math.floor(c / 2.5) for c in range(40))
    assert [rules.dsprites_location(c) for c in (0, 1, 2, 31)] == [0, 0, 1, 15]
    assert [rules.smallnorb_azimuth(a) for a in (0, 2, 34)] == [0, 1, 17]
    assert [rules.clevr_count(n) for n in (3, 10)] == [0, 7]
    assert [rules.svhn_digit(y) for y in (1, 9, 10)] == [1, 9, 0]


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (rules.clevr_count, 2),
        (rules.clevr_count, 11),
        (rules.dsprites_location, 32),
        (rules.dsprites_orientation, -1),
        (rules.smallnorb_azimuth, 3),
        (rules.svhn_digit, 0),
        (lambda value: rules.clevr_distance([value]), math.nan),
        (lambda value: rules.clevr_distance([value]), 0.0),
    ],
)
def test_values_outside_of_the_data_set_are_refused(rule, value):
    with pytest.raises(ValueError, match=str(value)):
        rule(value)
