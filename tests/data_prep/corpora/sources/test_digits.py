"""The handwritten digits of scikit-learn as a source."""

import numpy as np
import pytest

from vitline.data_prep.config import CorpusRecipe, Digits
from vitline.data_prep.decode import decode
from vitline.data_prep.examples.digits import DigitsCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store


@pytest.fixture
def read(memory_root):
    def make(**source):
        work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/work"), 100)
        corpus = DigitsCorpus(Digits(**source), CorpusRecipe())
        (part,) = corpus.parts(work)
        examples = list(corpus.examples(part, work))
        assert len(examples) == part.num_examples
        return examples, work.store

    return make


def test_every_digit_is_lossless_and_in_one_split(read):
    data = pytest.importorskip("sklearn.datasets").load_digits()
    examples, work = read()
    assert len(examples) == len(data.target) == 1797
    sizes = {split: sum(e.split == split for e in examples) for split in ("train", "val", "test")}
    assert sizes == {"train": 800, "val": 200, "test": 797}
    for example, image, digit in zip(examples, data.images, data.target, strict=True):
        assert work.read(example.key, example.offset, example.offset + example.length) == example.data
        np.testing.assert_array_equal(np.round(decode(example.data)[..., 0] / 255 * 16), image)
        assert example.labels == (str(digit),)


def test_chosen_digits_and_split_sizes_are_used(read):
    pytest.importorskip("sklearn")
    examples, _ = read(digits=(5, 6, 7, 8, 9), num_train=400, num_val=100)
    assert {label for e in examples for label in e.labels} == set("56789")
    assert DigitsCorpus(Digits(num_train=400, num_val=100), CorpusRecipe()).views["train400val100"] == ("train", "val")
    with pytest.raises(ValueError, match="Request fewer"):
        read(digits=(1,), num_train=800)
