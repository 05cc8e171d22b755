"""What a recipe keeps, computed from labels and splits alone."""

import pyarrow as pa
import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.pages.expected_rows import kept_rows
from vitline.data_prep.sources.raw import ImageSource


class Source(ImageSource):
    def fingerprint(self):
        return ""

    def parts(self, place):
        return iter(())

    def examples(self, part, place):
        return iter(())


def kept(rows, **recipe):
    config = CorpusConfig(name="x", source=ClassFolders(path="/x"), recipe=CorpusRecipe(**recipe))
    schema = pa.schema([("labels", pa.list_(pa.string())), ("split", pa.string())])
    tables = [pa.Table.from_pylist([{"labels": list(a), "split": b} for a, b in half], schema) for half in (rows, [])]
    return kept_rows(lambda: tables, config, Source(), None)


ROWS = [("ab", "train"), ("b", "train"), ("a", "train"), ("a", "test"), ("c", "train"), ("ca", "test")]


def test_image_is_kept_if_any_of_its_classes_is_kept():
    found = kept(ROWS, min_images_per_class=3)
    assert (found.splits, found.lost) == ({"train": 2, "test": 2}, {"small_class": 2})
    assert (found.num_small, found.labels) == (2, {"a": 4, "b": 2, "c": 2})
    assert found.share == pytest.approx(4 / 6)


def test_val_per_class_counts_the_first_class_if_the_source_has_no_val():
    assert kept(ROWS, val_per_class=1).splits == {"train": 3, "val": 1, "test": 2}
    assert kept([*ROWS, ("z", "val")], val_per_class=1).splits == {"train": 4, "val": 1, "test": 2}
    assert kept(ROWS, val_per_class=2).splits == {"train": 4, "test": 2}
