"""Protocols, compared with the numbers of the papers, and how they depend on a task's size, images and name."""

import pytest

from vitline.infra.config import replace
from vitline.vit.evaluation.protocols import Protocol, TaskFacts, known_protocols, over_seeds, protocol_named
from vitline.vit.models.variants import network_variant


def facts(**changes) -> TaskFacts:
    given = {
        "name": "birds",
        "num_train": 1000,
        "max_lanes": 100,
        "mean_area_px": 500.0 * 375,
        "num_classes": 47,
        "single_label": True,
    }
    return TaskFacts.model_validate(given | changes)


def settings(protocol_name: str, variant: str = "vit-b16", seed: int = 0, **changes):
    protocol = protocol_named(protocol_name)
    assert isinstance(protocol, Protocol)
    return protocol.settings(network_variant(variant), facts(**changes), seed)


def grid(recipes):
    return [(r.optim.peak_lr, r.total_steps, r.optim.warmup_steps) for r in recipes]


def test_vit_paper_has_one_setting_for_all_tasks_of_vtab():
    (recipe,) = settings("vit-paper")
    augment, optim = recipe.input.augment, recipe.optim
    assert grid([recipe]) == [(0.01, 2500, 200)]
    assert (optim.optimizer, optim.beta1, optim.schedule, optim.clip_norm, optim.weight_decay) == (
        "sgd", 0.9, "cosine", 1.0, 0.0
    )  # fmt: skip
    assert recipe.input.global_batch_size == 512
    assert (augment.image_size_px, augment.train_crop, augment.train_resize_px) == (384, "random", 448)
    assert (augment.flip, augment.antialias, augment.eval_resize) == (True, False, "square")
    assert recipe.model.image_size_px == 384
    assert not recipe.model.pre_logits


@pytest.mark.parametrize(
    "protocol", ["small-images", "vit-paper", "vit-paper-transfer", "bit-hyperrule", "four-settings"]
)
def test_tasks_with_several_labels_are_trained_with_the_sigmoid_loss(protocol):
    one, several = settings(protocol), settings(protocol, single_label=False)
    assert {(r.loss, r.model.head_bias_init) for r in one} == {("softmax", 0.0)}
    assert {(r.loss, r.model.head_bias_init) for r in several} == {("sigmoid", -3.83)}  # 1 / (1 + e^3.83) is 1 / 47
    assert str(settings(protocol, single_label=False, num_classes=2)[0].model.head_bias_init) == "0.0"  # not -0.0
    of_21k = settings(protocol, single_label=False, num_classes=21_843)[0].model
    assert of_21k.head_bias_init == pytest.approx(-10.0, abs=0.01)  # that of the paper's pre-training


def test_protocols_of_papers_train_in_bfloat16():
    precise = {
        name for name, each in known_protocols().items() if isinstance(each, Protocol) and each.precision == "float32"
    }
    assert precise == {"small-images"}
    assert {recipe.precision for recipe in settings("vit-paper")} == {"bfloat16"}


def test_vit_paper_v1_and_the_four_settings_choose_among_four():
    assert [g[:2] for g in grid(settings("vit-paper-v1"))] == [(0.01, 1000), (0.1, 1000), (0.01, 10_000), (0.1, 10_000)]
    sweep = settings("four-settings")
    assert [g[:2] for g in grid(sweep)] == [(0.1, 2500), (0.01, 2500), (0.1, 10_000), (0.01, 10_000)]
    augment = sweep[0].input.augment
    assert (augment.image_size_px, augment.train_crop, augment.flip, augment.antialias) == (224, "none", False, False)
    assert (sweep[0].optim.schedule, sweep[0].optim.milestones) == ("staircase", (0.3, 0.6, 0.9))


@pytest.mark.parametrize(
    ("data_set", "num_train", "rates", "steps"),
    [
        ("flowers102", 1020, (0.001, 0.003, 0.01, 0.03), 500),
        ("pets", 3680, (0.001, 0.003, 0.01, 0.03), 500),
        ("cifar10", 50_000, (0.001, 0.003, 0.01, 0.03), 10_000),
        ("imagenet", 1_281_167, (0.003, 0.01, 0.03, 0.06), 20_000),
    ],
)
def test_settings_for_full_data_sets_follow_table_4(data_set, num_train, rates, steps):
    recipes = settings("vit-paper-transfer", name=data_set, num_train=num_train)
    assert [g[:2] for g in grid(recipes)] == [(rate, steps) for rate in rates]
    first = settings("vit-paper-transfer-v1", name=data_set, num_train=num_train)
    assert [r.optim.peak_lr for r in first] == [rate for rate in rates if rate != 0.06]


@pytest.mark.parametrize(("variant", "size", "square"), [("vit-l16", 512, 597), ("vit-h14", 518, 604)])
def test_imagenet_as_in_table_2_uses_whole_patches_and_averages_weights(variant, size, square):
    recipe = settings("vit-paper-imagenet-512", variant, num_train=1_281_167)[0]
    assert (recipe.model.image_size_px, recipe.input.augment.train_resize_px) == (size, square)
    assert recipe.average_decay == 0.9999
    assert settings("vit-paper-transfer", variant)[0].model.image_size_px == 384


def test_bit_hyperrule_uses_a_lower_resolution_for_small_images():
    (recipe,) = settings("bit-hyperrule", "bit-r50x1", mean_area_px=64 * 64)
    assert (recipe.model.image_size_px, recipe.input.augment.train_resize_px) == (128, 160)
    (recipe,) = settings("bit-hyperrule", "bit-r50x1", mean_area_px=96 * 96)  # Patch Camelyon and smallNORB
    assert (recipe.model.image_size_px, recipe.input.augment.train_resize_px) == (384, 448)
    assert (recipe.optim.peak_lr, recipe.total_steps, recipe.optim.milestones) == (0.003, 500, (0.4, 0.6, 0.8))


@pytest.mark.parametrize(("num_train", "steps"), [(20_000, 10_000), (499_999, 10_000), (1_281_167, 20_000)])
def test_bit_hyperrule_trains_larger_tasks_longer_and_with_mixup(num_train, steps):
    """bit_hyperrule.py: division by ten after 3,000, 6,000 and 9,000 of 10,000 steps; 6,000, 12,000 and 18,000 of 20,000."""
    (recipe,) = settings("bit-hyperrule", "bit-r50x1", num_train=num_train, name="imagenet")
    assert (recipe.total_steps, recipe.optim.warmup_steps, recipe.optim.peak_lr) == (steps, 500, 0.003)
    assert recipe.optim.milestones == (0.3, 0.6, 0.9)
    assert recipe.input.augment.mixup_alpha == 0.1
    (small,) = settings("bit-hyperrule", "bit-r50x1", num_train=19_999)
    assert small.input.augment.mixup_alpha is None
    limited = replace(protocol_named("bit-hyperrule"), fewer_than=20_000)
    with pytest.raises(ValueError, match=r"^not supported: bit-hyperrule has no settings for 20,000 .* has 50,000"):
        limited.settings(network_variant("bit-r50x1"), facts(num_train=50_000), 0)


def test_a_protocol_has_the_optimizer_settings_of_a_fine_tuning():
    """As MAE fine-tunes (arXiv:2111.06377, Table 9), after a linear probe."""
    optim = {"optimizer": "adamw", "beta2": 0.999, "weight_decay": 0.05, "layer_decay": 0.65, "head_first_steps": 500}
    of_mae = replace(protocol_named("vit-paper"), **{f"optim.{name}": value for name, value in optim.items()})
    (recipe,) = of_mae.settings(network_variant("vit-b16"), facts(), 0)
    assert recipe.optim.model_dump(include=optim.keys()) == optim
    assert (recipe.optim.peak_lr, recipe.optim.warmup_steps, recipe.optim.clip_norm) == (0.01, 200, 1.0)
    assert Protocol.model_validate(of_mae.model_dump(mode="json")) == of_mae
    assert "optim" not in protocol_named("vit-paper").model_dump()
    partly = Protocol.model_validate({**dict(protocol_named("vit-paper")), "optim": {"layer_decay": 0.65}})
    assert partly.optim.optimizer == "sgd"
    with pytest.raises(
        ValueError, match="head_first_steps=2400 with warmup_steps=200 must be less than total_steps=2500"
    ):
        replace(of_mae, **{"optim.head_first_steps": 2400})
    deep = replace(protocol_named("vit-paper"), **{"optim.frozen": 13})
    with pytest.raises(ValueError, match="frozen=13 is more than the 12 blocks"):
        deep.settings(network_variant("vit-b16"), facts(), 0)


@pytest.mark.parametrize("protocol", ["vit-paper", "bit-hyperrule"])
def test_flip_and_crop_are_off_for_tasks_whose_labels_they_would_change(protocol):
    def augmented(name):
        augment = settings(protocol, name=name)[0].input.augment
        return augment.train_crop, augment.flip

    assert augmented("vtab-dsprites-location") == ("none", False)
    assert augmented("vtab-dsprites-orientation") == augmented("vtab-smallnorb-azimuth") == ("random", False)
    assert augmented("vtab-clevr-count") == augmented("vtab-kitti-distance") == ("none", True)
    assert augmented("vtab-pets") == augmented("dmlab") == ("random", True)  # a user's corpus with the name of a task


def test_number_of_lanes_is_limited_by_the_row_groups_of_the_task():
    assert [settings("vit-paper", max_lanes=n)[0].input.num_lanes for n in (1, 3, 63, 64, 1000)] == [1, 2, 32, 64, 64]


def test_total_steps_may_be_one_number_and_sizes_must_be_in_order():
    protocol = protocol_named("vit-paper-transfer")
    assert replace(protocol, total_steps=700).total_steps == (700,)
    with pytest.raises(ValueError, match="in the order of `at_least`"):
        replace(protocol, larger=protocol.larger[::-1])


def test_seeds_are_aggregated_as_by_the_authors_of_a_protocol():
    values = (0.1, 0.2, 0.9)
    assert over_seeds("vit-paper", values) == pytest.approx(0.4)
    assert over_seeds("bit-hyperrule", values) == over_seeds("bit-hyperrule-1a2b3c", values) == 0.2
    assert over_seeds("linear", values) == pytest.approx(0.4)
