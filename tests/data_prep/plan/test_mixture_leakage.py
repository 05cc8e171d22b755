"""Leakage between the corpora of a mixture: what their preparations have not compared is found, and only that."""

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.find_corpus import FoundCorpus, corpus_store
from vitline.data_prep.plan.mixture_leakage import find_mixture_leaks
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.infra.storage import open_store


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Root and stores of `first`; of `later`, which has images of `first` in val and test; and of `drawn`, mirrored images of `first`
    of which half are drawn for val."""
    folder = tmp_path_factory.mktemp("mixed")
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    pieces = [p.crop((x, y, x + 120, y + 120)) for p in photos for x in (0, 250, 500) for y in (0, 210)]
    noise = np.random.default_rng(0)

    def save(image, name):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)

    for i, piece in enumerate(pieces):
        save(piece, f"first/train/cat/{i}.png")
        save(ImageOps.mirror(piece), f"drawn/cat/{i}.png")
    save(ImageOps.mirror(pieces[0]), "later/val/cat/0.png")
    save(pieces[1].resize((70, 70)), "later/test/cat/1.png")
    for i in range(8):
        coarse = Image.fromarray(noise.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((90, 90))
        save(coarse, f"later/train/cat/{i}.png")
    root, stores = str(folder / "store"), []
    for name in ("first", "later", "drawn"):
        splits = CorpusRecipe(val_fraction=0.5 if name == "drawn" else 0.0, test_fraction=0.0)
        config = CorpusConfig(name=name, source=ClassFolders(path=str(folder / name)), recipe=splits)
        prepare([config], root)
        stores.append(corpus_store(open_store(root), config))
    return open_store(root), stores


def leaks_of(mixed, val_split="val", compared=None, names=("first", "later")):
    root, corpora = mixed[0], [FoundCorpus(store, load_manifest(store)) for store in mixed[1]]
    named = [corpus for corpus in corpora if corpus.manifest.name in names]
    found = find_mixture_leaks(named, root, split="train", val_split=val_split, compared=compared or {})
    return [
        (leak.corpus.partition("/")[0], leak.evaluation.partition("/")[0], leak.split, leak.num_images)
        for leak in found
    ]


@pytest.mark.slow
def test_an_evaluation_set_that_was_prepared_later_is_compared(mixed):
    assert leaks_of(mixed) == [("first", "later", "test", 1), ("first", "later", "val", 1)]


def test_what_a_preparation_has_compared_is_not_compared_again(mixed):
    first, later = (f"{m.name}/{m.version}" for m in map(load_manifest, mixed[1][:2]))
    assert leaks_of(mixed, compared={first: {(later, "test")}}) == [("first", "later", "val", 1)]
    assert leaks_of(mixed, compared={first: {(later, "test"), (later, "val")}}) == []


def test_a_validation_split_that_was_drawn_is_compared_with_the_other_corpora_of_the_mixture(mixed):
    """A preparation does not compare it. Val of `drawn` shows images of `first`; its train split shows those of no other corpus."""
    drawn = load_manifest(mixed[1][2])
    first, later = (f"{m.name}/{m.version}" for m in map(load_manifest, mixed[1][:2]))
    known = {first: {(later, "test"), (later, "val")}, f"drawn/{drawn.version}": {(later, "test"), (later, "val")}}
    num_val = drawn.splits["val"].num_rows
    assert 0 < num_val < 12
    assert leaks_of(mixed, compared=known, names=("first", "drawn")) == [("first", "drawn", "val", num_val)]
    assert leaks_of(mixed, val_split=None, compared=known, names=("first", "drawn")) == []
