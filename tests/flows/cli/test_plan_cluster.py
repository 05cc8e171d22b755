"""`vitline plan cluster`: the rows of a training, where its speed comes from, its page, and mistakes."""

import json
import re
from html import unescape

import pytest

from vitline.flows.cli.groups.plan import ClusterOptions
from vitline.flows.forms.forms import PretrainRequest
from vitline.flows.plans import cluster_plan
from vitline.flows.plans.measured_speed import MeasuredSpeed
from vitline.flows.plans.training_plan import checkpoint_bytes
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.memory import num_weights
from vitline.vit.recipes import recipe_named

DIGITS = ("plan", "cluster", "--corpus", "digits", "--recipe", "digits", "--images-per-s", "100", "--repetitions", "20")


@pytest.fixture
def planned(vitline, digits_root):
    """planned(*options): what the command printed as JSON."""

    def call(*options):
        code, out, err = vitline(*DIGITS, *options, "--root", digits_root, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


def test_rows_are_those_of_the_training(planned):
    """16 lanes are 16 workers at most. Two nodes of two workers train 2 x as many images as one."""
    found = planned(
        "--gpus-per-node", "2", "--node-hour-price", "3", "--step-scatter", "0", "--failures-per-node-day", "0"
    )
    assert [(row["nodes"], row["workers"]) for row in found["rows"]] == [(1, 2), (2, 4), (4, 8), (8, 16)]
    assert "num_lanes=16" in found["not_possible"]["reason"]
    assert [row["images_per_s"] for row in found["rows"]][:2] == pytest.approx([200, 400])
    steps_s = 300 * 128 / 200
    assert found["rows"][0]["shares"]["steps"] == pytest.approx(steps_s / (found["rows"][0]["days"] * 86_400))
    assert found["rows"][1]["price"] == pytest.approx(2 * 3 * 24 * found["rows"][1]["days"])
    assert found["assumptions"]["gpus_per_node"] == 2


def test_a_training_is_counted_by_those_who_plan_it(digits_root, monkeypatch):
    """Gradients in float32 of all weights; 8-bit pixels of the digits as PNG; the bytes of a checkpoint as `--plan` says."""
    from vitline.flows.cli.training import requested_training
    from vitline.vit.cost.estimate import PlanGpus, demand_of

    fields = {"overrides": {"execution.sharding": "fsdp", "execution.min_workers": 1}}
    training = requested_training(digits_root, ["digits"], "digits", fields)
    found = cluster_plan.cluster_plan(training, ClusterAssumptions(repetitions=20), PlanGpus())
    weights = num_weights(training.config.recipe.model, 10)
    assert found.work.sent_bytes == 1.5 * 4 * weights
    assert found.work.checkpoint_bytes == checkpoint_bytes(training.config, weights)
    assert found.work.images_per_s == demand_of(training.config.recipe, 10, PlanGpus()).images_per_s
    assert found.work.min_workers == 1
    assert any(text.startswith("Elastic: ") for text in found.sentences())
    recipe, execution = recipe_named("digits").make()
    assert (found.work.total_steps, found.work.save_every_steps) == (recipe.total_steps, execution.save_every_steps)

    earlier = MeasuredSpeed("digits-0a1b", training.config, images_per_s=800.0, workers=4, hardware="a CPU")
    monkeypatch.setattr(cluster_plan, "measured_speeds", lambda root, config: iter([earlier]))
    found = cluster_plan.cluster_plan(training, ClusterAssumptions(repetitions=20), PlanGpus(), measured=True)
    assert found.work.images_per_s == 200
    assert "digits-0a1b: 800 images/s on 4 x a CPU" in found.speed


def test_the_page_draws_every_row(vitline, digits_root, tmp_path):
    page = tmp_path / "cluster.html"
    code, out, err = vitline(*DIGITS, "--gpus-per-node", "1", "--root", digits_root, "--page", page)
    assert code == 0, err
    assert str(page) in err
    assert "The knee: " in out
    text = unescape(page.read_text())
    assert len(re.findall("<svg", text)) == 3
    assert len(re.findall("<rect", text)) == 5 * 6, "six kinds of time for 1, 2, 4, 8 and 16 nodes"
    assert len(re.findall("the knee, ", text)) == 2
    for name, field in ClusterAssumptions.model_fields.items():
        assert name in text
        assert " ".join(field.description.replace("`", "").split()) in " ".join(text.split())


def test_the_form_takes_what_a_pre_training_takes():
    assert PretrainRequest.model_fields.keys() < ClusterOptions.model_fields.keys()
    assert not PretrainRequest.model_fields.keys() & ClusterAssumptions.model_fields.keys()


def test_mistakes_are_one_sentence(refused, digits_root, tmp_path):
    def plan(*options):
        return refused(*DIGITS, *options, "--root", digits_root)

    assert "link_bytes_per_s: must be more than 0, not 0" in plan("--link-bytes-per-s", "0")
    assert "failures_per_node_day: must be at most 1000, not 5000" in plan("--failures-per-node-day", "5000")
    assert "--images-per-s -1 must be more than 0" in plan("--images-per-s", "-1")
    assert "'H2000' is not known" in refused(*DIGITS[:6], "--gpu", "H2000", "--root", digits_root)
    assert "there is no finished training" in plan("--measured")
    assert "Give --images-per-s" in refused(*DIGITS[:6], "--set", "execution.device=cpu", "--root", digits_root)
    assert f"--page {str(tmp_path)!r} is not a file" in plan("--page", tmp_path)
    assert "num_lanes" in plan("--set", "recipe.input.num_lanes=512", "--set", "recipe.input.global_batch_size=1024")
