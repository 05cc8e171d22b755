"""Losses see what their annotations promise."""

import jaxtyping
import pytest
import torch

from vit.training.loss import sigmoid_cross_entropy


def test_a_wrong_shape_is_caught_where_it_enters():
    """Logits of 3 classes against targets of 4 would broadcast in another formula, and give a number."""
    with pytest.raises(jaxtyping.TypeCheckError):
        sigmoid_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 4))
