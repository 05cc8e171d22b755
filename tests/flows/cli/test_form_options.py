"""Each option of a command sets one field of its form. Scripts rely on this table."""

import pytest

from vitline.flows.forms import forms


class Captured(Exception):
    """Ends a command once its form is known."""


@pytest.fixture
def form_of(vitline, monkeypatch, tmp_path):
    """form_of(form, command line): the fields that the command sets to other values than the defaults of the form."""

    def call(form, line):
        found = {}

        def capture(cls, fields, **_):
            found.update(cls(**fields).model_dump(exclude_defaults=True))
            raise Captured

        monkeypatch.setattr(form, "model_validate", classmethod(capture))
        with pytest.raises(Captured):
            vitline(*line.split(), "--root", tmp_path)
        return found

    return call


@pytest.mark.parametrize(
    ("form", "line", "fields"),
    [
        (
            forms.PrepareRequest,
            "data prepare --source s3://raw/x.csv --kind table --name birds --decontaminate pets --decontaminate dtd "
            "--set recipe.val_per_class=5",
            {"source": "s3://raw/x.csv", "kind": "table", "name": "birds", "decontaminate": ("pets", "dtd"),
             "overrides": {"recipe.val_per_class": 5}},
        ),
        (forms.PrepareRequest, "data prepare --source x --add-to a/1", {"source": "x", "add_to": "a/1"}),
        (
            forms.PretrainRequest,
            "pretrain run --corpus a --corpus b=0.5 --recipe digits --class-map prefixed --init-from m@best --set execution.num_workers=2",
            {"corpus": "a", "mix_with": ({"corpus": "b", "weight": 0.5},), "recipe": "digits", "class_map": "prefixed",
             "init_from": "m@best", "overrides": {"execution.num_workers": 2}},
        ),
        (forms.PretrainRequest, "pretrain run --corpus a=2 --corpus b --recipe x.yaml --set recipe.total_steps=3",
         {"corpus": "a", "corpus_weight": 2.0, "mix_with": ({"corpus": "b"},),
          "overrides": {"recipe": "x.yaml", "recipe.total_steps": 3}}),
        (
            forms.SelfTrainRequest,
            "pretrain self-train t --corpus a --unlabelled b --recipe digits --split train --split val --labels hard --top-k 3 "
            "--min-score 0.5 --max-per-class 7 --predicted-weight 2",
            {"teacher": "t", "corpus": "a", "unlabelled": "b", "recipe": "digits", "splits": ("train", "val"), "labels": "hard",
             "top_k": 3, "min_score": 0.5, "max_per_class": 7, "predicted_weight": 2.0},
        ),
        (
            forms.BranchRequest, "pretrain branch p --step 4 --cooldown-images 64 --name q --set recipe.total_steps=9",
            {"parent": "p", "step": 4, "cooldown_images": 64, "name": "q", "overrides": {"recipe.total_steps": 9}},
        ),
        (
            forms.FinetuneRequest,
            "finetune run --model m --corpus a --protocol vit-paper --steps 5 --lr 0.1 --batch 8 --image-size 32 --set recipe.x=1",
            {"model": "m", "corpus": "a", "protocol": "vit-paper", "steps": 5, "peak_lr": 0.1, "global_batch_size": 8,
             "image_size_px": 32, "overrides": {"recipe.x": 1}},
        ),
        (forms.FinetuneRequest, "finetune run --model m --corpus a --protocol lab.tasks:mine",
         {"model": "m", "corpus": "a", "overrides": {"protocol": "lab.tasks:mine"}}),
        (forms.EvaluateRequest, "evaluate run --model m --task a --protocol x.yaml --set protocol.total_steps=1",
         {"model": "m", "tasks": ("a",), "overrides": {"protocol": "x.yaml", "protocol.total_steps": 1}}),
        (
            forms.EvaluateRequest,
            "evaluate run --model m --task a --task b --seed 2 --num-seeds 3 --from-scratch --set protocol.total_steps=1",
            {"model": "m", "tasks": ("a", "b"), "protocol": "vit-paper", "seed": 2, "num_seeds": 3, "from_scratch": True,
             "overrides": {"protocol.total_steps": 1}},
        ),
        (
            forms.EvaluateRequest, "evaluate run --model m --task a --protocol fewshot --protocol linear",
            {"model": "m", "tasks": ("a",), "protocol": ["fewshot", "linear"]},
        ),
        (
            forms.PredictRequest, "model predict-corpus m a --split test --top-k 2",
            {"model": "m", "corpus": "a", "splits": ("test",), "top_k": 2},
        ),
        (
            forms.CollectGarbageRequest,
            "ops collect-garbage --delete --older-than-days 1 --keep-checkpoints 2 --unfinished-days 3 --flow-runs-days 4 --keep a "
            "--keep b",
            {"dry_run": False, "older_than_days": 1.0, "keep_checkpoints": 2, "unfinished_days": 3.0, "flow_runs_days": 4.0,
             "keep": ("a", "b")},
        ),
        (forms.CollectGarbageRequest, "ops collect-garbage", {}),
    ],
)  # fmt: skip
def test_options_are_fields_of_the_form(form_of, form, line, fields):
    assert form_of(form, line) == fields
