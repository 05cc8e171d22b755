"""Data sets with listed splits, and the archive of class folders that is a RAR."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.infra.storage import open_store

from ....tars import tar_of

NUM_TEST = 30


def in_order(split, keys):
    return [f"{split}/{keys[i]}" for i in tfds_order(split, keys)]


def by_id(rows):
    return {row[0]: row for split in ("train", "val", "test") for row in rows[split]}


@pytest.fixture
def dtd(tmp_path, set_splits, mini):
    """Members of a DTD with 900 + 250 + 30 listed images of three classes, and one image that is in no list of fold 1."""
    set_splits("dtd", mini.three_splits(NUM_TEST))
    total = mini.num_train + mini.num_val + NUM_TEST
    names = ["zigzagged", "banded", "meshed"]
    keys = [f"{names[i % 3]}/{names[i % 3]}_{i:04d}.jpg" for i in range(total)]
    members = {f"dtd/images/{key}": mini.picture(i, kind="JPEG") for i, key in enumerate(keys)}
    members["dtd/images/banded/banded_9999.jpg"] = mini.picture(9999, kind="JPEG")
    ends = {"train1": mini.num_train, "val1": mini.num_train + mini.num_val, "test1": total}
    splits, start = {}, 0
    for name, end in ends.items():
        splits[name], start = keys[start:end], end
        members[f"dtd/labels/{name}.txt"] = "".join(f"{key}\n" for key in splits[name]).encode()
    members["dtd/labels/train2.txt"] = b"banded/banded_9999.jpg\n"
    return members, splits


@pytest.mark.slow
def test_dtd_is_split_by_the_lists_of_its_first_fold_and_keeps_bytes(tmp_path, dtd, prepared):
    members, splits = dtd
    (tmp_path / "dtd-r1.0.1.tar.gz").write_bytes(tar_of(members, "w:gz"))
    manifest, _, rows = prepared("dtd", tmp_path)
    assert [row[0] for row in rows["train"]] == in_order("train", splits["train1"])
    assert [row[0] for row in rows["val"]] == in_order("validation", splits["val1"])
    assert [row[0] for row in rows["test"]] == in_order("test", splits["test1"])
    assert by_id(rows)["train/zigzagged/zigzagged_0003.jpg"][1:] == (
        2,
        members["dtd/images/zigzagged/zigzagged_0003.jpg"],
    )
    assert manifest.num_classes == 3
    for name, data in members.items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    unpacked, *_ = prepared("dtd", tmp_path / "unpacked")
    assert unpacked.digest == manifest.digest


def test_a_list_with_missing_or_repeated_images_is_refused(tmp_path, dtd, prepared):
    members, splits = dtd
    lists = dict(members)
    del lists["dtd/labels/val1.txt"]
    (tmp_path / "dtd-r1.0.1.tar.gz").write_bytes(tar_of(lists, "w:gz"))
    with pytest.raises(ValueError, match=r"lacks labels/val1\.txt.*robots\.ox\.ac\.uk"):
        prepared("dtd", tmp_path)
    (tmp_path / "dtd-r1.0.1.tar.gz").write_bytes(
        tar_of(members | {"dtd/labels/val1.txt": f"{splits['train1'][0]}\n".encode()}, "w:gz")
    )
    with pytest.raises(ValueError, match=r"contain zigzagged/zigzagged_0000\.jpg twice, in train and validation"):
        prepared("dtd", tmp_path)


@pytest.fixture
def flowers(tmp_path, set_splits, mini):
    """Flowers with image n of class n % 102 + 1; test are the first images, val the last: (folder, bytes by number)."""
    set_splits("flowers102", mini.three_splits(NUM_TEST))
    total = mini.num_train + mini.num_val + NUM_TEST
    images = {n: mini.picture(n, kind="JPEG") for n in range(1, total + 1)}
    (tmp_path / "102flowers.tgz").write_bytes(
        tar_of({f"jpg/image_{n:05d}.jpg": data for n, data in images.items()}, "w:gz")
    )
    labels = np.array([[n % 102 + 1 for n in images]], np.uint8)
    savemat(tmp_path / "imagelabels.mat", {"labels": labels}, do_compression=True)
    numbers = np.arange(1, total + 1, dtype=np.uint16)[None]
    first_val = NUM_TEST + mini.num_train
    sets = {"tstid": numbers[:, :NUM_TEST], "trnid": numbers[:, NUM_TEST:first_val], "valid": numbers[:, first_val:]}
    savemat(tmp_path / "setid.mat", sets, do_compression=True)
    return tmp_path, images


@pytest.mark.slow
def test_flowers_are_numbered_from_one_and_split_by_setid(flowers, prepared, mini):
    folder, images = flowers
    manifest, _, rows = prepared("flowers102", folder)
    keys = [f"image_{n:05d}.jpg" for n in range(NUM_TEST + 1, NUM_TEST + 1 + mini.num_train)]
    assert [row[0] for row in rows["train"]] == in_order("train", keys)
    every = by_id(rows)
    assert every["test/image_00001.jpg"][1:] == (1, images[1])  # labels[0] is 2
    assert every["train/image_00102.jpg"][1:] == (0, images[102])
    assert every["validation/image_01121.jpg"][1] == 101  # 1121 % 102 = 101, stored as 102
    assert manifest.num_classes == 102


def test_labels_outside_of_the_flowers_are_refused(flowers, prepared):
    folder, _ = flowers
    savemat(folder / "imagelabels.mat", {"labels": np.array([[103]], np.uint8)})
    with pytest.raises(ValueError, match=r"labels of imagelabels\.mat has numbers outside of 1 to 102"):
        prepared("flowers102", folder)
    (folder / "imagelabels.mat").write_bytes(b"<html>moved</html>" * 20)
    with pytest.raises(ValueError, match=r"imagelabels\.mat is not a MATLAB 5 file"):
        prepared("flowers102", folder)


def test_flower_classes_have_the_names_of_tfds(flowers):
    spec = importlib.util.find_spec("tensorflow_datasets")
    if spec is None:
        pytest.skip("tensorflow-datasets is not installed")
    code = Path(spec.submodule_search_locations[0], "datasets/oxford_flowers102/oxford_flowers102_dataset_builder.py")
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(code.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_NAMES"
    )
    data = open_data("flowers102", open_store(flowers[0]), 1 << 20)
    assert [*data.class_names()] == [name.rstrip("?") for name in names]


@pytest.mark.slow
def test_pets_have_class_numbers_and_names_from_their_files(tmp_path, set_splits, mini, prepared):
    set_splits("pets", mini.train_and_test(NUM_TEST))
    breeds = ["Abyssinian", "american_bulldog", "Bengal"]  # by number; by their letters Bengal would be second
    trainval = [(f"{breeds[i % 3]}_{i}", i % 3 + 1) for i in range(mini.num_train + mini.num_val)]
    test = [(f"{breeds[i % 3]}_{i}", i % 3 + 1) for i in range(5000, 5000 + NUM_TEST)]
    kinds = {f"{breeds[1]}_1": "GIF", f"{breeds[2]}_2": "PNG"}
    pictures = {name: mini.picture(i, kind=kinds.get(name, "JPEG")) for i, (name, _) in enumerate([*trainval, *test])}
    members = {f"images/{name}.jpg": data for name, data in pictures.items()}
    unlisted = {"images/Abyssinian_100.mat": b"MATLAB 5.0", "images/Abyssinian_9999.jpg": mini.picture(9999)}
    (tmp_path / "images.tar.gz").write_bytes(tar_of(members | unlisted, "w:gz"))
    lists = {
        "annotations/list.txt": b"#Image CLASS-ID SPECIES BREED ID\n",
        "annotations/trainval.txt": "".join(f"{name} {number} 1 1\n" for name, number in trainval).encode(),
        "annotations/test.txt": "".join(f"{name} {number} 2 1\n" for name, number in test).encode(),
    }
    (tmp_path / "annotations.tar.gz").write_bytes(tar_of(lists, "w:gz"))
    _, _, rows = prepared("pets", tmp_path)
    keys = [f"{name}.jpg" for name, _ in trainval]
    assert [row[0] for row in rows["trainval"]] == in_order("train", keys)
    every = by_id(rows)
    assert len(every) == len(trainval) + NUM_TEST
    assert every["train/american_bulldog_1.jpg"][1:] == (1, pictures["american_bulldog_1"])
    assert every["train/Bengal_2.jpg"][1:] == (2, pictures["Bengal_2"])
    assert [*open_data("pets", open_store(tmp_path), 1 << 20).class_names()] == breeds
    lists["annotations/test.txt"] = b"Abyssinian_5000\n"
    (tmp_path / "annotations.tar.gz").write_bytes(tar_of(lists, "w:gz"))
    with pytest.raises(
        ValueError, match=r"test\.txt has the line 'Abyssinian_5000'; expected lines such as Abyssinian_100 1 1 1"
    ):
        prepared("pets", tmp_path)


@pytest.mark.slow
def test_resisc45_is_read_from_a_tar_and_its_rar_is_refused_with_a_command(tmp_path, set_splits, mini, prepared):
    set_splits("resisc45", mini.one_split(1200))
    (tmp_path / "NWPU-RESISC45.rar").write_bytes(b"Rar!\x1a\x07\x00")
    with pytest.raises(ValueError, match=r"RAR.*bsdtar -cf NWPU-RESISC45\.tar @NWPU-RESISC45\.rar"):
        prepared("resisc45", tmp_path)
    names = ["wetland", "airplane"]
    pictures = {
        f"NWPU-RESISC45/{names[i % 2]}/{names[i % 2]}_{i:03d}.jpg": mini.picture(i, kind="JPEG") for i in range(1200)
    }
    (tmp_path / "NWPU-RESISC45.tar").write_bytes(tar_of(pictures))
    _, _, rows = prepared("resisc45", tmp_path)
    row = by_id(rows)["train/airplane_airplane_007.jpg"]
    assert row[1:] == (0, pictures["NWPU-RESISC45/airplane/airplane_007.jpg"])
