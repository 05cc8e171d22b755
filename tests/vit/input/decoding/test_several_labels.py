"""Rows of all classes made of class ids, compared with what an explicit loop makes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitline.vit.input.decoding.several_labels import MultiLabels
from vitline.vit.training.loss import num_correct, targets_of

IDS = st.lists(st.integers(0, 4), max_size=4)


@given(st.lists(st.one_of(st.integers(0, 4), st.tuples(IDS, st.booleans())), max_size=6), st.integers(0, 2), st.data())
def test_dense_rows_are_those_of_a_loop_and_hits_are_those_of_the_rows(several, padding, data):
    weight = st.floats(0, 2, width=32)
    labels = [
        each if isinstance(each, int) else (each[0], data.draw(st.lists(weight, min_size=n, max_size=n)) if n and each[1] else None)
        for each in several
        for n in [0 if isinstance(each, int) else len(each[0])]
    ]  # fmt: skip
    expected = torch.zeros(len(labels) + padding, 5)
    for row, label in enumerate(labels):
        ids, weights = ([label], None) if isinstance(label, int) else label
        for i, w in zip(ids, weights or [1.0] * len(ids), strict=True):
            expected[row, i] = max(expected[row, i], torch.tensor(w))
    found = MultiLabels.of(labels, len(expected))
    assert torch.equal(found.dense(5), expected)
    assert torch.equal(targets_of(found, 5), expected)
    top1 = torch.randint(0, 5, (len(expected),), generator=torch.Generator().manual_seed(1))
    logits, valid = torch.nn.functional.one_hot(top1, 5).float(), torch.arange(len(expected)) < len(labels)
    hits = sum(bool(0 < expected[row, c] == expected[row].max()) for row, c in enumerate(top1[: len(labels)].tolist()))
    assert int(num_correct(logits, found, valid)) == hits


def test_one_label_an_image_gives_rows_of_one():
    assert targets_of(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
