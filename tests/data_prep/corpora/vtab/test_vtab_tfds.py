"""Tasks from directories written by TFDS: their order equals the one computed from keys, their features give the classes."""

import io

import numpy as np
import pytest

from vitline.data_prep.benchmarks.registry import NUM_CLASSES
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.vit.evaluation.tasks import VTAB_TASKS

NUM_TEST = 30


@pytest.fixture
def clevr(tmp_path, set_splits, mini):
    """A directory of the form of CLEVR's, of 1,150 + 30 scenes, and the depths of the objects of each scene by key."""
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    set_splits("clevr", mini.train_and_test(NUM_TEST, "validation"))
    rng = np.random.default_rng(0)
    scenes = {
        split: {f"CLEVR_{name}_{i:06d}.png": rng.uniform(7, 11, rng.integers(3, 11)) for i in range(count)}
        for split, name, count in (("train", "train", mini.num_train + mini.num_val), ("validation", "val", NUM_TEST))
    }

    class Clevr(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("3.1.0")
        url_infos = None

        def _info(self):
            f = tfds.features
            objects = f.Sequence({"pixel_coords": f.Tensor(shape=(3,), dtype=np.float32)})
            return tfds.core.DatasetInfo(
                builder=self, features=f.FeaturesDict({"image": f.Image(), "objects": objects})
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in scenes}

        def _generate_examples(self, split):
            for number, (key, depths) in enumerate(scenes[split].items()):
                objects = [{"pixel_coords": np.array([1, 2, depth], np.float32)} for depth in depths]
                yield key, {"image": io.BytesIO(mini.picture(number)), "objects": objects}

    Clevr(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    return tmp_path / "clevr/3.1.0", scenes


@pytest.mark.slow
def test_order_and_classes_equal_those_computed_from_keys(clevr, prepared, mini):
    folder, scenes = clevr
    manifest, _, rows = prepared("clevr_count", folder)
    keys = list(scenes["train"])
    order = tfds_order("train", keys)
    assert [row[2] for row in rows["trainval"]] == [mini.picture(i) for i in order]
    assert [row[1] for row in rows["trainval"]] == [len(scenes["train"][keys[i]]) - 3 for i in order]
    assert [row[0] for row in rows["train800"]] == [f"train/{i:08d}" for i in range(800)]
    assert [row[0] for row in rows["val200"]] == [f"train/{mini.num_train + i:08d}" for i in range(200)]
    assert len(rows["test"]) == NUM_TEST
    assert manifest.num_classes == 8
    distances, _, rows = prepared("clevr_distance", folder)
    nearest = [np.float32(min(scenes["train"][keys[i]])) for i in order]
    assert [row[1] for row in rows["trainval"]] == [sum(d > t for t in (8.0, 8.5, 9.0, 9.5, 10.0)) for d in nearest]
    assert distances.digest != manifest.digest


def test_another_version_is_refused(clevr, set_splits, mini, prepared):
    set_splits("clevr", mini.train_and_test(NUM_TEST + 1, "validation"))
    with pytest.raises(ValueError, match="has 30 examples of validation, but clevr_count expects 31"):
        prepared("clevr_count", clevr[0])


def test_the_number_of_classes_is_that_of_the_benchmark():
    assert {task.name: task.num_classes for task in VTAB_TASKS} | {"cifar10": 10} == NUM_CLASSES
