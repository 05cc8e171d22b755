"""Probes on the digits, from spec to score: accuracy, reuse of features and scores, refusals."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import replace
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.runs.watchdog import Watchdog
from vitline.infra.storage import open_store
from vitline.vit.evaluation.calibration import calibration_of
from vitline.vit.evaluation.evaluate import TaskRef
from vitline.vit.features import score_probes as scoring
from vitline.vit.features.features import FeatureReader
from vitline.vit.features.probe_trials import ProbeSplits, plan_probe_trials, probe_splits
from vitline.vit.input.batches import eval_batches
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.published.models import load_model
from vitline.vit.run.run_spec import read_progress
from vitline.vit.training.evaluate import evaluate
from vitline.vit.training.predictions import Predictions

from ..conftest import ARCHITECTURE, published, reference

NAMES = ("fewshot", "linear", "knn", "head")


@pytest.mark.slow
def test_every_probe_scores_a_trained_network_above_chance_and_above_an_untrained_one(models, probe_spec, score):
    value = {}
    for name in NAMES:
        for found in score(probe_spec(name, models.trained, models.untrained)):
            assert (found.num_examples, found.num_classes) == (797, 10)
            assert 0.1 <= found.majority_fraction < 0.13
            assert found.wall_s > 0
            value[found.protocol, found.model] = found.value
    names = ("fewshot-5", "fewshot-10", "fewshot-25", "linear", "knn", "head")
    assert {name for name, _ in value} == set(names)
    trained, untrained = ([value[name, model] for name in names] for model in (models.trained, models.untrained))
    # Chance is 0.1. Features of a random network score well above it; a head of zeros does not.
    assert min(trained) > 0.9
    assert untrained[0] < untrained[1] < untrained[2]
    assert all(a > b for a, b in zip(trained, untrained, strict=True))
    assert untrained[-1] < 0.2


@pytest.mark.slow
def test_every_part_that_a_probe_reads_and_every_look_at_its_examples_is_progress(
    root, probe_spec, models, score, monkeypatch, tmp_path
):
    run, told = open_store(tmp_path / "run"), []
    monkeypatch.setattr(Watchdog, "progress", lambda watchdog: told.append(watchdog._who))
    spec = probe_spec("linear", models.trained)
    score(spec)
    (trial,) = plan_probe_trials(spec)
    open_store(root).delete(trial.score_key)
    reader = FeatureReader(open_store(root), trial.source, trial.needed)
    del told[:]
    with TaskWatch(run.uri, 1).over(trial.key):
        scoring.score_probe(root, trial)
    assert {*told} == {trial.key}
    assert len(told) > len(reader.parts) + 8 * 10


def test_scores_equal_those_of_scikit_learn_on_the_same_features(models, probe_spec, score, digits):
    model, manifest = load_model(models.trained), load_manifest(digits)
    (x, y), (test, truth) = (
        [tensor.double().numpy() for tensor in reference(digits, manifest, split, model)]
        for split in ("train800val200", "test")
    )
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-5
    (linear,) = score(probe_spec("linear", models.trained))
    theirs = LogisticRegression(C=1 / (linear.chosen["strength"] * 1000), tol=1e-9, max_iter=5000)
    expected = theirs.fit((x - mean) / scale, y).score((test - mean) / scale, truth)
    assert linear.value == pytest.approx(expected, abs=1.5 / 797)  # one tie may be decided otherwise
    probability = theirs.predict_proba((test - mean) / scale).max(axis=1)
    assert linear.calibration.mean_confidence == pytest.approx(probability.mean(), abs=1e-4)

    def weight(distance):
        return np.exp((1 - distance) / 0.07)

    (knn,) = score(probe_spec("knn", models.trained))
    neighbours = KNeighborsClassifier(20, weights=weight, algorithm="brute", metric="cosine").fit(x, y)
    assert knn.value == pytest.approx(neighbours.score(test, truth), abs=1.5 / 797)
    share = neighbours.predict_proba(test).max(axis=1)
    assert knn.calibration.mean_confidence == pytest.approx(share.mean(), abs=1e-4)

    few = score(probe_spec("fewshot", models.trained, seed=3))[1]
    rng = np.random.default_rng(3)
    rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:10] for c in range(10)])
    shot, mean, scale = x[rows], x[rows].mean(axis=0), x[rows].std(axis=0) + 1e-5
    ridge = Ridge(alpha=1024.0, fit_intercept=False, solver="svd")
    ridge.fit(np.c_[(shot - mean) / scale, np.full(100, 100.0)], 2 * np.eye(10)[y[rows].astype(int)] - 1)
    predicted = ridge.predict(np.c_[(test - mean) / scale, np.full(797, 100.0)]).argmax(axis=1)
    assert few.value == pytest.approx((predicted == truth).mean(), abs=1.5 / 797)
    assert (few.calibration, few.files) == (None, ())  # least squares gives no probabilities


def test_one_feature_pass_serves_every_probe(models, probe_spec, score, digits, root, images_forwarded):
    first = score(probe_spec("linear", models.trained))
    manifest = load_manifest(digits)
    assert sum(images_forwarded) == manifest.split("train800val200").num_rows + 797
    assert (
        len(list(open_store(root).list("features/"))) == len(images_forwarded) + 4
    )  # parts, and a manifest for each split
    images_forwarded.clear()
    for name in ("fewshot", "knn", "head"):
        score(probe_spec(name, models.trained))
    assert images_forwarded == []
    assert score(probe_spec("linear", models.trained)) == first


def test_score_records_contain_the_choice_and_have_keys_by_protocol(models, probe_spec, score, root):
    linear, knn, head, shots = (
        score(probe_spec(name, models.trained))[0] for name in ("linear", "knn", "head", "fewshot")
    )
    assert linear.chosen["val_top1"] == max(tried["val_top1"] for tried in linear.tried)
    assert len(linear.tried) == 7
    assert all(tried["converged"] for tried in linear.tried)
    assert knn.chosen == {"neighbours": 20, "temperature": 0.07}
    assert shots.chosen["num_examples"] == 50
    assert shots.chosen["classes_with_fewer"] == shots.chosen["classes_with_none"] == 0
    assert head.metric_name == "head/digits/top1"
    assert shots.metric_name == "fewshot/digits/5shot/top1"
    keys = open_store(root).list("scores/digits/")
    model = linear.model_digest[:12]
    for protocol in ("fewshot-5", "linear", "knn", "head"):
        assert sum(key.startswith(f"scores/digits/{protocol}/{model}-s0-") for key in keys) == 1


def test_head_probe_equals_an_evaluation_of_the_whole_network(models, probe_spec, score, digits, root):
    model, manifest, noted = load_model(models.trained), load_manifest(digits), []
    with eval_batches(digits, manifest, "test", model.contract.evaluation, batch_size=64) as batches:
        expected = evaluate(model.network, batches, 797, note=noted.append)
    (found,) = score(probe_spec("head", models.trained))
    assert (found.value, found.majority_fraction) == (expected.top1, expected.majority_fraction)
    predictions = Predictions.joined(noted)
    calibration = calibration_of(predictions.probability, predictions.right)
    assert found.calibration.ece == pytest.approx(calibration.ece, abs=1e-5)
    assert found.calibration.mean_confidence == pytest.approx(calibration.mean_confidence, abs=1e-5)
    (key,) = found.files
    assert open_store(root).read(f"trials/{key}").startswith(b"\x89PNG")


def test_head_probe_accepts_any_of_several_labels(root, probe_spec, score, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, count in (("a", 6), ("b", 4), ("c", 2)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    for i in range(3):  # three images of class a are of class b, too
        (tmp_path / "pictures/test/b" / f"link{i}.png").symlink_to(f"../a/{i}.png")
    source = ClassFolders(path=str(tmp_path / "pictures"), links="second_label")
    request = CorpusConfig(name="several", source=source, recipe=CorpusRecipe(duplicates="keep"))
    prepare([request], root)
    always_b = VisionTransformer(ARCHITECTURE, 3)
    with torch.no_grad():
        always_b.head.bias[1] = 5.0
    model = published(root, "always-b", always_b, ["a", "b", "c"])
    task = TaskRef(name="several", corpus=corpus_store(open_store(root), request).uri)
    (found,) = score(probe_spec("head", model, tasks=(task,)))
    assert (found.value, found.num_examples) == (7 / 12, 12)
    assert found.majority_fraction == 7 / 12


def test_a_corruption_of_imagenet_c_has_a_score_for_each_severity(root, probe_spec, score, tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("1_n00000001", 3), ("2_n00000002", 2), ("5_n00000003", 2)):  # severity and class
        for split in ("train", "test"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    request = CorpusConfig(
        name="imagenet-c-fog",
        source=ClassFolders(path=str(tmp_path / "pictures")),
        recipe=CorpusRecipe(duplicates="keep"),
    )
    prepare([request], root)
    always_second = VisionTransformer(ARCHITECTURE, 3)
    with torch.no_grad():
        always_second.head.bias[1] = 5.0
    model = published(root, "always-second", always_second, ["1_n00000001", "2_n00000002", "5_n00000003"])
    task = TaskRef(name="imagenet-c-fog", corpus=corpus_store(open_store(root), request).uri)
    (found,) = score(probe_spec("head", model, tasks=(task,)))
    assert (found.value, found.by_severity) == (2 / 7, {1: 0.0, 2: 1.0, 5: 0.0})
    assert found.metrics["head/imagenet-c-fog/severity_2/top1"] == 1.0
    # A corpus of another name is no corruption of ImageNet-C.
    other = TaskRef(name="fog", corpus=task.corpus)
    assert "by_severity" not in score(probe_spec("head", model, tasks=(other,)))[0].model_dump()


def test_only_probes_that_draw_examples_are_repeated_per_seed(models, probe_spec):
    few = plan_probe_trials(probe_spec("fewshot", models.trained, num_seeds=3))
    assert [(r.seed, r.shots) for r in few] == [(s, k) for s in range(3) for k in (5, 10, 25)]
    assert len({r.score_key for r in few}) == 9
    assert [r.seed for r in plan_probe_trials(probe_spec("linear", models.trained, seed=4, num_seeds=3))] == [4]


def test_stopped_evaluation_resumes_and_computes_no_image_twice(
    models, probe_spec, score, root, images_forwarded, monkeypatch
):
    monkeypatch.setattr("vitline.vit.features.feature_plan.PART_ROWS", 100)
    spec = probe_spec("fewshot", models.trained)
    assert score(spec, stop_after=4) is None
    progress = read_progress(open_store(root).child(f"runs/{spec.run_key}"))
    assert progress["unit"] == "images"
    assert progress["step"] < progress["total_steps"] == 1797
    assert 0 < sum(images_forwarded) < 1797
    assert not open_store(root).list("scores/")
    assert len(score(spec)) == 3
    assert sum(images_forwarded) == 1797


def test_control_from_scratch_is_refused(models, probe_spec):
    with pytest.raises(ValueError, match=r"'knn' scores features of a published model, so it has no control"):
        plan_probe_trials(probe_spec("knn", models.trained, None))


def test_a_head_that_lacks_a_class_of_the_corpus_is_refused(models, probe_spec, digits, root):
    fewer = published(root, "fewer", VisionTransformer(ARCHITECTURE, 3), list("012"))
    with pytest.raises(ValueError, match=r"0 of its classes and 1 of the corpus are named '3'.*use protocol 'linear'"):
        plan_probe_trials(probe_spec("head", fewer))
    assert plan_probe_trials(probe_spec("linear", fewer))
    twice = published(root, "twice", VisionTransformer(ARCHITECTURE, 11), list("01234567893"))
    with pytest.raises(ValueError, match=r"2 of its classes and 1 of the corpus are named '3', expected one each"):
        plan_probe_trials(probe_spec("head", twice))


def test_a_head_of_more_classes_chooses_among_those_of_the_corpus(models, probe_spec, score, root):
    """The same head in another order, with a further class that has the largest logit of all, scores the same."""
    model = load_model(models.trained)
    network, order = VisionTransformer(ARCHITECTURE, 11), [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    state = {name: value.clone() for name, value in model.network.state_dict().items()}
    weight, bias = state["head.weight"][order], state["head.bias"][order]
    state |= {"head.weight": torch.cat([weight, 0 * weight[:1]]), "head.bias": torch.cat([bias, torch.tensor([1e3])])}
    network.load_state_dict(state)
    more = published(root, "more", network, [*(str(digit) for digit in order), "a larger class"])
    (trial,), (same,) = (plan_probe_trials(probe_spec("head", uri)) for uri in (more, models.trained))
    assert trial.head_classes == tuple(order.index(digit) for digit in range(10))
    assert same.head_classes == ()
    (found,), (expected,) = (score(probe_spec("head", uri)) for uri in (more, models.trained))
    assert found.value == expected.value > 0.5
    assert found.calibration.ece == pytest.approx(expected.calibration.ece, abs=1e-6)


@pytest.fixture
def corpus_with(digits, root):
    """corpus_with(splits, **changes): the URI of a copy of the digits' manifest with other splits."""

    def make(*splits, **changes) -> str:
        manifest = digits.read_json("manifest.json") | changes
        manifest["splits"] = {name: manifest["splits"].get(name, manifest["splits"]["train"]) for name in splits}
        copy = open_store(root).child(f"corpora/{'-'.join(splits)}/1")
        copy.write_json("manifest.json", manifest)
        copy.write("classes.json", digits.read("classes.json"))
        return copy.uri

    return make


def test_splits_follow_the_protocol_and_a_head_needs_only_test(models, probe_spec, corpus_with):
    def planned(name, *splits, **changes):
        task = TaskRef(name="task", corpus=corpus_with(*splits, **changes))
        return plan_probe_trials(probe_spec(name, models.trained, tasks=(task,)))[0].splits

    assert planned("linear", "train", "val", "test") == ProbeSplits(train="train", val="val", joined=("train", "val"))
    assert planned("knn", "train", "val", "trainval", "test").joined == ("trainval",)
    assert planned("knn", "train", "val", "train800", "val200", "train800val200", "test").joined == ("train800val200",)
    assert planned("head", "test", single_label=False).joined == ()
    with pytest.raises(ValueError, match=r"has splits test, but .* needs train800"):
        planned("fewshot", "test")
    with pytest.raises(ValueError, match=r"has splits train, but protocol 'head' needs split 'test'"):
        planned("head", "train")
    with pytest.raises(
        ValueError, match=r"may have several labels per image, but protocol 'linear' needs one.* 'head'"
    ):
        planned("linear", "train", "val", "test", single_label=False)


def test_train_and_val_are_joined_if_no_split_contains_both(models, probe_spec, score, digits):
    manifest = load_manifest(digits)
    assert probe_splits(manifest, "digits", probe_spec("knn").protocol).joined == ("train800val200",)
    probe_trial = plan_probe_trials(probe_spec("knn", models.trained))[0]
    apart = probe_trial.model_copy(update={"splits": ProbeSplits(train="train", val="val", joined=("train", "val"))})
    assert apart.needed == ("train", "val", "test")
    assert apart.score_key != probe_trial.score_key


def test_classes_with_fewer_examples_than_shots_are_counted(models, probe_spec, score):
    spec = probe_spec("fewshot", models.trained)
    many = replace(spec, protocol=spec.protocol.model_copy(update={"shots": (95,)}))
    (found,) = score(many)
    assert found.protocol == "fewshot-95"
    assert 0 < found.chosen["classes_with_fewer"] <= 10
    assert found.chosen["num_examples"] < 950


def test_planning_does_not_import_torch():
    code = "import sys, vitline.vit.features.probe_trials; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_score_of_a_wrong_number_of_images_is_not_recorded(models, probe_spec, score, root, monkeypatch):
    short = scoring.Counted(hits=1, num_examples=796, largest_class=1, chosen={})
    monkeypatch.setitem(scoring.PROBE_METHODS, "head", lambda reader: short)
    with pytest.raises(RuntimeError, match=r"796 test images of .* were counted, but the split has 797"):
        score(probe_spec("head", models.trained))
    assert not open_store(root).list("scores/")
