"""Forms of a branch, and of a pre-training from weights: the config, its plan, and what is refused."""

import json

import pytest

from vitline.data_prep.shard_format import load_class_names
from vitline.flows.catalog.lists import show_run
from vitline.flows.forms.forms import BranchRequest, PretrainRequest
from vitline.flows.forms.training_config import resolve_branch, resolve_pretrain
from vitline.flows.plans.training_cost import training_cost
from vitline.infra.config import replace
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.input.config import AugmentConfig
from vitline.vit.models.build import build_network
from vitline.vit.models.config import HybridConfig
from vitline.vit.recipes import recipe_named
from vitline.vit.run.branch import pin_parent


@pytest.fixture
def parent(begin_run, root):
    """Key of a run of 20 steps of 16 images, with checkpoints of steps 5 and 10."""
    run, key, _ = begin_run(root, "birds")
    for step in (5, 10):
        run.write_json(f"checkpoints/step-{step:09d}-a1/manifest.json", {})
    return key


def branch(root, parent, step=10, **fields):
    return resolve_branch(root, BranchRequest(parent=parent, step=step, **fields))


def test_a_branch_has_the_config_of_its_parent_but_for_what_is_named(root, parent, train_config):
    theirs = train_config("birds")
    training = branch(root, parent[:9], num_workers=2, overrides={"recipe.optim.peak_lr": 0.5})
    config = training.config
    assert config.name == "birds-branch"
    assert config.parent.run == open_store(root).child(f"runs/{parent}").uri
    assert (config.parent.step, config.parent.allow) == (10, ("recipe.optim.peak_lr",))
    assert config.recipe == replace(theirs.recipe, **{"optim.peak_lr": 0.5})
    assert config.execution == replace(theirs.execution, num_workers=2)
    assert branch(root, parent, name="owls").config.name == "owls"
    assert training_cost(training)["start"] == (
        f"network, optimizer, averages and position in the reading order from step 10 of {parent}; 10 steps are left; changed: "
        "recipe.optim.peak_lr: 0.001 -> 0.5"
    )


def test_a_cooldown_ends_so_many_images_after_the_checkpoint_and_keeps_the_schedule_before(root, parent):
    recipe = branch(root, parent, cooldown_images=16 * 4 + 7).config.recipe
    assert (recipe.total_steps, recipe.optim.cooldown_steps, recipe.optim.decay_steps) == (14, 4, 20)
    with pytest.raises(ValueError, match="cooldown_images=15 is less than one batch of 16 images"):
        branch(root, parent, cooldown_images=15)


def test_no_cooldown_begins_within_another_one(root, begin_run, parent):
    run = open_store(root).child(f"runs/{parent}")
    spec = run.read_json("config.json")
    spec["config"]["recipe"]["optim"]["cooldown_steps"] = 12
    run.write_json("config.json", spec)
    with pytest.raises(
        ValueError, match=r"in its cooldown at step 10, which began at step 8\. Branch from a checkpoint up to"
    ):
        branch(root, parent, cooldown_images=64)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"parent": "owls"}, "There is no run 'owls'"),
        ({"step": 7}, r"has no checkpoint of step 7; it keeps those of steps 5, 10 \(`vitline runs show birds-"),
        ({"overrides": {"recipe.model.depth": 1}}, "recipe.model.depth of a branch .* the weights of the parent's network"),
        ({"overrides": {"recipe.optim.peak_lrr": 1}}, "Did you mean 'recipe.optim.peak_lr'"),
        ({"overrides": {"corpus": "x"}}, "'corpus' cannot be overridden"),
        ({"overrides": {"recipe.total_steps": 10}}, "recipe.total_steps=10 must be more than 10"),
    ],
)  # fmt: skip
def test_a_wrong_branch_is_refused_in_one_sentence(root, parent, fields, says):
    with pytest.raises(ValueError, match=says):
        branch(root, **{"parent": parent, **fields})


def test_a_branch_that_has_begun_needs_the_checkpoint_of_its_parent_no_longer(root, parent):
    training, runs = branch(root, parent, step=5), open_store(root).child("runs")
    runs.child(parent).delete("checkpoints/step-000000005-a1/manifest.json")
    key = training.spec().run_key
    runs.child(key).write_json("checkpoints/step-000000007-a1/manifest.json", {})
    assert branch(root, parent, step=5).config == training.config


def test_runs_show_lists_checkpoints_and_branches_and_names_the_parent(root, parent):
    training, runs = branch(root, parent), open_store(root).child("runs")
    spec = training.spec()
    runs.child(spec.run_key).write_json("config.json", spec.model_dump(mode="json"))
    pin_parent(training.config.parent, spec.run_key)
    theirs, ours = (show_run(root, runs.child(key)) for key in (parent, spec.run_key))
    assert (theirs["checkpoints"], theirs["branches"]) == ([5, 10], [f"{spec.run_key} at step 10"])
    assert (ours["branch_of"], ours["checkpoints"]) == (f"{parent}@10", [])


@pytest.fixture
def weights(root, digits):
    """weights(classes): URI of a published model with the network of the recipe `digits`."""
    from vitline.data_prep.decode import DecodePolicy
    from vitline.vit.input.image_contract import ImageContract
    from vitline.vit.published.models import publish

    def make(classes, network=None):
        network = network or recipe_named("digits").make()[0].model
        contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=network.image_size_px))
        models = open_store(root).child("models")
        return publish(models, "before", "1", build_network(network, len(classes)), contract, classes, {})

    return make


def from_weights(root, digits, **fields):
    return resolve_pretrain(root, PretrainRequest(corpus=digits.uri, recipe="digits", **fields))


def test_a_pre_training_starts_from_a_model_or_the_run_that_published_it(root, digits, weights, begin_run):
    uri = weights(load_class_names(digits))
    run, key, attempt = begin_run(root, "first")
    with pytest.raises(ValueError, match=f"{key} has published no model; it is running"):
        from_weights(root, digits, init_from=key)
    write_state(run, "finished", attempt, model=uri)
    trainings = [from_weights(root, digits, init_from=name) for name in ("before", "before/1", uri, key)]
    assert {training.config.init_model for training in trainings} == {uri}
    assert {training.config.stage for training in trainings} == {"pretrain"}
    plain = from_weights(root, digits)
    assert plain.config.init_model is None
    assert "start" not in training_cost(plain)
    assert plain.spec().run_key != trainings[0].spec().run_key
    digest = open_store(uri).read_json("config.json")["digest"][:12]
    start = f"weights of before/1 (digest {digest}), with its head; optimizer, averages and reading order begin anew"
    assert training_cost(trainings[0])["start"] == start


def test_other_classes_get_a_new_head_and_another_network_is_refused(root, digits, weights):
    weights(["owl", "tit", "wren"])
    assert "with a new head for 10 classes" in training_cost(from_weights(root, digits, init_from="before"))["start"]
    with pytest.raises(ValueError, match=r"cannot be trained on as the requested one: depth: \d+ -> 5\. Request"):
        from_weights(root, digits, init_from="before", overrides={"recipe.model.depth": 5})
    with pytest.raises(ValueError, match="'init_model' cannot be overridden"):
        from_weights(root, digits, overrides={"init_model": "before"})


def test_a_network_of_another_architecture_is_refused(root, digits, weights):
    weights(["owl"], HybridConfig(image_size_px=32, stages=(1,), embed_dim=16, depth=1, num_heads=2, mlp_dim=32))
    with pytest.raises(ValueError, match=r"the requested one: architecture: hybrid -> vit\. Request the settings"):
        from_weights(root, digits, init_from="before")


def test_a_command_plans_a_branch(root, parent, vitline):
    code, out, err = vitline(
        "pretrain", "branch", parent, "--step", 10, "--cooldown-images", 64, "--plan", "--root", root, "--json"
    )
    assert code == 0, err
    plan = json.loads(out)
    assert plan["steps"] == 14
    assert plan["start"].endswith(
        "4 steps are left; changed: recipe.optim.cooldown_steps: 0 -> 4; recipe.optim.decay_steps: None -> 20; "
        "recipe.total_steps: 20 -> 14"
    )


def test_a_command_publishes_weights_of_another_codebase_and_starts_from_them(root, digits, vitline, tmp_path):
    from vitline.vit.convert.timm import write_timm

    network = recipe_named("digits").make()[0].model
    write_timm(build_network(network, 3), tmp_path / "weights", ["a", "b", "c"])
    recipe = ("--corpus", digits.uri, "--recipe", "digits", "--root", root, "--json")
    code, out, err = vitline("pretrain", "run", "--plan", *recipe, "--init-from", tmp_path / "weights")
    assert code == 0, err
    assert json.loads(out)["start"].startswith("weights of weights/")
    assert "with a new head for 10 classes" in json.loads(out)["start"]
