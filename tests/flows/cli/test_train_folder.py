"""The recipe of `vitline train-folder`: a function of the number of pictures, valid for every number."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo
from vitline.flows.cli.train_folder import estimate
from vitline.vit.input.order import Order
from vitline.vit.recipes.own_images import TIERS, own_images


def manifest_of(num_train, *, with_val=True, single_label=True, image_bytes=30_000) -> Manifest:
    """The manifest of `num_train` prepared pictures: at least 256 row groups if there are enough rows, of at most about 8 MiB."""
    rows = max(1, min(num_train // 256, 8 * 2**20 // image_bytes))
    segment = SegmentInfo(split="train", name="s000", num_rows=num_train, num_shards=1)
    split = SplitInfo(
        num_rows=num_train, rows_per_row_group=rows, row_groups_per_shard=10**6, segments=(segment,), digest="d"
    )
    return Manifest(
        name="birds",
        version="1",
        digest="0" * 64,
        class_map_digest="c",
        num_classes=5,
        single_label=single_label,
        order_seed=0,
        splits={"train": split, **({"val": split} if with_val else {})},
        decode_policy=DecodePolicy(),
        counts=Counts(
            num_found=num_train, num_accepted=num_train, num_refused=0, num_bytes=num_train * image_bytes, refused={}
        ),
        provenance={},
    )


def config_of(num_train, num_workers=2, **changes):
    total_steps = changes.pop("total_steps", None)
    manifest = manifest_of(num_train, **changes)
    return own_images("birds", "corpora/birds/1", manifest, num_workers=num_workers, total_steps=total_steps)


@given(st.one_of(st.integers(1, 5_000), st.integers(1, 10_000_000)), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_every_number_of_pictures_has_a_valid_recipe(num_train, num_workers):
    config = config_of(num_train, num_workers)
    data = config.recipe.input
    assert data.global_batch_size % data.num_lanes == 0
    assert 1 <= config.execution.num_workers <= min(num_workers, data.num_lanes)
    Order(  # raises if a lane would be empty
        manifest_of(num_train).splits["train"],
        corpus_digest="0" * 64,
        seed=0,
        global_batch_size=data.global_batch_size,
        num_lanes=data.num_lanes,
        shuffle_window=data.shuffle_window,
    )
    assert config.recipe.optim.warmup_steps < config.recipe.total_steps
    assert config.recipe.total_steps >= 20


def test_the_recipe_does_not_depend_on_the_number_of_workers():
    assert config_of(800) == config_of(800)
    assert config_of(800, num_workers=1).config_digest == config_of(800, num_workers=8).config_digest


def test_more_pictures_get_a_larger_network_and_fewer_passes():
    numbers = [3_000, 3_001, 20_001, 200_001, 2_000_001]
    recipes = [config_of(number).recipe for number in numbers]
    sizes = [(r.model.image_size_px, r.model.depth * r.model.embed_dim**2) for r in recipes]
    assert sizes == sorted(set(sizes))
    assert [r.model.image_size_px for r in recipes] == [32, 64, 128, 224, 224]
    assert len(TIERS) == len(numbers)


@pytest.mark.parametrize("num_train", [1, 2, 12])
def test_few_pictures_are_enough(num_train):
    config = config_of(num_train, num_workers=8)
    assert config.execution.num_workers <= num_train
    assert config.recipe.total_steps == 20
    assert config_of(num_train, with_val=False).val_split is None


@pytest.mark.parametrize("steps", [1, 2, 9, 500])
def test_requested_steps_are_used(steps):
    recipe = config_of(800, total_steps=steps).recipe
    assert recipe.total_steps == steps
    assert recipe.optim.warmup_steps < steps


def test_zero_steps_are_refused():
    with pytest.raises(ValueError, match="total_steps"):
        config_of(800, total_steps=0)


def test_gpus_are_used_if_there_are_any():
    manifest = manifest_of(50_000)
    gpu = own_images("birds", "c", manifest, num_workers=8, num_gpus=1, num_cpus=16)
    assert (gpu.recipe.precision, gpu.execution.compile, gpu.execution.device) == ("bfloat16", True, "cuda")
    assert (gpu.execution.num_workers, gpu.execution.decode_threads) == (1, 12)
    four = own_images("birds", "c", manifest, num_workers=8, num_gpus=4, num_cpus=16).execution
    assert (four.num_workers, four.decode_threads) == (4, 3)
    cpu = own_images("birds", "c", manifest, num_workers=2)
    elsewhere = own_images("birds", "c", manifest, num_workers=2, num_gpus=None)
    assert (elsewhere.execution.device, elsewhere.config_digest) == ("auto", cpu.config_digest)
    assert (cpu.recipe.precision, cpu.execution.compile, cpu.execution.device) == ("float32", False, "cpu")


def test_several_labels_per_image_are_trained_with_a_sigmoid_loss():
    assert config_of(800).recipe.loss == "softmax"
    several = config_of(800, single_label=False).recipe
    assert several.loss == "sigmoid"
    assert several.model.head_bias_init < 0


def test_the_name_of_a_corpus_is_made_a_valid_name_of_the_run():
    manifest = manifest_of(800)
    assert own_images("my_birds.v2", "c", manifest, num_workers=1).name == "my-birds-v2"
    assert len(own_images("b" * 80, "c", manifest, num_workers=1).name) <= 63


def test_the_estimate_includes_every_step_and_the_start(monkeypatch):
    monkeypatch.setattr("vitline.vit.cost.step_time.seconds_per_step", lambda recipe, execution, num_classes: 0.1)
    # 100 steps of 0.1 s, a quarter more for reading, and 25 s to start.
    assert estimate(config_of(12, total_steps=100), num_classes=3) == pytest.approx(37.5)


@pytest.mark.long
def test_the_printed_python_code_loads_the_model_in_a_new_process(tmp_path):
    for number in range(40):
        side = np.full((24, 24, 3), 40 + 4 * number, np.uint8)
        path = tmp_path / "birds" / ("crow", "jay")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(side).save(path)
    ours = ("VITLINE_", "AWS_", "RAY_", "MLFLOW_", "PREFECT_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}

    def python(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    options = ("--source", "birds", "--name", "my_birds", "--steps", "2", "--yes")
    printed = python("-m", "vitline.flows.cli.main", "train-folder", *options).stdout
    code = printed[printed.index("from vitline import load_model") :]
    assert re.search(r"load_model\('my-birds/[0-9a-f]{12}'\)", code)
    assert set(re.findall(r"crow|jay", python("-c", code).stdout)) == {"crow", "jay"}
