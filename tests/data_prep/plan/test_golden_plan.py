"""The decisions of planning stay as they are when its code is moved: which images stay, in which split and order, why others do
not, and how many pairs of images were compared for that."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.config import ClassFolders, CorpusConfig, LabelTable
from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.plan.locate_images import ImageReader
from vitline.data_prep.plan.mixture_leakage import find_mixture_leaks
from vitline.data_prep.prepare import job
from vitline.infra.storage import open_store

from ...pictures import blurred, encoded

GOLDEN = {
    "evaluation": ("e142838da9b31059", {"test": 20, "train": 19, "trainval": 20, "val": 1}),
    "main": (
        "7e084d1b268ec516",
        {
            "test": 8,
            "train": 58,
            "trainval": 77,
            "val": 19,
            "duplicate": 13,
            "leakage": 4,
            "near_duplicate": 26,
            "not_an_image": 2,
        },
    ),
    "grown": (
        "d4b45c8df983d0f7",
        {
            "test": 12,
            "train": 76,
            "trainval": 96,
            "val": 20,
            "duplicate": 16,
            "leakage": 5,
            "near_duplicate": 32,
            "not_an_image": 2,
        },
    ),
}
GOLDEN_COMPARED = {"evaluation": (0, 0), "main": (454, 337), "grown": (487, 438), "mixture": (487, 786)}
NUM_IMAGES = 160


def scaled(data, factor):
    """A near duplicate: every pixel becomes a square of pixels."""
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    return encoded(pixels.repeat(factor, 0).repeat(factor, 1))


def mirrored(data):
    return encoded(np.asarray(Image.open(io.BytesIO(data)))[:, ::-1].copy())


@pytest.fixture
def requests(tmp_path):
    """An evaluation set; a table with groups, several labels and weights, copies, near duplicates and images of that set; and more
    images for it, some of which it has already."""
    home = tmp_path
    for i in range(40):
        path = home / "evaluation" / ("train", "test")[i % 2] / "ab"[i // 20] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blurred(5000 + i, kind="PNG"))
    evaluation = CorpusConfig(name="evaluation", source=ClassFolders(path=str(home / "evaluation")))
    rows, more = [], []
    (home / "images").mkdir()
    for i in range(NUM_IMAGES):
        data = blurred(i, kind="PNG")
        if i % 10 == 3:
            data = blurred(i - 1, kind="PNG")  # a copy, often with other labels
        elif i % 10 == 5:
            data = scaled(blurred(i - 1, kind="PNG"), 2)
        elif i % 10 == 7:
            data = mirrored(blurred(i - 1, kind="PNG"))
        elif i % 40 == 9:
            data = scaled(blurred(5000 + i // 40 * 2 + 1, kind="PNG"), 2)  # of the test split of the evaluation set
        elif i % 80 == 20:
            data = b"no image"
        labels = [f"class{i % 4}", f"class{i % 7}"][: 1 + i % 2 * (i % 4 != i % 7)]
        row = {
            "image": f"images/{i}.png",
            "labels": labels,
            "w": [1.0, 0.25][: len(labels)],
            "g": f"g{i // 4}" if i % 3 == 0 else "",
        }
        (home / row["image"]).write_bytes(data)
        (more if i >= NUM_IMAGES - 30 else rows).append(row)
    columns = {"weights_column": "w", "group_column": "g"}
    recipe = {"decontaminate": ("evaluation",), "near_duplicates": "drop", "order_seed": 5}
    made = {"evaluation": evaluation}
    for name, table in {"main": rows, "grown": rows[-5:] + more}.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        source = LabelTable(path=str(home / f"{name}.jsonl"), **columns)
        added = {"add_to": "main"} if name == "grown" else {}
        known = {"known_ids": "skip"} if name == "grown" else {}
        made[name] = CorpusConfig(name="main", source=source, recipe=recipe | known, **added)
    return made


@pytest.fixture
def compared(monkeypatch):
    """Pairs compared so far: one by one, as for near duplicates, and many at once, as for leaks."""
    counts = {"same": 0, "same_pairs": 0}
    same, same_pairs = ImageReader.same, ImageReader.same_pairs

    def one(self, a, b):
        counts["same"] += 1
        return same(self, a, b)

    def many(self, pairs):
        counts["same_pairs"] += len(pairs)
        return same_pairs(self, pairs)

    monkeypatch.setattr(ImageReader, "same", one)
    monkeypatch.setattr(ImageReader, "same_pairs", many)
    return counts


@pytest.mark.slow
def test_corpora_and_refusals_are_the_golden_ones(requests, memory_root, compared):
    found, num_compared = {}, {}
    for name, request in requests.items():
        (manifest,) = job.prepare([request], memory_root)
        splits = {split: info.num_rows for split, info in sorted(manifest.splits.items())}
        found[name] = (manifest.digest[:16], splits | dict(sorted(manifest.counts.refused.items())))
        num_compared[name] = tuple(compared.values())
    assert found == GOLDEN
    root = open_store(memory_root)
    corpora = [each for each in Corpora(root).all(print) if "train" in each.manifest.splits]
    leaks = find_mixture_leaks(corpora, root, split="train", val_split="val", compared={})
    num_compared["mixture"] = tuple(compared.values())
    assert (num_compared, leaks) == (GOLDEN_COMPARED, [])
