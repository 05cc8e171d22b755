"""What several protocols, and a whole pipeline, will take."""

import json

import pytest

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.plans.transfer_plan import memory_verdict, pipeline_cost, sum_of
from vitline.infra.storage import open_store
from vitline.vit.cost.estimate import PlanGpus, hours_of
from vitline.vit.models.flops import forward_flops

GPUS = PlanGpus("0.01TFLOPS-48GB", 0.5, 2.0)
PROTOCOLS = ("fewshot", "linear", "small-images")


def cost_of(root, gpus=GPUS, **changes):
    given = {"corpus": "digits", "recipe": "digits", "tasks": ("digits",), "protocol": PROTOCOLS, **changes}
    return pipeline_cost(root, resolve_pipeline(root, PipelineRequest(**given)), gpus)


def test_a_pipeline_takes_its_training_and_each_protocol_for_each_seed(digits_root):
    once, twice = cost_of(digits_root), cost_of(digits_root, overrides={"nights.num_seeds": 2})
    assert [each["protocol"] for each in once["transfer"]] == [*PROTOCOLS]
    probe, second_probe, tuned = once["transfer"]
    corpus = Corpora(open_store(digits_root)).named("digits").manifest
    assert probe["scored_images"] >= corpus.counts.num_accepted // 2
    assert second_probe["scored_images"] <= probe["scored_images"], "features are computed once"
    assert (tuned["trainings"], tuned["finished"]) == (2 * 4, 0), "the model to come, and the control"
    assert (tuned["gpus_per_trial"], tuned["trials_per_gpu"]) == (1, 4)
    assert tuned["device_hours"] / 8 <= tuned["node_hours"] <= tuned["device_hours"]
    assert tuned["trained_images"] == 2 * 4 * 100 * 64
    training = hours_of(1e18 * once["pretrain"]["training_exaflop"], 0.5e10)
    assert once["pretrain_device_hours"] == pytest.approx(training)
    assert once["device_hours"] == pytest.approx(training + sum(each["device_hours"] for each in once["transfer"]))
    assert twice["device_hours"] == pytest.approx(2 * once["device_hours"])
    assert twice["transfer"][2]["node_hours"] == pytest.approx(2 * tuned["node_hours"]), "one seed after the other"
    assert once["usd"] == 2 * once["device_hours"]
    part = cost_of(digits_root, overrides={"nights.advance_images": 19_200, "nights.cooldown_images": 1_920})
    assert part["pretrain_device_hours"] == pytest.approx(training * 21_120 / once["pretrain"]["images"])
    assert once["deadline"] == "no deadline"
    assert memory_verdict(tuned, GPUS) == (
        "fits: up to 4 trainings at a time on a 0.01TFLOPS-48GB, with micro-batches of 64 images or more"
    )
    network = resolve_pipeline(digits_root, PipelineRequest(corpus="digits", recipe="digits", tasks=("digits",)))
    flop = forward_flops(network.training.recipe.model, 10)
    assert probe["exaflop"] == pytest.approx(flop * probe["scored_images"] / 1e18)


def test_the_sum_of_protocols_fits_where_each_fits():
    fits, other = {"device_hours": 1.0, "fits": True, "protocol": "a"}, {"device_hours": 2.0, "fits": False}
    assert sum_of([fits]) is fits
    assert sum_of([fits, other]) == {"device_hours": 3.0, "fits": False}
    assert "not one image of these trainings fits into the memory of 0.01TFLOPS-48GB" in memory_verdict(other, GPUS)


def test_what_is_not_prepared_is_named_and_not_counted(digits_root):
    cost = cost_of(digits_root, corpus="icons", tasks=("digits", "letters"), protocol="small-images")
    assert cost["not_planned"] == ["icons", "letters"]
    assert "pretrain" not in cost
    assert cost["device_hours"] == cost["transfer"][0]["device_hours"]


FORM = ["corpus=digits", "recipe=digits", 'tasks=["digits"]', 'protocol=["fewshot","small-images"]']


def test_the_command_plans_a_deployment_and_starts_nothing(digits_root, vitline, refused):
    asked = [part for field in FORM for part in ("--set", field)]
    where = ("--plan", "--root", digits_root, "--gpu", "H100", *asked)
    code, out, err = vitline("flows", "trigger", "pretrain-then-transfer/nightly", *where)
    assert code == 0, err
    lines = " ".join(out.split())
    for part in (
        "pre-training",
        "evaluation with fewshot",
        "evaluation with small-images",
        "In all ",
        "Deadline of 6 h",
    ):
        assert part in lines
    code, out, _ = vitline("flows", "trigger", "pretrain-then-transfer/nightly", *where, "--json")
    assert [each["protocol"] for each in json.loads(out)["transfer"]] == ["fewshot", "small-images"]
    assert "--plan is for deployments of pretrain-then-transfer, not for predict/default" in refused(
        "flows", "trigger", "predict/default", "--plan", "--root", digits_root
    )
