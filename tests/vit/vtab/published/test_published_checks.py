"""Which published scores a model is compared with; unknown networks and data are compared with none."""

import pytest

from vitline.infra.config import replace
from vitline.vit.evaluation.reference.published_checks import (
    architecture_of,
    check_score,
    data_of_corpus,
    data_of_weights,
    matching_row,
    targets_of,
)
from vitline.vit.evaluation.reference.published_scores import ROWS
from vitline.vit.models.variants import REGISTERED, network_variant, spelled

HUB = "/hub/models--timm--vit_base_patch16_224.augreg_in21k_ft_in1k/snapshots/0a1b"


@pytest.mark.parametrize("variant", REGISTERED)
def test_network_is_recognised_by_its_sizes_at_any_resolution(variant):
    assert architecture_of(network_variant(variant, image_size_px=448)) == spelled(variant)


def test_network_of_other_sizes_is_not_recognised():
    assert architecture_of(replace(network_variant("b16"), depth=11)) is None


def test_every_published_architecture_of_our_families_can_be_built():
    for row in ROWS.values():
        if row.architecture:
            assert architecture_of(network_variant(row.architecture)) == row.architecture


@pytest.mark.parametrize(
    ("architecture", "data", "protocol", "columns", "label"),
    [
        ("ViT-L/16", "ImageNet-21k", "vit-paper", ["vtab-dtd"], "ViT-L/16 (I21k)"),
        ("ViT-L/16", "ImageNet-21k", "vit-paper-transfer", ["cifar10"], "ViT-L/16 (I21k), 384 px"),
        ("ViT-L/16", "ImageNet-21k", "vit-paper-imagenet-512", ["imagenet"], "ViT-L/16 (I21k)"),
        ("ViT-L/16", "ImageNet-21k", "vit-paper-transfer-v1", ["cifar10"], "ViT-L/16 (I21k), Table 5 of v1"),
        ("ViT-L/16", "JFT-300M", "vit-paper-v1", ["all"], "ViT-L/16 (JFT), v1"),
        ("BiT-R152x4", "ImageNet-21k", "bit-hyperrule", ["all"], "BiT-M R152x4 (I21k), BiT's paper"),
        ("ViT-B/16", "ImageNet-21k", "vit-paper", ["vtab-dtd"], None),  # L/16 is published, but is another network
        ("ViT-L/16", "ImageNet", "vit-paper", ["vtab-dtd"], None),
        ("ViT-L/16", None, "vit-paper", ["vtab-dtd"], None),
        (None, "ImageNet-21k", "vit-paper", ["vtab-dtd"], None),
    ],
)
def test_matching_row_is_of_the_same_network_and_data(architecture, data, protocol, columns, label):
    row = matching_row(architecture, data, protocol, columns)
    assert (row and row.label) == label


@pytest.mark.parametrize(
    ("weights", "data"),
    [
        ("/w/imagenet21k/ViT-L_16.npz", "ImageNet-21k"),
        ("/w/imagenet21k+imagenet2012/ViT-B_16.npz", "ImageNet-21k"),
        (HUB, "ImageNet-21k"),
        ("/w/vit_base_patch16_224.augreg_in1k", "ImageNet"),
        ("/w/vit_base_patch16_224_miil.in21k", None),
        ("/w/vit_base_patch16_224.sw_in12k", None),
        ("/w/my-weights", None),
    ],
)
def test_training_data_is_inferred_from_the_name_of_the_weights(weights, data):
    assert data_of_weights(weights) == data


def test_subset_of_imagenet_21k_does_not_count_as_imagenet_21k():
    assert data_of_corpus("imagenet21k", 21_841, False) == "ImageNet-21k"
    assert data_of_corpus("imagenet21k", 21_841, True) is None
    assert data_of_corpus("imagenet21k", 11_221, False) is None
    assert {data_of_corpus(kind, 1000, False) for kind in ("ilsvrc2012", "imagenet")} == {"ImageNet"}
    assert data_of_corpus("class_folders", 1000, False) is None


def test_targets_are_matched_by_the_whole_name():
    (target,) = targets_of(HUB)
    assert target.scores == {"imagenet": (0.84534, 0.84534), "imagenet-real": (0.88887, 0.88887)}
    assert not list(targets_of("/w/vit_base_patch16_224.augreg_in21k_ft_in1k_mine"))
    assert not list(targets_of("/w/my_vit_base_patch16_224.augreg_in21k_ft_in1k"))


def test_official_files_are_compared_with_the_scores_of_their_weights():
    (head,) = targets_of("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz")
    assert (head.protocol, head.image_size_px, head.scores["imagenet"][0]) == ("head", 384, 0.84212)
    (smaller,) = targets_of("/w/imagenet21k+imagenet2012_ViT-B_16-224.npz")
    assert (smaller.image_size_px, smaller.scores["imagenet"][0]) == (224, 0.81782)
    (rerun,) = targets_of("/w/imagenet21k/R50+ViT-B_16.npz")
    assert (rerun.protocol, rerun.scores["cifar100"]) == ("vit-paper-transfer", (0.9088, 0.9230))


@pytest.mark.parametrize(
    ("value", "num_examples", "side", "verdict"),
    [
        (0.84534, 50_000, 224, "agrees"),
        (0.8434, 50_000, 224, "agrees"),
        (0.8430, 50_000, 224, "differs"),
        (0.8480, 50_000, 224, "differs"),
        (0.84534, 5_000, 224, "not comparable: scored on 5,000 of 50,000 images"),
        (0.84534, 50_000, 384, "not comparable: published at 224 px, scored at 384 px"),
    ],
)
def test_score_agrees_within_two_tenths_of_a_point_on_the_same_images(value, num_examples, side, verdict):
    (target,) = targets_of(HUB)
    assert check_score(target, "imagenet", value, num_examples, side).verdict == verdict


def test_score_between_two_published_runs_has_no_difference():
    (target,) = targets_of("/w/imagenet21k/ViT-B_16.npz")  # published are 99.02 and 98.76
    assert check_score(target, "cifar10", 0.989, 10_000, None).difference == 0
    below = check_score(target, "cifar10", 0.985, 10_000, None)
    assert (below.difference, below.verdict) == (pytest.approx(-0.0026), "differs")
