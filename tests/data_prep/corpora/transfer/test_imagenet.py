"""ImageNet as the paper uses it, and the two test sets of the same classes."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from vitline.data_prep.benchmarks.registry import open_task
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.transfer.imagenet_real import label_lists
from vitline.data_prep.benchmarks.transfer.transfer_splits import TEST_SETS
from vitline.data_prep.config import CorpusRecipe, Transfer
from vitline.vit.evaluation.tasks import find_task_splits

WNIDS = [f"n{1000 + 17 * i:08d}" for i in range(12)]
VALIDATION = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 27)]
# Empty lists, and one of three labels: image 1 has none, image 2 has three, ...
REAL = [[], [11, 2, 10], [2], [3, 0], [], *([i % 12] for i in range(5, 26))]


def in_order(split, keys):
    return [f"{split}/{keys[i]}" for i in tfds_order(split, keys)]


@pytest.fixture
def v2(imagenet, ilsvrc, noise, monkeypatch):
    """ImageNetV2 beside ImageNet, two images of each class: their bytes by path."""
    monkeypatch.setitem(TEST_SETS, "imagenet-v2", 24)
    files = {f"{number}/{i:04x}.jpeg": noise(200, number, i) for number in range(12) for i in range(2)}
    pack_v2(imagenet, ilsvrc, files, "w:gz")
    return files


def pack_v2(folder, ilsvrc, files, mode):
    members = {f"imagenetv2-matched-frequency-format-val/{path}": data for path, data in files.items()}
    members["imagenetv2-matched-frequency-format-val/README.txt"] = b"ten of each"
    (folder / "imagenetv2-matched-frequency.tar.gz").write_bytes(ilsvrc.tar_of(members, mode))


def test_val_is_the_end_of_train_in_the_order_of_tfds(imagenet, prepared):
    manifest, _, rows = prepared("imagenet", imagenet)
    train = in_order("train", [f"{wnid}_{i}.JPEG" for wnid in WNIDS for i in range(5)])
    found = {split: [row[0] for row in part] for split, part in rows.items()}
    assert found == {
        "train": train[:54],
        "val": train[54:],
        "trainval": train,
        "test": in_order("validation", VALIDATION),
    }
    assert find_task_splits(manifest.splits, "here").joined == "trainval"
    labels = {row[0]: row[1] for part in ("trainval", "test") for row in rows[part]}
    assert labels[f"train/{WNIDS[10]}_3.JPEG"] == 10
    assert labels["validation/ILSVRC2012_val_00000012.JPEG"] == 11
    assert labels["validation/ILSVRC2012_val_00000013.JPEG"] == 0


def test_the_three_test_sets_share_one_class_map(imagenet, v2, prepared, published):
    (imagenet / "real.json").write_text(json.dumps(REAL, indent=1))  # other white space, but the same labels
    published(json.dumps(REAL), 24)
    whole, *_ = prepared("imagenet", imagenet)
    real, _, real_rows = prepared("imagenet-real", imagenet)
    second, _, v2_rows = prepared("imagenet-v2", imagenet)
    assert whole.class_map_digest == real.class_map_digest == second.class_map_digest
    assert set(real.splits) == set(second.splits) == {"test"}

    assert (real.single_label, real.counts.refused) == (False, {"ignored_file": 2})
    expected = {f"validation/{name}": sorted(labels) for name, labels in zip(VALIDATION, REAL, strict=True) if labels}
    assert {row[0]: sorted(row[1]) for row in real_rows["test"]} == expected
    assert [row[0] for row in real_rows["test"]] == [i for i in in_order("validation", VALIDATION) if i in expected]

    keys = {f"test/{path.replace('/', '_')}": (int(path.split("/")[0]), data) for path, data in v2.items()}
    assert {row[0]: row[1:] for row in v2_rows["test"]} == keys
    assert [row[0] for row in v2_rows["test"]] == in_order("test", [key.partition("/")[2] for key in keys])


@pytest.mark.parametrize("form", ["w", "folder"])
def test_v2_is_read_from_archives_and_folders(imagenet, v2, prepared, ilsvrc, form):
    packed, *_ = prepared("imagenet-v2", imagenet)
    (imagenet / "imagenetv2-matched-frequency.tar.gz").unlink()
    if form == "w":
        pack_v2(imagenet, ilsvrc, v2, form)
    else:
        for path, data in v2.items():
            target = imagenet / "imagenetv2-matched-frequency-format-val" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    again, *_ = prepared("imagenet-v2", imagenet)
    assert again.digest == packed.digest


def test_v2_of_other_classes_or_with_fewer_images_is_refused(imagenet, v2, prepared, ilsvrc, noise, monkeypatch):
    monkeypatch.setitem(TEST_SETS, "imagenet-v2", 25)
    with pytest.raises(ValueError, match="found 24 examples of test, but the benchmark has 25"):
        prepared("imagenet-v2", imagenet)
    pack_v2(imagenet, ilsvrc, {"12/a.jpeg": noise(1)}, "w:gz")
    with pytest.raises(ValueError, match=r"test/12_a\.jpeg: no_label \(folder 12 is none of the 12 classes\)"):
        prepared("imagenet-v2", imagenet)


def changed(**entries):
    return json.dumps([entries.get(f"image{i}", labels) for i, labels in enumerate(REAL, 1)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(REAL[:-1]), "are not the published ones"),
        ("{}", "are not the published ones"),
        (changed(image3=[4]), "are not the published ones"),
        ("[[", "Expecting value"),
        ("[" * 200_000, "recursion"),
    ],
)
def test_labels_that_are_not_those_of_real_are_refused(imagenet, prepared, published, text, message):
    published(json.dumps(REAL), 24)
    (imagenet / "real.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"real\.json: .*{message}.*Download it again from https://github.com/google-research"
    ):
        prepared("imagenet-real", imagenet)


def test_published_labels_of_real_are_accepted():
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("timm, which has a copy of real.json, is not installed")
    data = Path(spec.submodule_search_locations[0], "data/_info/imagenet_real_labels.json").read_bytes()
    lists = label_lists(data)
    assert lists[:4] == [[], [970, 795], [230, 231], [809]]
    assert sum(map(bool, lists)) == TEST_SETS["imagenet-real"]


def test_incomplete_archives_are_refused_before_an_image_is_read(imagenet, prepared, ilsvrc, tmp_path):
    train, val = imagenet / "ILSVRC2012_img_train.tar", imagenet / "ILSVRC2012_img_val.tar"
    whole = train.read_bytes(), val.read_bytes()
    train.write_bytes(ilsvrc.tar_of({"n00001000.tar": ilsvrc.tar_of({"n00001000_1.JPEG": b"x", "readme.txt": b"x"})}))
    with pytest.raises(
        ValueError,
        match=r"has 1 training images, but 60 are expected\. ILSVRC2012_img_train.tar has .* the official file has 147,897,477,120.*"
        r"Download its files again from https://image-net.org",
    ):
        prepared("imagenet", imagenet)
    train.write_bytes(ilsvrc.tar_of({"n00001000.tar": ilsvrc.tar_of({"n00001000_1.JPEG": bytes(5000)})[:3000]}))
    with pytest.raises(ValueError, match=r"ILSVRC2012_img_train\.tar: .*claims 5,000 bytes"):
        prepared("imagenet", imagenet)
    train.write_bytes(whole[0])
    val.write_bytes(ilsvrc.tar_of({VALIDATION[0]: b"x"}))
    with pytest.raises(
        ValueError, match=r"has 1 validation images and .*devkit_t12\.tar\.gz 26 labels, but 26 are expected"
    ):
        prepared("imagenet", imagenet)


def test_kit_with_other_classes_is_refused(imagenet, ilsvrc, prepared):
    kit = ilsvrc.kit([(1, "n00001000", "one", []), (2, "n00001017", "two", [])], [1] * 26)
    (imagenet / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(kit)
    with pytest.raises(ValueError, match=r"has 2 classes, .*expected the 12 classes of ILSVRC2012"):
        prepared("imagenet", imagenet)


def test_error_of_missing_files_names_their_origin(imagenet, tmp_path):
    def opened(task, folder):
        return open_task(Transfer(task=task, path=str(folder)), CorpusRecipe())

    with pytest.raises(ValueError, match=r"ImageNet ReaL: .* lacks real\.json, 388,478 bytes\..*reassessed-imagenet"):
        opened("imagenet-real", imagenet).fingerprint()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(imagenet / "ILSVRC2012_devkit_t12.tar.gz", alone)
    with pytest.raises(ValueError, match=r"lacks ILSVRC2012_img_train\.tar, 147,.*; ILSVRC2012_img_val\.tar, 6,7"):
        opened("imagenet", alone).fingerprint()
    with pytest.raises(ValueError, match=r"ImageNetV2 .*\(or imagenetv2-matched-frequency\.tar, .*vaishaal/ImageNetV2"):
        opened("imagenet-v2", alone).fingerprint()
