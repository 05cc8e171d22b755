"""Batch prediction: every image of the corpus once, with the classes of one forward pass; what was stored is not computed again."""

from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import BufferReader

from vitline.data_prep.shard_format import load_class_names, load_manifest
from vitline.flows.forms.evaluation_plan import resolve_predict
from vitline.flows.forms.forms import PredictRequest
from vitline.infra.storage import open_store
from vitline.vit.features.predict import Counts, Predictor, predict
from vitline.vit.features.prediction_plan import FOLDER
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.published.models import load_model

from ..vtab.conftest import ARCHITECTURE, VIEW, eval_batches, models, published  # noqa: F401


@pytest.fixture
def spec_of(tmp_path, digits, models):  # noqa: F811
    """spec_of(**fields): the trained network on the digits."""
    root = str(tmp_path / "root")

    def make(**fields):
        given = {"model": models.trained, "corpus": digits.uri, **fields}
        return resolve_predict(root, PredictRequest.model_validate(given))

    return make


def run_of(spec):
    return open_store(spec.root).child(f"runs/{spec.run_key}")


def carried_out(spec, stop_after=None, asked=None):
    """The counts, computed in this process; `asked` gets the parts."""

    def compute(root, parts):
        if asked is not None:
            asked.extend(parts)
        return islice(Predictor(root, batch_size=100).ensure(parts), stop_after)

    return predict(run_of(spec), spec, compute)


def stored(spec):
    """The rows of all files of a run, by split and row."""
    run = run_of(spec)
    rows = [row for key in run.list(f"{FOLDER}/") for row in pq.read_table(BufferReader(run.read(key))).to_pylist()]
    return {(row["split"], row["row"]): row for row in rows}, len(rows)


def test_every_image_has_the_classes_of_one_forward_pass(spec_of, digits, models, monkeypatch):  # noqa: F811
    monkeypatch.setattr("vitline.vit.features.prediction_plan.PART_ROWS", 90)
    spec, manifest, model = spec_of(top_k=3), load_manifest(digits), load_model(models.trained)
    assert spec.splits == ("train", "val", "test")
    counts = carried_out(spec)
    found, number = stored(spec)
    assert number == len(found) == counts.images == counts.known == 1797
    assert len({row["example_id"] for row in found.values()}) == 1797
    hits, names = 0, load_class_names(digits)
    for split in spec.splits:
        num_rows = manifest.split(split).num_rows
        with eval_batches(digits, manifest, split, VIEW, batch_size=num_rows) as batches:
            (batch,) = batches
        with torch.inference_mode():
            scores, ids = model.network(model.normalised(batch.images.numpy())).softmax(dim=1).topk(3)
        rows = [found[split, row] for row in range(num_rows)]
        np.testing.assert_allclose([row["scores"] for row in rows], scores, atol=1e-5)
        apart = (scores[:, :-1] - scores[:, 1:]).min(dim=1).values > 1e-4  # else rounding may change their order
        assert [row["class_ids"] for row, sure in zip(rows, apart, strict=True) if sure] == ids[apart].tolist()
        assert [row["labels"] for row in rows] == [[names[label]] for label in batch.labels]
        assert all(row["classes"] == [model.classes[i] for i in row["class_ids"]] for row in rows)
        assert all((row["class"], row["score"]) == (row["classes"][0], row["scores"][0]) for row in rows)
        hits += sum(row["class"] in row["labels"] for row in rows)
    assert counts.hits == hits > 900


def test_an_interrupted_run_computes_only_what_is_missing(spec_of, monkeypatch):
    monkeypatch.setattr("vitline.vit.features.prediction_plan.PART_ROWS", 200)
    spec = spec_of(splits=("test",))
    assert carried_out(spec, stop_after=1) is None
    before, asked = set(run_of(spec).list(f"{FOLDER}/")), []
    assert 1 <= len(before) < 4
    assert carried_out(spec, asked=asked) == Counts(797, 797, stored_hits(spec))
    assert {part.key for part in asked}.isdisjoint(key.removeprefix(f"{FOLDER}/") for key in before)
    again = []
    carried_out(spec, asked=again)
    assert again == []


def stored_hits(spec):
    return sum(row["class"] in row["labels"] for row in stored(spec)[0].values())


def test_classes_that_the_model_does_not_know_count_as_neither_right_nor_wrong(spec_of, tmp_path):
    torch.manual_seed(0)
    network = VisionTransformer(ARCHITECTURE, 3)
    few = published(str(tmp_path), "few", network, ["3", "5", "cat"])
    spec = spec_of(model=few, splits=("val",), top_k=50)
    counts = carried_out(spec)
    rows = stored(spec)[0].values()
    known = [row for row in rows if row["labels"][0] in ("3", "5")]
    assert 0 < counts.known == len(known) < counts.images == len(rows)
    assert counts.hits == sum(row["class"] in row["labels"] for row in known)
    assert {len(row["classes"]) for row in rows} == {3}
    np.testing.assert_allclose([sum(row["scores"]) for row in rows], 1, atol=1e-5)


def test_a_diverged_model_is_refused_with_the_row(spec_of, tmp_path, monkeypatch):
    network = VisionTransformer(ARCHITECTURE, 10)
    broken = published(str(tmp_path), "broken", network, [str(digit) for digit in range(10)])
    real = VisionTransformer.forward
    monkeypatch.setattr(VisionTransformer, "forward", lambda self, images: real(self, images) * float("nan"))
    with pytest.raises(ValueError, match=r"not finite for row 0 of split 'test' of .*use another model"):
        carried_out(spec_of(model=broken, splits=("test",)))


def test_the_same_request_is_the_same_run_and_mistakes_are_named(spec_of):
    assert spec_of().run_key == spec_of(splits=("train", "val", "test", "val"), top_k=5).run_key
    others = (spec_of(top_k=2), spec_of(splits=("test",)))
    assert len({spec_of().run_key, *(other.run_key for other in others)}) == 3
    assert spec_of(top_k=99).top_k == 10
    with pytest.raises(ValueError, match=r"splits has 'tset', which is no split of digits; .* Did you mean 'test'"):
        spec_of(splits=("tset",))
    with pytest.raises(ValueError, match="no corpus 'birds'"):
        spec_of(corpus="birds")
