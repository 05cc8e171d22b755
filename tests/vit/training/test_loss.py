"""The annotated shapes of losses are checked."""

import jaxtyping
import pytest
import torch

from vit.training.loss import sigmoid_cross_entropy


def test_wrong_shape_is_refused_at_the_call():
    """Logits of 3 classes and targets of 4 are refused at the call, whatever the formula would make of them."""
    with pytest.raises(jaxtyping.TypeCheckError):
        sigmoid_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 4))
