"""A VTAB task as a corpus: its examples and their order, and the error if one is missing."""

import zipfile

import numpy as np
import pytest

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS
from vitline.data_prep.benchmarks.registry import data_set_of, official_files_of, open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.config import CorpusConfig, Vtab
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.storage import open_store
from vitline.vit.evaluation.tasks import VTAB_TASKS, find_task_splits

from ....tars import tar_of

NUM_TEST = 40


@pytest.fixture
def cifar(tmp_path, set_splits, mini):
    """CIFAR-100 with 1,150 + 40 images, of which two are equal: (folder, records of each split)."""
    set_splits("cifar100", mini.train_and_test(NUM_TEST))
    rng = np.random.default_rng(0)
    records = {
        split: rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        for split, count in (("train", mini.num_train + mini.num_val), ("test", NUM_TEST))
    }
    for rows in records.values():
        rows[:, 0], rows[:, 1] = rows[:, 0] % 20, rows[:, 1] % 100
    records["test"][3, 2:] = records["train"][5, 2:]
    folder = tmp_path / "cifar100"
    folder.mkdir()
    members = {f"cifar-100-binary/{split}.bin": rows.tobytes() for split, rows in records.items()}
    members["cifar-100-binary/fine_label_names.txt"] = "".join(f"class {i}\n" for i in range(100)).encode()
    (folder / "cifar-100-binary.tar.gz").write_bytes(tar_of(members, "w:gz"))
    return folder, records


def eurosat(path, mini, count=1200):
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(count):
            name = ("Forest", "River", "SeaLake")[i % 3]
            archive.writestr(f"2750/{name}/{name}_{i // 3 + 1}.jpg", mini.picture(i, kind="JPEG"))


def test_rows_are_in_tfds_order_and_vtab_1k_is_the_first_rows(cifar, prepared, mini):
    folder, records = cifar
    manifest, corpus, rows = prepared("cifar100", folder, min_row_groups=256)
    order = tfds_order("train", range(len(records["train"])))
    ids = [f"train/{key}" for key in order]
    found = {split: [row[0] for row in part] for split, part in rows.items()}
    assert found["train"] == ids[: mini.num_train]
    assert found["val"] == ids[mini.num_train :]
    assert found["train800"] == ids[:800]
    assert found["val200"] == ids[mini.num_train : mini.num_train + 200]
    assert found["train800val200"] == found["train800"] + found["val200"]
    assert found["trainval"] == ids
    assert found["test"] == [f"test/{key}" for key in tfds_order("test", range(NUM_TEST))]  # equal images are kept, too
    key = order[0]
    pixels = records["train"][key, 2:].reshape(3, 32, 32).transpose(1, 2, 0)
    assert rows["train"][0] == (f"train/{key}", records["train"][key, 1], lossless_png(pixels))
    assert manifest.splits["train800"].rows_per_row_group == 800 // 256  # set by the smallest training split
    assert (manifest.num_classes, manifest.counts.num_accepted) == (100, len(ids) + NUM_TEST)
    assert find_task_splits(manifest.splits, "here").joined == "train800val200"
    assert not verify_corpus(corpus).problems
    assert "consists of the first 800 of train + the first 200 of val" in corpus.read("report.html").decode()


@pytest.mark.slow
def test_an_archive_of_class_folders_keeps_its_bytes_and_lists_classes_by_name(tmp_path, set_splits, mini, prepared):
    set_splits("eurosat", mini.one_split(1200))
    eurosat(tmp_path / "EuroSAT.zip", mini)
    manifest, _, rows = prepared("eurosat", tmp_path)
    every = {row[0]: row for split in ("train", "val", "test") for row in rows[split]}
    keys = [f"{name}_{name}_{i}.jpg" for name in ("Forest", "River", "SeaLake") for i in range(1, 401)]
    assert [row[0] for row in rows["trainval"]] == [f"train/{keys[i]}" for i in tfds_order("train", keys)][:1150]
    assert every["train/River_River_2.jpg"] == ("train/River_River_2.jpg", 1, mini.picture(4, kind="JPEG"))
    assert manifest.num_classes == 3
    (tmp_path / "unpacked").mkdir()
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    unpacked, *_ = prepared("eurosat", tmp_path / "unpacked")
    assert unpacked.digest == manifest.digest


def test_error_of_a_missing_file_names_its_origin(tmp_path, prepared):
    with pytest.raises(ValueError, match=r"EuroSAT.* lacks EuroSAT.zip, 94,280,567 bytes .*phelber/EuroSAT"):
        prepared("eurosat", tmp_path)


def test_an_incomplete_benchmark_is_not_published(tmp_path, set_splits, mini, prepared):
    set_splits("eurosat", mini.one_split(1201))
    eurosat(tmp_path / "EuroSAT.zip", mini)
    with pytest.raises(
        ValueError, match=r"has 1,200 examples of train, but 1,201 are expected\. EuroSAT.zip has .* bytes"
    ):
        prepared("eurosat", tmp_path)
    set_splits("eurosat", mini.one_split(1200))
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["2750/River/River_7.jpg"] = members["2750/River/River_7.jpg"][:200]
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=r"1 of 1,200 images are refused.*train/River_River_7\.jpg"):
        prepared("eurosat", tmp_path)


@pytest.mark.slow
def test_adding_a_benchmark_to_a_corpus_is_refused(cifar, prepared, tmp_path):
    manifest, *_ = prepared("cifar100", cifar[0])
    there = f"{manifest.name}/{manifest.version}"
    source = Vtab(task="cifar100", path=str(cifar[0]))
    with pytest.raises(ValueError, match="a benchmark is prepared as published"):
        prepare([CorpusConfig(name=manifest.name, source=source, add_to=there)], str(tmp_path / "prepared"))


def test_every_task_has_a_reader_of_its_data_set():
    for task in VTAB_TASKS:
        assert data_set_of(task.name) in OFFICIAL_SPLITS
        assert open_data(task.name, open_store("memory://nothing"), 1 << 20).official == official_files_of(task.name)
