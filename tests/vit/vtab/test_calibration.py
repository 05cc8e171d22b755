"""Expected calibration error and reliability diagrams."""

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitline.vit.evaluation.calibration import NUM_BINS, calibration_of, draw_reliability


def calibrated(*predictions):
    confidence, right = zip(*predictions, strict=True)
    return calibration_of(np.array(confidence, np.float32), np.array(right, bool))


def by_definition(confidence, right):
    """The formula of arXiv:1706.04599, Eq. 3, bin by bin and example by example."""
    total = 0.0
    for m in range(1, NUM_BINS + 1):
        inside = [i for i, p in enumerate(confidence) if (m - 1) / NUM_BINS < p <= m / NUM_BINS]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            total += len(inside) / len(right) * abs(accuracy - sum(confidence[i] for i in inside) / len(inside))
    return total


def test_errors_worked_out_by_hand():
    sure = [(0.95, True), (0.95, True), (0.95, True), (0.95, False)]  # 75 % right: 0.2 too sure
    assert calibrated(*sure).ece == pytest.approx(0.2)
    unsure = [(0.5, True), (0.5, True), (0.5, True), (0.5, False)]  # 0.25 too unsure
    both = calibrated(*sure, *unsure)
    assert both.ece == pytest.approx(0.225)
    assert [(i, *vars(each).values()) for i, each in enumerate(both.bins) if each.examples] == [
        (7, 4, 0.5, 0.75),
        (14, 4, pytest.approx(0.95), 0.75),
    ]
    assert both.mean_confidence == pytest.approx(0.725)
    # In one bin too sure and too unsure predictions cancel, in two they do not.
    assert calibrated((0.95, False), (0.95, True)).ece == pytest.approx(0.45)
    assert calibrated((0.75, False), (0.25, True)).ece == pytest.approx(0.75)
    assert calibrated((1.0, True), (1.0, True)).ece == 0


@given(st.lists(st.tuples(st.floats(2**-20, 1, width=32), st.booleans()), min_size=1, max_size=60))
def test_the_error_is_that_of_the_definition(predictions):
    found = calibrated(*predictions)
    confidence, right = zip(*predictions, strict=True)
    assert math.isclose(found.ece, by_definition(confidence, right), abs_tol=1e-9)
    assert sum(each.examples for each in found.bins) == len(predictions)
    assert sum(each.examples * each.accuracy for each in found.bins) == pytest.approx(sum(right))


def test_every_confidence_has_a_bin_and_one_that_is_no_number_leaves_no_calibration():
    assert [each.examples for each in calibrated((0.0, True), (1.0000001, True)).bins] == [1, *[0] * 13, 1]
    assert calibrated((0.5, True), (float("nan"), False)) is None


def test_the_diagram_is_drawn_also_of_one_example_and_with_any_title():
    for predictions in ([(0.2, True)], [(0.1, True), (0.9, False), (0.95, True)]):
        data = draw_reliability(calibrated(*predictions), "$\\frac$ 汉字: a title")
        assert Image.open(io.BytesIO(data)).size[0] > 300
