"""The digits stay what they are."""

import numpy as np
import pytest

from data_prep.config import Digits
from data_prep.corpora.digits import DigitsCorpus
from data_prep.decode import decode
from infra.storage import open_store


def test_every_digit_is_lossless_and_in_one_split(memory_root):
    data = pytest.importorskip("sklearn.datasets").load_digits()
    spill = open_store(memory_root)
    examples = list(DigitsCorpus(Digits()).examples(spill, spill))
    assert len(examples) == len(data.target) == 1797
    sizes = {split: sum(e.split == split for e in examples) for split in ("train", "val", "test")}
    assert sizes == {"train": 800, "val": 200, "test": 797}
    for example, image, digit in zip(examples, data.images, data.target, strict=True):
        grey = decode(spill.read(example.key, example.offset, example.offset + example.length))[..., 0]
        np.testing.assert_array_equal(np.round(grey / 255 * 16), image)
        assert example.labels == (str(digit),)


def test_some_digits(memory_root):
    pytest.importorskip("sklearn")
    spill = open_store(memory_root)
    source = DigitsCorpus(Digits(digits=(5, 6, 7, 8, 9), num_train=400, num_val=100))
    examples = list(source.examples(spill, spill))
    assert {label for e in examples for label in e.labels} == set("56789")
    assert source.views["train400val100"] == ("train", "val")
    with pytest.raises(ValueError, match="Ask for fewer"):
        list(DigitsCorpus(Digits(digits=(1,), num_train=800)).examples(spill, spill))
