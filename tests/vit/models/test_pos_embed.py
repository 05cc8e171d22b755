"""Resampling of position embeddings: values worked out by hand, agreement with SciPy, refusals."""

import math

import pytest
import scipy.ndimage
import torch

from vitline.vit.models.pos_embed import METHODS, resample_axis, resample_pos_embed, sincos_2d


def test_bilinear_with_aligned_corners_keeps_corners_and_class_token():
    # A 2 x 2 grid of scalars 0, 2, 4, 6 after a class token 9. Aligned corners: the middle of a 3 x 3 grid is the mean.
    table = torch.tensor([9.0, 0.0, 2.0, 4.0, 6.0]).reshape(1, 5, 1)
    expected = [9.0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0]
    assert resample_pos_embed(table, 9).flatten().tolist() == pytest.approx(expected)


def test_gap_table_has_no_class_token_and_an_equal_grid_is_returned_as_is():
    table = torch.randn(1, 16, 8)
    assert resample_pos_embed(table, 16) is table
    assert resample_pos_embed(table, 36).shape == (1, 36, 8)


@pytest.mark.parametrize(("entries", "patches"), [(8, 16), (17, 15)])
def test_non_square_grid_is_refused(entries, patches):
    with pytest.raises(ValueError, match=r"square|n\*n"):
        resample_pos_embed(torch.zeros(1, entries, 4), patches)


def test_resampling_one_axis_equals_resampling_the_grid_along_it():
    x = torch.randn(2, 3, 8)
    grid = x[:, None].expand(-1, 3, -1, -1).reshape(2, 9, 8)
    moved = resample_pos_embed(grid, 25).reshape(2, 5, 5, 8)
    torch.testing.assert_close(resample_axis(x, 5), moved[:, 2])


def test_default_method_equals_scipy_zoom_of_order_one():
    table = torch.randn(1, 14 * 14, 5)
    zoomed = scipy.ndimage.zoom(table[0].reshape(14, 14, 5).numpy(), (24 / 14, 24 / 14, 1), order=1)
    assert abs(resample_pos_embed(table, 24 * 24)[0].reshape(24, 24, 5).numpy() - zoomed).max() <= 5e-6
    others = [resample_pos_embed(table, 24 * 24, m)[0].reshape(24, 24, 5).numpy() for m in METHODS if "align" not in m]
    assert min(abs(other - zoomed).max() for other in others) > 0.1


def test_fixed_embeddings_are_sines_and_cosines_of_column_and_row():
    table = sincos_2d(3, 8)[0]
    for row in range(3):
        for column in range(3):
            expected = [f(p * w) for p in (column, row) for f in (math.sin, math.cos) for w in (1, 1e-4)]
            assert table[3 * row + column].tolist() == pytest.approx(expected)
