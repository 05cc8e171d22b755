"""CIFAR, Pets and Flowers with the paper's official splits, read by VTAB's readers."""

import io

import numpy as np
import pytest
from scipy.io import savemat

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.official_splits import cut
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS

NUM_TRAIN, NUM_VAL, NUM_TEST = 44, 6, 9


@pytest.fixture
def set_splits(monkeypatch):
    """Replaces the official splits of a data set by miniature ones until the test ends."""

    def change(name):
        monkeypatch.setitem(OFFICIAL_SPLITS, name, cut(NUM_TRAIN, NUM_TRAIN + NUM_VAL, NUM_TEST))

    return change


def in_order(split, keys):
    return [f"{split}/{keys[i]}" for i in tfds_order(split, keys)]


def test_cifar10_keys_count_through_the_batches_and_records_have_one_label_byte(tmp_path, set_splits, prepared, ilsvrc):
    set_splits("cifar10")
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (NUM_TRAIN + NUM_VAL + NUM_TEST, 1 + 3072), dtype=np.uint8)
    records[:, 0] %= 10
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    members = dict(zip(names, np.split(records, [10, 20, 30, 40, 50]), strict=True))
    order = ["data_batch_3.bin", "test_batch.bin", *(name for name in names if name[-5] in "1245")]
    files = {f"cifar-10-batches-bin/{name}": members[name].tobytes() for name in order}
    files["cifar-10-batches-bin/batches.meta.txt"] = b"".join(b"class %d\n" % i for i in range(10)) + b"\n"
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(ilsvrc.tar_of(files, "w:gz"))

    manifest, _, rows = prepared("cifar10", tmp_path)
    ids = in_order("train", range(NUM_TRAIN + NUM_VAL))
    found = {split: [row[0] for row in part] for split, part in rows.items()}
    test = in_order("test", range(NUM_TEST))
    assert found == {"train": ids[:NUM_TRAIN], "val": ids[NUM_TRAIN:], "trainval": ids, "test": test}
    pictures = {row[0]: row[1:] for part in ("trainval", "test") for row in rows[part]}
    for example_id, record in (("train/37", records[37]), ("test/4", records[NUM_TRAIN + NUM_VAL + 4])):
        pixels = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
        assert pictures[example_id] == (record[0], lossless_png(pixels))
    assert manifest.num_classes == 10


def test_flowers_leaves_out_the_validation_images_of_tfds(tmp_path, set_splits, prepared, ilsvrc, noise):
    set_splits("flowers102")
    total, first_val = NUM_TRAIN + NUM_VAL + NUM_TEST + 5, NUM_TRAIN + NUM_VAL
    images = {f"jpg/image_{i:05d}.jpg": noise(i) for i in range(1, total + 1)}
    (tmp_path / "102flowers.tgz").write_bytes(ilsvrc.tar_of(images, "w:gz"))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.arange(1, total + 1)[None] % 102 + 1})
    numbers = np.arange(1, total + 1)[None]
    sets = {"trnid": numbers[:, :first_val], "valid": numbers[:, first_val : first_val + 5]}
    savemat(tmp_path / "setid.mat", sets | {"tstid": numbers[:, first_val + 5 :]})
    manifest, _, rows = prepared("flowers102", tmp_path)
    names = [f"image_{i:05d}.jpg" for i in range(1, total + 1)]
    assert [row[0] for row in rows["trainval"]] == in_order("train", names[:first_val])
    assert [row[0] for row in rows["test"]] == in_order("test", names[first_val + 5 :])
    assert manifest.counts.num_accepted == NUM_TRAIN + NUM_VAL + NUM_TEST


def test_a_tfds_directory_gives_the_same_images_in_the_same_order(tmp_path, set_splits, prepared, noise):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    set_splits("pets")
    counts = {"train": NUM_TRAIN + NUM_VAL, "test": NUM_TEST}

    class OxfordIiitPet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("4.0.0")
        url_infos = None

        def _info(self):
            f = tfds.features
            features = f.FeaturesDict({"image": f.Image(), "label": f.ClassLabel(num_classes=37)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in counts}

        def _generate_examples(self, split):
            for i in range(counts[split]):
                yield f"Beagle_{i}.jpg", {"image": io.BytesIO(noise(i)), "label": i % 37}

    OxfordIiitPet(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    manifest, _, rows = prepared("pets", tmp_path / "oxford_iiit_pet/4.0.0")
    order = tfds_order("train", [f"Beagle_{i}.jpg" for i in range(counts["train"])])
    assert [row[1:] for row in rows["trainval"]] == [(i % 37, noise(i)) for i in order]
    assert [len(rows[split]) for split in ("train", "val", "test")] == [NUM_TRAIN, NUM_VAL, NUM_TEST]
    assert manifest.num_classes == 37
