"""A corpus made of predictions: the images of another corpus with the labels that a model gave them, for a student to train on."""

from collections import Counter, defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import BufferReader

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, PredictedClasses, ShardingConfig
from vitline.data_prep.find_corpus import corpus_store, corpus_version
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.infra.storage import open_store
from vitline.vit.features.prediction_plan import FOLDER

from .test_predict import carried_out, models, run_of, spec_of, stored  # noqa: F401

RECIPE = CorpusRecipe(val_fraction=0, test_fraction=0, sharding=ShardingConfig(min_row_groups=8))


@pytest.fixture
def predicted(spec_of):  # noqa: F811
    """predicted(**fields): the spec of a finished prediction."""

    def make(**fields):
        spec = spec_of(**fields)
        run = run_of(spec)
        run.write_json("config.json", spec.model_dump(mode="json"))
        carried_out(spec)
        run.write_json("state.json", {"state": "finished", "attempt": 1, "updated_at": 0.0})
        return spec

    return make


def request(spec, **source):
    return CorpusConfig(name="labelled", source=PredictedClasses(path=run_of(spec).uri, **source), recipe=RECIPE)


def prepared(spec, **source):
    """The manifest, and its rows by example id with the names of their labels."""
    asked = request(spec, **source)
    (manifest,) = prepare([asked], spec.root)
    corpus = corpus_store(open_store(spec.root), asked)
    return manifest, rows_of(corpus, manifest)


def rows_of(corpus, manifest):
    names, rows = load_class_names(corpus), {}
    for split in manifest.splits.keys() & {"train", "val", "test"}:
        with ShardReader(corpus, manifest, split) as reader:
            for table in reader.row_groups(range(reader.split.num_row_groups)):
                for row in table.to_pylist():
                    rows[row["example_id"]] = {**row, "split": split, "names": [names[i] for i in row["labels"]]}
    return rows


def test_images_have_the_classes_that_the_model_gave_them(predicted, digits, monkeypatch):
    monkeypatch.setattr("vitline.vit.features.predict.PART_ROWS", 90)
    spec = predicted(top_k=3, splits=("train", "val"))
    rows = sorted(stored(spec)[0].values(), key=lambda row: (row["split"], row["row"]))
    manifest, found = prepared(spec, min_score=0.5, max_per_class=30)
    assert (manifest.single_label, manifest.has_weights, manifest.soft_labels) == (False, True, True)
    assert manifest.counts.num_found == len(rows)
    assert {row["split"] for row in found.values()} == {"train"}
    by_class, reasons = defaultdict(list), Counter()
    for row in rows:
        by_class[row["class"]].append(row)
    for of_class in by_class.values():
        of_class.sort(key=lambda row: -row["score"])  # stable
        for place, row in enumerate(of_class):
            reason = "low_score" if row["score"] < 0.5 else "class_full" if place >= 30 else None
            reasons[reason] += 1
            assert (row["example_id"] in found) == (reason is None)
    assert manifest.counts.refused == {"class_full": reasons["class_full"], "low_score": reasons["low_score"]}
    assert reasons["low_score"]
    original = rows_of(digits, load_manifest(digits))
    for row in rows:
        if (made := found.get(row["example_id"])) is None:
            continue
        expected = dict(zip(row["classes"], np.divide(row["scores"], sum(row["scores"])), strict=True))
        assert dict(zip(made["names"], made["weights"], strict=True)) == pytest.approx(expected, abs=1e-6)
        assert sum(made["weights"]) == pytest.approx(1, abs=1e-6)
        same = ("image", "group", "pixel_sha256")
        assert [made[name] for name in same] == [original[row["example_id"]][name] for name in same]


def test_hard_labels_are_the_most_probable_class_whatever_was_stored(predicted):
    spec = predicted(top_k=2, splits=("train",))
    manifest, found = prepared(spec, labels="hard", min_score=0)
    assert (manifest.single_label, manifest.soft_labels, manifest.counts.num_refused) == (True, False, 0)
    assert {key: row["names"] for key, row in found.items()} == {
        row["example_id"]: [row["class"]] for row in stored(spec)[0].values()
    }


def test_another_prediction_or_setting_makes_another_version(predicted):
    spec, other = predicted(splits=("train",)), predicted(splits=("train",), top_k=1)
    root = open_store(spec.root)
    versions = {
        corpus_version(root, request(*asked, **given))
        for asked, given in (
            ((spec,), {}),
            ((other,), {}),
            ((spec,), {"min_score": 0.2}),
            ((spec,), {"labels": "hard"}),
        )
    }
    assert len(versions) == 4


def test_what_is_no_finished_prediction_of_the_corpus_is_refused(predicted, digits, tmp_path):
    spec = predicted(splits=("train",))
    run = run_of(spec)
    with pytest.raises(
        ValueError, match=r"no-run is no run of a batch prediction\. `vitline model predict-corpus` makes"
    ):
        corpus_version(open_store(tmp_path), CorpusConfig(name="x", source=PredictedClasses(path=f"{tmp_path}/no-run")))
    with pytest.raises(ValueError, match=r"none of the 800 images is left \(low_score 800\)\. Lower source\.min_score"):
        prepare([request(spec, min_score=0.9999999)], spec.root)
    key = min(run.list(f"{FOLDER}/"))
    table = pq.read_table(BufferReader(run.read(key)))
    turned = tmp_path / "turned.parquet"
    pq.write_table(table.set_column(0, "example_id", table["example_id"].take(list(range(len(table)))[::-1])), turned)
    run.write(key, turned.read_bytes())
    with pytest.raises(Exception, match=r"where .* has .*\(row 0 of train\)\. Predict the classes again"):
        prepare([request(spec)], spec.root)
    config = run.read_json("config.json")
    run.write_json("config.json", {**config, "corpus_digest": "0" * 64})
    with pytest.raises(
        ValueError,
        match=r"is not the corpus that was predicted: its digest is .*, that of the predictions 000000000000",
    ):
        prepare([request(spec, min_score=0.2)], spec.root)
    run.write_json("state.json", {"state": "cancelled", "attempt": 1, "updated_at": 0.0})
    with pytest.raises(ValueError, match=r"is not finished; it is cancelled\. Let the same request go on to its end"):
        corpus_version(open_store(spec.root), request(spec))
