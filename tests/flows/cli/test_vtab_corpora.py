"""`vitline vtab files | prepare | splits`."""

import csv
import gzip
import hashlib
import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS, OfficialSplits, Slice
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.prepare.job import prepare
from vitline.flows.cli.main import app
from vitline.flows.cli.vtab_corpora import TASK_NAMES, known_tasks, task_request
from vitline.vit.evaluation.tasks import ROBUSTNESS, VTAB_TASKS


def vitline(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def eurosat(tmp_path, monkeypatch):
    """A folder of official files with those of EuroSAT only: 1,100 images."""
    parts = (Slice("train", 0, 820), Slice("train", 820, 1040), Slice("train", 1040, 1100))
    monkeypatch.setitem(
        OFFICIAL_SPLITS, "eurosat", OfficialSplits(**dict(zip(("train", "val", "test"), parts, strict=True)))
    )
    (tmp_path / "files/eurosat").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "files/eurosat/EuroSAT.zip", "w") as archive:
        for i in range(1, 1101):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file, "JPEG")
            archive.writestr(f"2750/Forest/Forest_{i}.jpg", file.getvalue())
    return tmp_path / "files"


TRANSFER = ["imagenet", "imagenet-real", "imagenet-v2", "cifar10", "cifar100", "pets", "flowers102"]
NOISE = [f"imagenet-c-{noise}-noise" for noise in ("gaussian", "shot", "impulse")]


def test_the_tasks_are_those_of_vtab_of_the_paper_and_of_robustness():
    assert list(TASK_NAMES) == [*(task.corpus_name for task in VTAB_TASKS), *TRANSFER, *ROBUSTNESS]
    assert known_tasks(["robustness", "pets"]) == [*ROBUSTNESS, "pets"]


def test_the_official_files_of_every_data_set_are_listed():
    rows = vitline("vtab", "files", "--json")["files"]
    assert {row["folder"] for row in rows} == {*OFFICIAL_SPLITS, "imagenet", "cifar10"}
    assert all(row["from"].startswith("http") and row["terms"] for row in rows)
    needed = {row["file"]: row["tasks"] for row in rows if row["folder"] in ("imagenet", "cifar100")}
    assert {
        "cifar-100-binary.tar.gz": ["vtab-cifar100", "cifar100"],
        "ILSVRC2012_img_train.tar": ["imagenet"],
        "ILSVRC2012_img_val.tar": ["imagenet", "imagenet-real"],
        "ILSVRC2012_devkit_t12.tar.gz": ["imagenet", "imagenet-real", "imagenet-v2", *ROBUSTNESS],
        "real.json": ["imagenet-real"],
        "imagenetv2-matched-frequency.tar.gz": ["imagenet-v2"],
    }.items() <= needed.items()
    assert needed["noise.tar"] == NOISE
    assert needed["objectnet_to_imagenet_1k.json"] == ["objectnet"]
    (row,) = vitline("vtab", "files", "--task", "vtab-eurosat", "--json")["files"]
    assert (row["file"], row["bytes"]) == ("EuroSAT.zip", 94_280_567)


def test_task_is_named_like_its_corpus():
    with pytest.raises(
        ValueError,
        match=r"'eurosat' is not a task .* Did you mean vtab-eurosat\? The available tasks are vtab-caltech101, ",
    ):
        known_tasks(["eurosat"])
    whole, benchmark = (task_request("memory://nothing", name) for name in ("pets", "vtab-pets"))
    assert (whole.name, whole.source.kind, whole.source.task) == ("pets", "transfer", "pets")
    assert (benchmark.name, benchmark.source.kind, benchmark.source.task) == ("vtab-pets", "vtab", "pets")


def test_every_task_is_reported_and_a_prepared_one_is_reused(eurosat, tmp_path):
    root = tmp_path / "root"
    prepare([task_request(str(eurosat), "vtab-eurosat")], str(root))
    shown = vitline("vtab", "prepare", "--source", eurosat, "--root", root, "--json")
    states = {row["task"]: row for row in shown["tasks"]}
    assert list(states) == list(TASK_NAMES)
    assert states.pop("vtab-eurosat")["state"] == "was prepared"
    assert {row["state"] for row in states.values()} == {"files missing"}
    assert "imagelabels.mat" in states["vtab-flowers102"]["detail"]
    assert "real.json, 388,478 bytes" in states["imagenet-real"]["detail"]
    assert shown["coverage"] == "VTAB: 1 of 19 tasks prepared"


def test_the_exported_splits_of_a_task_can_be_checked_without_vitline(eurosat, tmp_path):
    root, out = tmp_path / "root", tmp_path / "eurosat.csv.gz"
    prepare([task_request(str(eurosat), "vtab-eurosat")], str(root))
    shown = vitline("vtab", "splits", "vtab-eurosat", "--out", out, "--root", root, "--json")
    rows = list(csv.DictReader(gzip.decompress(out.read_bytes()).decode().splitlines()))
    keys = [f"Forest_Forest_{i}.jpg" for i in range(1, 1101)]
    ordered = [keys[i] for i in tfds_order("train", keys)]
    assert [row["key"] for row in rows if row["split"] == "train800"] == ordered[:800]
    assert [row["key"] for row in rows if row["split"] == "test"] == ordered[1040:]
    expected = hashlib.sha256("\n".join(ordered[820:1020]).encode()).hexdigest()
    assert shown["sha256 of keys"]["val200"] == expected
