"""Forms of pre-trainings resolved to configs: steps and warmup from a budget, overrides."""

import pytest

from vitline.data_prep.plan import mixture_leakage
from vitline.data_prep.plan.mixture_leakage import MixtureLeak
from vitline.flows.cli.training import weighted
from vitline.flows.forms.forms import PretrainRequest
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.plans.training_cost import training_cost
from vitline.flows.runs.pretrain import mixture_leaks
from vitline.vit.recipes import recipe_named


def test_a_budget_of_images_sets_steps_and_shortens_the_warmup(digits_root):
    recipe, _ = recipe_named("digits").make()
    batch = recipe.input.global_batch_size
    config = resolve_pretrain(
        digits_root, PretrainRequest(corpus="digits", recipe="digits", train_images=30 * batch + 7)
    ).config
    assert config.recipe.total_steps == 30
    assert config.recipe.optim.warmup_steps == recipe.optim.warmup_steps * 30 // recipe.total_steps
    assert config.name == "digits-digits"
    assert config.val_split == "val"


def test_an_override_takes_precedence_over_a_field_and_is_validated(digits_root):
    fields = {"corpus": "digits", "recipe": "digits", "peak_lr": 0.5}
    assert resolve_pretrain(digits_root, PretrainRequest(**fields)).config.recipe.optim.peak_lr == 0.5
    changed = PretrainRequest(**fields, overrides={"recipe.optim.peak_lr": 0.25})
    assert resolve_pretrain(digits_root, changed).config.recipe.optim.peak_lr == 0.25
    with pytest.raises(ValueError, match=r"no group 'recipe\.optimm'"):
        resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={"recipe.optimm.peak_lr": 1}))
    for path in ("corpus", "protocol.total_steps"):  # an override without effect is refused
        with pytest.raises(ValueError, match=path):
            resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={path: 1}))


def test_more_workers_than_lanes_are_refused_unless_an_override_makes_more_lanes(digits_root):
    fields = {"corpus": "digits", "recipe": "digits", "num_workers": 24}
    lanes = {"recipe.input.num_lanes": 24, "recipe.input.global_batch_size": 48}
    assert resolve_pretrain(digits_root, PretrainRequest(**fields, overrides=lanes)).config.execution.num_workers == 24
    with pytest.raises(ValueError, match=r"num_workers=24 is more than recipe\.input\.num_lanes=16"):
        resolve_pretrain(digits_root, PretrainRequest(**fields))


MIXED = {"corpus": "birds", "mix_with": [{"corpus": "city", "weight": 0.5}], "recipe": "digits"}


def requested(root, **changes):
    return resolve_pretrain(root, PretrainRequest.model_validate(MIXED | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix_with": [], "class_map": "prefixed"}, "class_map='prefixed' has an effect in a mixture only"),
        ({"mix_with": [], "corpus_weight": 2}, "corpus_weight=2.0 has an effect in a mixture only"),
        ({"mix_with": [{"corpus": "towns"}]}, "towns"),
        ({"mix_with": [{"corpus": "birds"}]}, "has birds/.* twice. Name it once"),
        ({"class_map": "prefix"}, "There is no class table at .*prefix. A class map is 'names', 'prefixed'"),
        ({"overrides": {"mixture.class_map": "prefixed"}}, r"'mixture\.class_map' cannot be overridden"),
        ({"corpus_weight": 1 / 3}, "so many digits"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(two_corpora, changes, message):
    with pytest.raises(ValueError, match=message):
        requested(two_corpora, **changes)


def test_the_plan_of_a_mixture_has_the_share_and_epochs_of_each_corpus(two_corpora):
    small = {
        "recipe.input.global_batch_size": 12,
        "recipe.input.num_lanes": 4,
        "recipe.total_steps": 60,
        "recipe.optim.warmup_steps": 1,
    }
    training = requested(two_corpora, corpus_weight=1.0, overrides=small)
    assert training.config.name == "birds-and-city-digits"
    assert [each.weight for each in training.config.mixture.corpora] == [1.0, 0.5]
    cost = training_cost(training)
    assert cost["corpus"]["name"] == "birds + city"
    assert cost["corpus"]["classes"] == 4  # owl is in both
    birds, city = cost["mixture"]["birds"], cost["mixture"]["city"]
    assert (round(birds["share"], 9), round(city["share"], 9)) == (round(2 / 3, 9), round(1 / 3, 9))
    assert birds["epochs"] * birds["images"] == pytest.approx(480)
    assert city["epochs"] * city["images"] == pytest.approx(240)
    with pytest.raises(ValueError, match=r"(birds|city)/.*: num_lanes=\d+ is more than the"):
        training_cost(
            requested(
                two_corpora, overrides=small | {"recipe.input.global_batch_size": 256, "recipe.input.num_lanes": 128}
            )
        )
    with pytest.raises(ValueError, match="examples of a batch of 12, and at least one is needed"):
        training_cost(requested(two_corpora, corpus_weight=99, overrides=small))


def test_options_of_the_command_are_the_fields_of_the_form():
    assert weighted(["s3://b/year=2024"]) == {"corpus": "s3://b/year=2024"}
    two = {"corpus": "birds", "corpus_weight": 1.0, "mix_with": [{"corpus": "city", "weight": 0.3}]}
    assert weighted(["birds", "city=0.3"]) == two
    assert weighted(["birds=2", "s3://b/year=x"])["mix_with"] == [{"corpus": "s3://b/year=x", "weight": 1.0}]


def test_leakage_of_all_corpora_is_said_for_a_mixture_only(two_corpora, monkeypatch):
    found = MixtureLeak("birds/1", "city/2", "val", 3)
    monkeypatch.setattr(mixture_leakage, "find_mixture_leaks", lambda corpora, root, **given: [found])
    expected = "birds/1: 3 training images match the val split of city/2; prepare birds with --decontaminate city to leave them out"
    assert mixture_leaks(requested(two_corpora))[-1] == expected
    assert mixture_leaks(requested(two_corpora, mix_with=[])) == []
