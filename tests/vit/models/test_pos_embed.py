"""The resampler against values worked out by hand and its refusals."""

import pytest
import torch

from vit.models.pos_embed import resample_pos_embed


def test_bilinear_with_aligned_corners_keeps_corners_and_class_token():
    # A 2 x 2 grid of scalars 0, 2, 4, 6 after a class token 9. Aligned corners: the middle of a 3 x 3 grid is the mean.
    table = torch.tensor([9.0, 0.0, 2.0, 4.0, 6.0]).reshape(1, 5, 1)
    expected = [9.0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0]
    assert resample_pos_embed(table, 9).flatten().tolist() == pytest.approx(expected)


def test_a_gap_table_has_no_class_token_and_the_same_grid_is_untouched():
    table = torch.randn(1, 16, 8)
    assert resample_pos_embed(table, 16) is table
    assert resample_pos_embed(table, 36).shape == (1, 36, 8)


@pytest.mark.parametrize(("entries", "patches"), [(8, 16), (17, 15)])
def test_a_grid_that_is_no_square_is_refused(entries, patches):
    with pytest.raises(ValueError, match=r"square|n\*n"):
        resample_pos_embed(torch.zeros(1, entries, 4), patches)
