"""ILSVRC2012 in the layout of its three archives, in miniature."""

import contextlib
import io
import random
import uuid

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.data_prep.archives.matlab_file import read_mat
from vitline.data_prep.config import CorpusRecipe, Ilsvrc2012
from vitline.data_prep.sources.imagenet.ilsvrc2012 import Ilsvrc2012Corpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

# As in the kit: numbers up to 1,000 are classes, not in the order of the WNIDs; the others are their ancestors.
SYNSETS = [
    (1, "n02119789", "kit fox, Vulpes macrotis", []),
    (2, "n01440764", "tench, Tinca tinca", []),
    (3, "n02100735", "English setter", []),
    (1001, "n00001740", "entity", [1002, 2]),
    (1002, "n02075296", "carnivore", [1, 3]),
]
TRUTH = [3, 1, 2, 2, 1, 3, 3]


@pytest.fixture
def folder(tmp_path, ilsvrc):
    train = {
        f"{w}.tar": ilsvrc.tar_of({f"{w}_{i}.JPEG": f"{w} {i}".encode() for i in range(40)})
        for _, w, _, _ in SYNSETS[:3]
    }
    val = {f"ILSVRC2012_val_{i:08d}.JPEG": f"val {i}".encode() for i in range(1, len(TRUTH) + 1)}
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(ilsvrc.tar_of(train))
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(ilsvrc.tar_of(val))
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(ilsvrc.kit(SYNSETS, TRUTH))
    return tmp_path


def opened(path, validation_is="test", **recipe):
    return Ilsvrc2012Corpus(Ilsvrc2012(path=str(path), validation_is=validation_is), CorpusRecipe(**recipe))


def listed(path, *args, **recipe):
    work = WorkFolder(open_store("memory://root"), open_store(f"memory://{uuid.uuid4().hex}"), 3)
    parts = list(opened(path, *args, **recipe).parts(work))
    found = [example for part in parts for example in opened(path, *args, **recipe).examples(part, work)]
    assert len({example.example_id for example in found}) == len(found)
    return {example.example_id: example for example in found}


def test_images_have_the_labels_of_the_kit(folder):
    found = listed(folder)
    wnids = {number: wnid for number, wnid, _, _ in SYNSETS}
    for i, number in enumerate(TRUTH, 1):
        example = found[f"ILSVRC2012_img_val.tar!ILSVRC2012_val_{i:08d}.JPEG"]
        assert (example.labels, example.split, example.data) == ((wnids[number],), "test", f"val {i}".encode())
    train = {i: e for i, e in found.items() if "img_train" in i}
    assert len(train) == 120
    assert train["ILSVRC2012_img_train.tar!n01440764.tar!n01440764_7.JPEG"].labels == ("n01440764",)
    for e in found.values():
        assert open_store(e.base).read(e.key, e.offset, e.offset + e.length) == e.data
    assert {e.refused for e in found.values()} == {None}


def test_the_validation_images_are_val_or_test(folder):
    as_test = listed(folder, "test", val_fraction=0.3, test_fraction=0.3)
    assert {e.split for i, e in as_test.items() if "img_val" in i} == {"test"}
    assert {e.split for i, e in as_test.items() if "img_train" in i} == {"train", "val"}
    as_val = listed(folder, "val", val_fraction=0.3, test_fraction=0.3)
    assert {e.split for i, e in as_val.items() if "img_val" in i} == {"val"}
    assert {e.split for i, e in as_val.items() if "img_train" in i} == {"train"}


def test_classes_have_names_and_a_hierarchy(folder):
    setter = opened(folder).class_info("n02100735")
    assert (setter.name, setter.parents) == ("English setter", ("n00001740", "n02075296"))
    assert opened(folder).class_info("n01440764").parents == ("n00001740",)
    assert opened(folder).class_info("n99999999").name == "n99999999"


def test_unexpected_members_are_refused(folder, ilsvrc):
    files = {
        "ILSVRC2012_val_00000099.JPEG": b"x",
        "other.JPEG": b"x",
        "readme.txt": b"x",
        "ILSVRC2012_val_00000001.JPEG": b"1",
    }
    (folder / "ILSVRC2012_img_val.tar").write_bytes(ilsvrc.tar_of(files)[:4200])
    (folder / "ILSVRC2012_img_train.tar").write_bytes(
        ilsvrc.tar_of({"n1.tar": b"", "n00000001.tar": ilsvrc.tar_of({"a.JPEG": b"a"})})
    )
    found = listed(folder)
    assert {i.split("!", 1)[1].split(" ")[0]: e.refused and e.refused[0] for i, e in found.items()} == {
        "ILSVRC2012_val_00000099.JPEG": "no_label",
        "other.JPEG": "no_label",
        "readme.txt": "ignored_file",
        "ILSVRC2012_val_00000001.JPEG": None,
        "(damaged": "uncounted_loss",
        "n1.tar": "no_label",
        "n00000001.tar!a.JPEG": None,
    }


def test_files_that_are_missing_or_wrong_are_errors(folder, ilsvrc):
    def kit(**changed):
        return ilsvrc.kit(SYNSETS, TRUTH, **changed)

    with pytest.raises(
        ValueError, match=r"lacks ILSVRC2012_devkit.*, ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar"
    ):
        opened(folder / "elsewhere").fingerprint()
    for content, message in (
        (kit(truth=b"1\n2\nthree\n"), "line 3 of .* is 'three'"),
        (kit(truth=b"1\n7\n"), "line 2 of .* is '7'"),
        (kit(truth=b"1\n\n2\n"), "line 3 of"),
        (kit(truth=b"\n"), "has no labels"),
        (kit(meta=b"MATLAB 7.3"), "not a MATLAB 5 file"),
        (kit(meta=ilsvrc.meta(SYNSETS)[:-40]), "damaged MATLAB file"),
        (kit(meta=ilsvrc.meta([*SYNSETS, SYNSETS[0]])), "a synset twice"),
        (
            ilsvrc.tar_of({"data/meta.mat": ilsvrc.meta(SYNSETS)}, "w:gz"),
            "lacks data/ILSVRC2012_validation_ground_truth.txt",
        ),
    ):
        (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            listed(folder)


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_files_are_read_as_scipy_wrote_them(compressed):
    values = {
        "doubles": np.arange(6.0).reshape(2, 3),
        "bytes": np.array([[1, 2, 255]], np.uint8),
        "long": np.array([[-(2**40)]], np.int64),
        "text": "déjà vu",
        "cells": np.array([["one", np.array([[2.0]])]], dtype=object),
        "struct": {"a": 1.5, "inside": {"b": "deep"}},
    }
    out = io.BytesIO()
    scipy.io.savemat(out, values, do_compression=compressed)
    found = read_mat(out.getvalue())
    assert found["doubles"].tolist() == [0, 3, 1, 4, 2, 5]  # column by column
    assert found["bytes"].tolist() == [1, 2, 255]
    assert found["long"].tolist() == [-(2**40)]
    assert found["text"] == "déjà vu"
    assert (found["cells"][0], found["cells"][1].tolist()) == ("one", [2.0])
    assert found["struct"][0]["a"].tolist() == [1.5]
    assert found["struct"][0]["inside"] == [{"b": "deep"}]


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.booleans(), st.integers(0, 10**9), st.integers(1, 8))
def test_damaged_matlab_files_raise_one_error(ilsvrc, compressed, seed, num_flips):
    data, chance = bytearray(ilsvrc.meta(SYNSETS, compressed)), random.Random(seed)
    for _ in range(num_flips):
        data[chance.randrange(len(data))] = chance.randrange(256)
    with contextlib.suppress(ValueError):
        read_mat(bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]))
