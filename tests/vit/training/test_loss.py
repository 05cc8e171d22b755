"""Losses of mixed targets worked out by hand; the annotated shapes of losses are checked."""

from math import log

import jaxtyping
import pytest
import torch

from vitline.vit.input.batches import MultiLabels
from vitline.vit.training.loss import LOSSES, mixed_targets, sigmoid_cross_entropy, targets_of


def test_wrong_shape_is_refused_at_the_call():
    """Logits of 3 classes and targets of 4 are refused at the call, whatever the formula would make of them."""
    with pytest.raises(jaxtyping.TypeCheckError):
        sigmoid_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 4))


def test_losses_of_mixed_targets_by_hand():
    """Logits 0 and ln 3: softmax 1/4 and 3/4, sigmoids 1/2 and 3/4. The first image is 3/4 of class 0, the other unmixed."""
    logits = torch.tensor([[0.0, log(3)], [0.0, log(3)]])
    own, partner = (targets_of(torch.tensor(ids), 2) for ids in ([0, 1], [1, 0]))
    targets = mixed_targets(own, partner, torch.tensor([0.75, 1.0]))
    assert targets.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    softmax = [0.75 * log(4) + 0.25 * log(4 / 3), log(4 / 3)]
    assert LOSSES["softmax"](logits, targets).tolist() == pytest.approx(softmax)
    sigmoid = [log(2) + 0.25 * log(4 / 3) + 0.75 * log(4), log(2) + log(4 / 3)]
    assert LOSSES["sigmoid"](logits, targets).tolist() == pytest.approx(sigmoid)


def test_several_labels_and_smoothing_are_mixed_alike():
    """Labels {0, 2} with share 1/4 and {2} with 3/4; smoothing by 0.3 spreads 0.1 over each of three classes."""
    own, partner = MultiLabels.of([([2, 0], None)], 1), MultiLabels.of([([2], None)], 1)
    share = torch.tensor([0.25])
    assert mixed_targets(own.dense(3), partner.dense(3), share).tolist() == [[0.25, 0.0, 1.0]]
    smooth = mixed_targets(*(targets_of(each, 3, 0.3) for each in (own, partner)), share)
    assert smooth[0].tolist() == pytest.approx([0.275, 0.1, 0.8])
