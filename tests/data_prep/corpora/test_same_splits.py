"""The same splits give the same joined splits, whatever kind of source names them."""

import csv
import uuid
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.config import (
    ClassFolders,
    CorpusConfig,
    CorpusRecipe,
    ImageArrays,
    LabelTable,
    ParquetImages,
    WebDataset,
)
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shards.subsets import take
from vitline.infra.storage import open_store

from ...tars import tar_of

LABELS = ("cat", "dog")


def folder(place, pictures):
    for split, name, label, data in pictures:
        path = place / "folder" / split / label / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return ClassFolders(path=str(place / "folder"), top_folders="splits")


def tar(place, pictures):
    files = {f"{split}/{label}/{name}.png": data for split, name, label, data in pictures}
    (place / "a.tar.gz").write_bytes(tar_of(files, "w:gz"))
    return ClassFolders(path=str(place / "a.tar.gz"), top_folders="splits")


def zip_(place, pictures):
    with zipfile.ZipFile(place / "a.zip", "w") as archive:
        for split, name, label, data in pictures:
            archive.writestr(f"{split}/{label}/{name}.png", data)
    return ClassFolders(path=str(place / "a.zip"), top_folders="splits")


def table(place, pictures):
    with open(place / "table.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "labels", "split"])
        for split, name, label, data in pictures:
            (place / f"{name}.png").write_bytes(data)
            rows.writerow([f"{name}.png", label, split])
    return LabelTable(path=str(place / "table.csv"), split_column="split", single_label=True)


def parquet(place, pictures):
    (place / "parquet").mkdir()
    for split in {split for split, *_ in pictures}:
        rows = [{"image": data, "label": label} for of, _, label, data in pictures if of == split]
        pq.write_table(pa.Table.from_pylist(rows), place / f"parquet/{split}-00000-of-00001.parquet")
    return ParquetImages(path=str(place / "parquet"))


def webdataset(place, pictures):
    for split in {split for split, *_ in pictures}:
        (place / "web" / split).mkdir(parents=True)
        files = [
            file
            for of, name, label, data in pictures
            for file in ((f"{name}.png", data), (f"{name}.cls", label.encode()))
            if of == split
        ]
        (place / "web" / split / "0.tar").write_bytes(tar_of(files))
    return WebDataset(path=str(place / "web"))


def arrays(place, pictures):
    parts = {}
    for split in {split for split, *_ in pictures}:
        own = [(pixels_of(name), LABELS.index(label)) for of, name, label, _ in pictures if of == split]
        parts[f"x_{split}"], parts[f"y_{split}"] = (np.stack(each) for each in zip(*own, strict=True))
    np.savez(place / "a.npz", **parts)
    return ImageArrays(path=str(place / "a.npz"), layout="npz")


def pixels_of(name):
    return np.random.default_rng(int(name)).integers(0, 256, (20, 20, 3), dtype=np.uint8)


@pytest.fixture
def splits_and_subset_of(tmp_path):
    """Number of rows of every split of a corpus, and of a subset of its first 20 rows, made from a source of any kind."""

    def row_counts(make, pictures, **recipe):
        place = Path(tmp_path / uuid.uuid4().hex)
        place.mkdir()
        root = f"memory://{uuid.uuid4().hex}"
        request = CorpusConfig(name="same", source=make(place, pictures), recipe=CorpusRecipe(**recipe))
        (manifest,) = prepare([request], root)
        subset = take(corpus_store(open_store(root), request), 20)
        return [{name: split.num_rows for name, split in m.splits.items()} for m in (manifest, subset)]

    return row_counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "named", [("train", "val", "test"), ("train", "test"), ("train", "val"), ("train",)], ids="+".join
)
def test_the_same_splits_give_the_same_joined_splits_for_every_kind_of_source(named, splits_and_subset_of):
    sizes = {"train": 60, "val": 12, "test": 9}
    names = [(split, f"{1000 * i + n}") for i, split in enumerate(named) for n in range(sizes[split])]
    pictures = [(split, name, LABELS[n % 2], lossless_png(pixels_of(name))) for n, (split, name) in enumerate(names)]
    kinds = (folder, tar, zip_, table, parquet, webdataset, arrays)
    found = {make.__name__: splits_and_subset_of(make, pictures, val_fraction=0.2, test_fraction=0.2) for make in kinds}
    assert all(row_counts == found["folder"] for row_counts in found.values()), found
    whole, subset = found["folder"]
    assert whole["trainval"] == whole["train"] + whole["val"]
    assert set(whole) == {"train", "val", "trainval"} | ({"test"} if "test" in whole else set())
    assert ("test" in whole) == (named != ("train", "val"))
    assert subset == {name: rows for name, rows in whole.items() if name != "trainval"} | {"train": 20}
