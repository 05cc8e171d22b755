"""The handwritten digits of scikit-learn: arrays of 17 grey levels, stored as lossless PNG."""

import importlib.util
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

from data_prep.config import Digits
from data_prep.corpora.raw import RawCorpus, RawExample
from data_prep.splits import filled_splits
from infra.storage import Store

_SPILL_KEY = "digits.bin"


class DigitsCorpus(RawCorpus):
    """All ten digits or some of them, with exact numbers in train and val and the rest in test."""

    origin = "sklearn.datasets.load_digits"
    credit = "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository"

    def __init__(self, source: Digits) -> None:
        self._source = source
        train, val = f"train{source.num_train}", f"val{source.num_val}"
        self.views = {train: ("train",), val: ("val",), train + val: ("train", "val")}

    def fingerprint(self) -> str:
        if importlib.util.find_spec("sklearn") is None:
            raise ValueError("The digits come with scikit-learn, which is not installed: pip install scikit-learn.")
        return "1797 digits of 8 x 8"  # the data set is fixed; a release of the library does not change it

    def examples(self, root: Store, spill: Store) -> Iterator[RawExample]:
        from sklearn.datasets import load_digits

        data = load_digits()
        chosen = [i for i, digit in enumerate(data.target) if digit in self._source.digits]
        files = [_png(data.images[i]) for i in chosen]
        spill.write(_SPILL_KEY, b"".join(files))
        ids = [f"digits/{i:04d}" for i in chosen]
        splits = filled_splits(dict.fromkeys(ids, 1), self._source.num_val, self._source.num_train)
        offset = 0
        for i, example_id, file in zip(chosen, ids, files, strict=True):
            yield RawExample(
                example_id=example_id,
                labels=(str(data.target[i]),),
                split=splits[example_id],
                base=spill.uri,
                key=_SPILL_KEY,
                offset=offset,
                length=len(file),
            )
            offset += len(file)


def _png(image: np.ndarray) -> bytes:
    # 0 ... 16 -> 0 ... 255: an odd scale, but every level stays apart, so nothing is lost.
    levels = np.round(image * (255 / 16)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "PNG")
    return file.getvalue()
