"""What an evaluation will take, and the model that it evaluates."""

import json

import pytest
import torch
from typer.testing import CliRunner

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.cli.main import app
from vitline.flows.cli.models import published_uri
from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.flows.plans.evaluation_cost import task_costs
from vitline.flows.plans.evaluation_spec import evaluation_spec
from vitline.flows.runs.evaluate_tasks import has_scores
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, plan_task_sweeps
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.flops import forward_flops
from vitline.vit.published.models import load_model, publish

NETWORK = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


@pytest.fixture
def model(root):
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    network = build_network(NETWORK, 3)
    return publish(open_store(root).child("models"), "tiny", "1", network, contract, ["a", "b", "c"], {})


@pytest.fixture
def plan(root, model, digits):
    request = EvaluateRequest(model=model, tasks=(digits.uri,), from_scratch=True)
    (plan,) = resolve_evaluate(root, request)
    return plan


def test_a_plan_counts_the_remaining_work(root, plan, digits):
    pretrained, scratch = task_costs(root, plan)
    splits = load_manifest(digits).splits
    assert (pretrained.start, scratch.start) == ("pre-trained", "from scratch")
    assert (pretrained.trainings, pretrained.finished) == (4, 0)
    assert pretrained.trained_images == 4 * 100 * 64
    assert pretrained.scored_images == 3 * 200 + splits["test"].num_rows
    flop = forward_flops(pretrained.recipe.model, 10)
    assert pretrained.flop == flop * (3 * pretrained.trained_images + pretrained.scored_images)

    spec = EvaluationSpec(run_key="plan", root=root, **plan.model_dump(exclude={"rescore", "note"}))
    done = plan_task_sweeps(spec)[0].select_trials()[1]
    result = TrialResult(
        key=done.key, top1=0.5, loss=1.0, num_examples=200, majority_fraction=0.1, train_losses=(), wall_s=1.0, cpu_s=1.0,
        diverged=False,
    )  # fmt: skip
    open_store(root).child("trials").create(f"{done.key}.json", result.model_dump_json().encode())
    again, _ = task_costs(root, plan)
    assert (again.trainings, again.finished, again.trained_images) == (4, 1, 3 * 100 * 64)
    for task_sweep in plan_task_sweeps(spec):
        open_store(root).write_json(task_sweep.score_key, {})
    assert [task.trained_images for task in task_costs(root, plan)] == [0, 0]
    assert task_costs(root, replace(plan, rescore=True)) == [pretrained, scratch]


def test_a_plan_counts_no_backward_pass_of_what_is_not_trained(root, model, digits):
    def planned(**optim):
        changes = {f"protocol.optim.{name}": value for name, value in optim.items()}
        (plan,) = resolve_evaluate(root, EvaluateRequest(model=model, tasks=(digits.uri,), overrides=changes))
        (task,) = task_costs(root, plan)
        return task, task.flop - forward_flops(task.recipe.model, 10) * task.scored_images

    probe, of_probe = planned(frozen="backbone")
    forward, head = forward_flops(probe.recipe.model, 10), 2 * probe.recipe.model.embed_dim * 10
    assert of_probe == (forward + head) * probe.trained_images
    _, of_all = planned()
    assert of_all == 3 * forward * probe.trained_images
    _, of_both = planned(head_first_steps=25)
    assert of_both == pytest.approx(0.25 * of_probe + 0.75 * of_all), "of 100 steps"


def test_a_plan_says_what_the_models_to_keep_take(root, model, digits):
    options = ["--model", model, "--task", digits.uri, "--protocol", "small-images", "--root", root, "--plan"]

    def shown(*more):
        return CliRunner().invoke(app, ["evaluate", "run", *options, *more]).output

    kept = json.loads(shown("--json", "--keep-models", "--num-seeds", "2"))["total"]["kept_bytes"]
    (network,) = {
        task.recipe.model
        for task in task_costs(root, *resolve_evaluate(root, EvaluateRequest(model=model, tasks=(digits.uri,))))
    }
    assert kept == 2 * 4 * sum(value.numel() for value in build_network(network, 10).state_dict().values())
    assert " The models to keep take 0.01 MB." in " ".join(shown("--keep-models").split())
    assert "to keep" not in shown()


def test_an_evaluation_has_begun_with_a_score_of_the_model_but_not_of_the_control(root, plan):
    spec, store = evaluation_spec("scores", plan, root), open_store(root)
    pretrained, scratch = plan_task_sweeps(spec)
    for task_sweep, begun in ((scratch, False), (pretrained, True)):
        store.write_json(task_sweep.score_key, {})
        assert has_scores(spec) == begun


def test_the_command_estimates_hours_and_cost(root, model, digits):
    options = ["--model", model, "--task", digits.uri, "--protocol", "small-images", "--root", root]
    shown = CliRunner().invoke(
        app,
        [
            "evaluate",
            "run",
            "--plan",
            *options,
            "--gpu",
            "0.01TFLOPS",
            "--mfu",
            "0.1",
            "--gpu-hour-price",
            "3600",
            "--num-seeds",
            "2",
            "--json",
        ],
    )
    assert shown.exit_code == 0, shown.output
    total = json.loads(shown.stdout)["total"]
    assert total["trainings"] == 8
    assert (total["trials_per_gpu"], total["micro_batch"], total["fits"]) == (4, 64, True)
    assert total["device_hours"] == pytest.approx(total["exaflop"] * 1e18 / 1e9 / 3600)
    assert total["usd"] == pytest.approx(3600 * total["device_hours"])
    shown = CliRunner().invoke(app, ["evaluate", "run", "--plan", *options])
    assert "TFLOP/s, 35% of the peak of H200" in " ".join(shown.output.split())


def test_a_probe_needs_one_pass_over_the_splits_that_it_reads(root, model, digits):
    (task,) = task_costs(
        root, *resolve_evaluate(root, EvaluateRequest(model=model, tasks=(digits.uri,), protocol="linear"))
    )
    splits = load_manifest(digits).splits
    assert (task.trainings, task.trained_images) == (0, 0)
    # Splits share the rows of the segments that they consist of; only parts that a split cuts are computed twice.
    assert 1000 <= task.scored_images - splits["test"].num_rows <= 2000
    assert task.flop == forward_flops(NETWORK, 10) * task.scored_images


def test_weights_of_another_codebase_are_published_once_and_then_used(root, tmp_path):
    from vitline.vit.convert.timm import write_timm

    torch.manual_seed(0)
    network = build_network(NETWORK, 3)
    write_timm(network, tmp_path / "My ViT", ["a", "b", "c"])
    uri = published_uri(root, str(tmp_path / "My ViT"))
    assert uri.startswith(f"{open_store(root).uri}/models/my-vit/")
    assert load_model(uri).network.num_classes == 3
    assert (
        published_uri(root, str(tmp_path / "My ViT"))
        == published_uri(root, uri)
        == published_uri(root, "my-vit")
        == uri
    )
    with pytest.raises(ValueError, match="'mine' is not a published model"):
        published_uri(root, "mine")


def test_the_plan_of_several_protocols_has_each_and_their_sum(root, model, digits, vitline):
    asked = [part for protocol in ("fewshot", "linear", "small-images") for part in ("--protocol", protocol)]
    where = ("--model", model, "--task", digits.uri, "--root", root, "--plan")
    code, out, err = vitline("evaluate", "run", *where, *asked, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert [each["protocol"] for each in shown["protocols"]] == ["fewshot", "linear", "small-images"]
    for name in ("device_hours", "scored_images", "trainings"):
        assert shown["total"][name] == pytest.approx(sum(each[name] for each in shown["protocols"]))
    assert {task["protocol"] for task in shown["tasks"]} == {"fewshot", "linear", "small-images"}
    code, out, _ = vitline("evaluate", "run", *where, *asked)
    assert "All protocols: " in out
    assert "Memory fits: up to 4 trainings at a time on a H200" in " ".join(out.split())
