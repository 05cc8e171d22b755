"""The handwritten digits of scikit-learn: arrays with 17 grey levels, stored as lossless PNG."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.config import CorpusRecipe, Digits
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, Spill, WorkFolder
from vitline.data_prep.sources.splits import filled_splits


class DigitsCorpus(ImageSource):
    """All ten digits or some of them, with exact numbers in train and val; the rest is test. One part."""

    origin = "sklearn.datasets.load_digits"
    credit = "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository"

    def __init__(self, source: Digits, recipe: CorpusRecipe) -> None:
        self._source = source
        train, val = f"train{source.num_train}", f"val{source.num_val}"
        self.views = {train: ("train",), val: ("val",), train + val: ("train", "val")}

    def fingerprint(self) -> str:
        if importlib.util.find_spec("sklearn") is None:
            raise ValueError(
                "The digits are part of scikit-learn, which is not installed. Run: pip install scikit-learn."
            )
        return "1797 digits of 8 x 8"  # the data set is the same in all releases of the library

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        _, splits = self._load()
        yield SourcePart(name="digits", num_examples=len(splits))

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        data, splits = self._load()
        with Spill(work, part) as spill:
            for i, (example_id, split) in splits.items():
                file = lossless_png(_levels(data.images[i]))
                yield RawExample(
                    example_id=example_id,
                    labels=(str(data.target[i]),),
                    split=split,
                    data=file,
                    **spill.keep(file),
                )

    def _load(self) -> tuple[Any, dict[int, tuple[str, str]]]:
        """The data set, and id and split of every requested digit. Raises ValueError if there are too few."""
        from sklearn.datasets import load_digits

        data = load_digits()
        ids = {i: f"digits/{i:04d}" for i, digit in enumerate(data.target) if digit in self._source.digits}
        splits = filled_splits(dict.fromkeys(ids.values(), 1), self._source.num_val, self._source.num_train)
        return data, {i: (example_id, splits[example_id]) for i, example_id in ids.items()}


def _levels(image: np.ndarray) -> np.ndarray:
    # 0 ... 16 -> 0 ... 255: an uneven scale, but all levels stay distinct, so nothing is lost.
    return np.round(image * (255 / 16)).astype(np.uint8)
