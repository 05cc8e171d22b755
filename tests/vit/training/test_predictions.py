"""The predictions behind a score: every example once; tables and pages agree with the score."""

import base64
import csv
import html
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.infra.storage import open_store
from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.evaluation import run_trial as running
from vitline.vit.evaluation import top_losses as top_losses_module
from vitline.vit.evaluation import trial_files
from vitline.vit.evaluation.calibration import calibration_of
from vitline.vit.evaluation.confusion import (
    confused_pairs_csv,
    confusion,
    confusion_csv,
    distinct,
    draw_confusion,
    per_class_csv,
)
from vitline.vit.evaluation.run_trial import ensure_trial
from vitline.vit.evaluation.top_losses import MAX_SHOWN, Shown, load_shown, suspicious, top_losses, top_losses_page
from vitline.vit.evaluation.trial_files import trial_figures
from vitline.vit.evaluation.trials import Trial, finished_result
from vitline.vit.input.batches import Batch, LoaderResources, MultiLabels, eval_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.network import normalised
from vitline.vit.training.evaluate import evaluate
from vitline.vit.training.predictions import Predictions

from ..unleased import Unleased


def predictions_of(label, predicted, probability=None, loss=None, row=None) -> Predictions:
    """Predictions from plain lists."""
    n = len(label)
    return Predictions(
        row=np.arange(n) if row is None else np.array(row),
        label=np.array(label, np.int32),
        predicted=np.array(predicted, np.int32),
        probability=np.array([0.5] * n if probability is None else probability, np.float32),
        loss=np.array([1.0] * n if loss is None else loss, np.float32),
    )


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


class FirstRowNetwork(nn.Module):
    """A network whose four logits are the first row of the first channel of each image, (n, 4, 4, 3) bytes."""

    num_classes = 4

    def forward(self, images):
        return normalised(images)[:, 0, 0, :]


class BytesNetwork(nn.Module):
    """A network of one layer."""

    num_classes = 10

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 10, bias=False)

    def forward(self, images):
        return self.layer(images.flatten(1).float())


def batch(logits, labels, first_slot=0, padding=0) -> Batch:
    """A batch for which `FirstRowNetwork` gives these logits; its padding is predicted as class 3."""
    n = len(logits)
    images = torch.zeros(n + padding, 4, 4, 3, dtype=torch.uint8)
    images[:n, 0, :, 0] = torch.tensor(logits, dtype=torch.uint8)
    images[n:, 0, 3, 0] = 255
    if isinstance(labels[0], int):
        labels = torch.tensor(labels + [0] * padding)
    else:
        labels = MultiLabels.of([(list(of_image), list(of_image.values())) for of_image in labels], n + padding)
    return Batch(images, labels, torch.arange(n + padding) < n, first_slot, n)


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A final trial of a few steps on the digits: its store, trial and result."""
    manifest = load_manifest(digits)
    model = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=32, depth=1, num_heads=2, mlp_dim=64, pool="gap")
    augment = AugmentConfig(image_size_px=8, train_crop="none", flip=False)
    trial = Trial(
        task="digits",
        corpus=digits.uri,
        corpus_digest=manifest.digest,
        decode_digest="0",
        model=None,
        model_digest=None,
        phase="final",
        train_split="train800val200",
        score_split="test",
        recipe=TrainRecipe(
            model=model,
            input=InputConfig(global_batch_size=64, num_lanes=4, shuffle_window=4, augment=augment),
            optim=OptimConfig(optimizer="sgd", peak_lr=0.3, warmup_steps=5, schedule="cosine"),
            total_steps=60,
        ),
    )
    trials = open_store(str(tmp_path_factory.mktemp("trials")))
    return trials, trial, ensure_trial(Unleased(trials, 1), trials, trial)


def stored_predictions(trained) -> Predictions:
    trials, _, result = trained
    return Predictions.from_parquet(trials.read(result.files[0]))


@pytest.mark.slow
def test_predictions_of_a_trial_contain_every_row_once_and_give_its_score(trained, digits):
    _, trial, result = trained
    predictions = stored_predictions(trained)
    assert predictions.row.tolist() == list(range(797))
    assert predictions.right.sum() / len(predictions) == result.top1
    assert predictions.loss.astype(np.float64).mean() == pytest.approx(result.loss, rel=1e-5)
    assert 0.3 < result.top1 < 1
    with ShardReader(digits, load_manifest(digits), "test") as reader:
        groups = range(reader.split.num_row_groups)
        labels = [label for group in groups for label in reader.row_group(group, ["label"])["label"].to_pylist()]
    assert predictions.label.tolist() == labels
    assert all(f"{trial.key}/{predictions.digest[:12]}/" in key for key in result.files)


def test_files_of_a_trial_agree_with_each_other_and_with_its_score(trained, digits):
    trials, _, result = trained
    predictions, names = stored_predictions(trained), load_class_names(digits)
    files = {key.rpartition("/")[2]: trials.read(key) for key in result.files}
    assert list(files) == [
        "predictions.parquet",
        "per_class.csv",
        "top_losses.html",
        "reliability.png",
        "confusion.csv",
        "confusion.png",
    ]
    assert result.calibration == calibration_of(predictions.probability, predictions.right)
    assert sum(each.examples * each.accuracy for each in result.calibration.bins) / 797 == pytest.approx(result.top1)
    head, *rows = rows_of(files["confusion.csv"].decode())
    assert head[1:] == names == [row[0] for row in rows]
    counts = np.array([row[1:] for row in rows], int)
    assert counts.sum() == 797
    assert np.trace(counts) / 797 == result.top1
    _, *classes = rows_of(files["per_class.csv"].decode())
    for i, (name, examples, top1, other, times) in enumerate(classes):
        assert (name, int(examples)) == (names[i], counts[i].sum())
        assert float(top1) == pytest.approx(counts[i, i] / counts[i].sum(), abs=5e-5)
        wrong = counts[i] - np.diag(np.diag(counts))[i]
        assert int(times) == wrong.max() == wrong[names.index(other)]
    assert Image.open(io.BytesIO(files["confusion.png"])).size[0] > 300
    page = files["top_losses.html"].decode()
    assert "<h1>digits from scratch</h1>" in page
    worst = int(predictions.row[predictions.loss.argmax()])
    assert load_shown(digits, load_manifest(digits), "test", [worst])[worst].example_id in page
    cards = re.findall(r"<li>.*?</li>", page, re.S)
    assert f"loss {predictions.loss.max():.3f}" in cards[0]
    assert len(re.findall("<img", page)) == len(cards) <= 2 * MAX_SHOWN
    assert len(page) < 200_000
    assert "://" not in page


def test_padding_is_left_out_and_rows_are_those_of_the_split():
    parts: list[Predictions] = []
    batches = [
        batch([[9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0]], [0, 1, 1], first_slot=3),
        batch([[0, 0, 0, 9]], [3], first_slot=6, padding=4),
        batch([[200, 0, 0, 0]] * 3, [0, 0, 2]),
    ]
    score = evaluate(FirstRowNetwork(), batches, 7, note=parts.append)
    found = Predictions.joined(parts)
    assert found.row.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert found.predicted.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert found.label.tolist() == [0, 0, 2, 0, 1, 1, 3]
    assert found.right.mean() == score.top1 == 5 / 7
    e = np.exp(np.array([200, 0, 0, 0]) / 127.5)
    assert found.probability[0] == pytest.approx(e[0] / e.sum(), rel=1e-6)
    assert found.loss[[0, 2]] == pytest.approx([-np.log(e[0] / e.sum()), -np.log(e[1] / e.sum())], rel=1e-6)
    with pytest.raises(ValueError, match="Row 3 has two predictions"):
        Predictions.joined([*parts, parts[0]])


def test_label_among_several_is_the_predicted_one_or_that_of_the_largest_weight():
    parts: list[Predictions] = []
    logits_of_class_1 = [[0, 255, 0, 0]] * 4
    labels = [{0: 1.0, 1: 1.0}, {0: 1.0, 3: 1.0}, {2: 0.25, 3: 0.75}, {1: 1.0}]
    score = evaluate(FirstRowNetwork(), [batch(logits_of_class_1, labels)], 4, loss="sigmoid", note=parts.append)
    (found,) = parts
    assert found.label.tolist() == [1, 0, 3, 1]
    assert found.right.mean() == score.top1 == 0.5
    assert found.probability == pytest.approx([1 / (1 + np.exp(-1))] * 4)
    assert confusion(found, 4).tolist() == [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_together_predict_every_row_once(digits, world_size):
    manifest, parts = load_manifest(digits), []
    for rank in range(world_size):
        share = 797 * (rank + 1) // world_size - 797 * rank // world_size
        loading = LoaderResources(rank, world_size)
        view = AugmentConfig(image_size_px=8)
        with eval_batches(digits, manifest, "test", view, batch_size=50, loading=loading) as batches:
            network = BytesNetwork()
            evaluate(network, batches, share, note=parts.append)
    assert Predictions.joined(parts).row.tolist() == list(range(797))


def test_predictions_survive_a_round_trip_through_parquet():
    written = predictions_of([0, 1], [1, 1], [0.25, 1.0], [float("nan"), 0.5], row=[4, 7])
    read = Predictions.from_parquet(written.to_parquet())
    assert read.digest == written.digest
    assert (read.row.tolist(), read.label.tolist(), np.isnan(read.loss).tolist()) == ([4, 7], [0, 1], [True, False])


def test_classes_without_examples_or_mistakes_have_empty_cells():
    found = predictions_of([0, 0, 0, 2], [1, 2, 2, 2])
    assert rows_of(per_class_csv(found, ["a", "b", "c"]))[1:] == [
        ["a", "3", "0.0000", "c", "2"],
        ["b", "0", "", "", ""],
        ["c", "1", "1.0000", "", ""],
    ]
    assert rows_of(confusion_csv(confusion(found, 3), ["a", 'b,"', "c"]))[0] == ["class \\ predicted", "a", 'b,"', "c"]


def test_class_names_are_no_formulas_in_a_spreadsheet():
    found, names = predictions_of([0, 1], [1, 1]), ["=cmd|' /C calc'!A0", "-1"]
    for text in (
        per_class_csv(found, names), confusion_csv(confusion(found, 2), names), confused_pairs_csv(found, names)
    ):  # fmt: skip
        assert not [cell for row in rows_of(text) for cell in row if cell.startswith(("=", "-"))]
        assert "'=cmd|' /C calc'!A0" in text


def test_most_confused_pairs_are_listed_for_many_classes(digits, monkeypatch):
    names = [f"c{i}" for i in range(300)]
    found = predictions_of([7] * 5 + [8] * 3, [7, 9, 9, 9, 2, 8, 8, 2])
    assert rows_of(confused_pairs_csv(found, names))[1:] == [
        ["c7", "c9", "3", "0.6000"],
        ["c7", "c2", "1", "0.2000"],
        ["c8", "c2", "1", "0.3333"],
    ]
    monkeypatch.setattr(trial_files, "load_class_names", lambda corpus: names)
    files = trial_figures(found, digits, load_manifest(digits), "test", "x")
    assert list(files) == ["per_class.csv", "top_losses.html", "reliability.png", "confused_pairs.csv"]


def test_classes_of_equal_names_are_numbered():
    assert distinct(["crane", "cat", "crane"]) == ["crane (0)", "cat", "crane (2)"]


def test_top_losses_are_sorted_by_loss_with_nan_first():
    found = predictions_of([0] * 4, [0] * 4, loss=[1.0, 3.0, float("nan"), 3.0], row=[5, 9, 7, 6])
    assert found.row[top_losses(found)].tolist() == [7, 6, 9, 5]
    assert found.row[top_losses(found, 2)].tolist() == [7, 6]


@pytest.mark.parametrize(
    ("right_others", "wrong_others", "expected"), [(10, 0, [0]), (9, 0, []), (18, 1, [0, 19]), (17, 2, []), (8, 1, [])]
)
def test_label_is_suspicious_if_confident_predictions_of_the_other_class_are_right(
    right_others, wrong_others, expected
):
    # The first is labelled 0 and predicted as class 1 with 0.95; the others are predicted as class 1 with 0.9.
    label = [0] + [1] * right_others + [0] * wrong_others
    sure = predictions_of(label, [1] * len(label), [0.95] + [0.9] * (len(label) - 1))
    assert suspicious(sure).tolist() == expected
    unsure = predictions_of(label, [1] * len(label), [0.89] * len(label))
    assert suspicious(unsure).tolist() == []


def test_class_names_are_escaped_in_page_and_plot(digits):
    names = ["<script>alert(1)</script>", "a & b", *"23456789"]
    page = top_losses_page(predictions_of([0], [1]), digits, load_manifest(digits), "test", names, "<i>x</i>")
    assert "<script" not in page
    assert "<i>" not in page
    assert all(html.escape(text) in page for text in (*names[:2], "<i>x</i>"))
    draw_confusion(
        confusion(predictions_of([0], [1]), 10), ["$\\frac$", "汉字", *names[2:]], "$x"
    )  # drawn as text, without a warning


def test_only_row_groups_with_a_shown_example_are_read(digits, monkeypatch):
    read, real = [], ShardReader.row_group
    monkeypatch.setattr(
        ShardReader, "row_group", lambda self, i, columns=None: read.append(i) or real(self, i, columns)
    )
    manifest = load_manifest(digits)
    size = manifest.splits["test"].rows_per_row_group
    shown = load_shown(digits, manifest, "test", [0, 5 * size, 1 % size, 0, 796])
    assert sorted(read) == sorted({0, 5, 1 % size // size, 796 // size})
    assert all(shown[row].picture.startswith("data:image/png;base64,") and shown[row].small for row in shown)


def test_result_of_a_trial_run_by_two_workers_names_its_own_predictions(trained, tmp_path, monkeypatch):
    _, trial, result = trained
    trials = open_store(str(tmp_path))
    slower, faster = predictions_of([0], [0]), predictions_of([0], [1])
    to_come = [slower, faster]

    def overtaken(held, trial, place):
        mine = to_come.pop(0)
        if to_come:
            ensure_trial(Unleased(trials, 1), trials, trial)  # another worker, which begins later and ends first
        return result, [mine]

    monkeypatch.setattr(running, "run_trial", overtaken)
    stays = ensure_trial(Unleased(trials, 1), trials, trial)
    assert stays == finished_result(trials, trial)
    assert Predictions.from_parquet(trials.read(stays.files[0])).digest == faster.digest
    assert len({key.rpartition("/")[0] for key in trials.list(f"{trial.key}/")}) == 2


def test_pictures_are_small_and_labels_of_an_example_are_listed(digits, monkeypatch):
    def opened(height, width):
        uri = top_losses_module._thumbnail(np.full((height, width, 3), 7, np.uint8))
        picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
        return picture.format, picture.size

    assert opened(160, 20) == ("PNG", (20, 160))
    assert opened(400, 200) == ("JPEG", (80, 160))
    shown = Shown("an id", (0, 2, 3, 4, 5, 6, 7), "cannot be decoded: it is gone", False)
    monkeypatch.setattr(top_losses_module, "load_shown", lambda *args: {0: shown})
    page = top_losses_page(predictions_of([0], [1]), digits, load_manifest(digits), "test", "abcdefgh", "x")
    assert "a, c, d, e, f and 2 more" in page
    assert "it is gone" in page


def test_failure_of_one_trial_file_is_logged_and_the_others_are_written(trained, digits, tmp_path, monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("no picture")

    monkeypatch.setattr(trial_files, "top_losses_page", broken)
    trials = open_store(str(tmp_path))
    keys = trial_files.write_trial_files(trials, "k", stored_predictions(trained), digits.uri, "test", "x")
    assert [key.rpartition("/")[2] for key in keys] == [
        "predictions.parquet",
        "per_class.csv",
        "reliability.png",
        "confusion.csv",
        "confusion.png",
    ]
    assert "no picture" in caplog.text
