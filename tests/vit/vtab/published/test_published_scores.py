"""Published tables as data: numbers of rows, printed means, and known entries."""

from statistics import fmean

import pytest

from vitline.vit.evaluation.reference.published_scores import ROWS, published_named
from vitline.vit.evaluation.reference.report import (
    TRANSFER_CORPORA,
    VTAB_CORPORA,
    group_corpora,
    published_mean,
    published_metrics,
)

TABLE_9 = ("ViT-H/14 (JFT)", "ViT-L/16 (JFT)", "ViT-L/16 (I21k)")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("v2, Tables 2 and 9", 3),
        ("v2, Table 2", 2),
        ("v2, Table 5", 14),
        ("v2, Table 6", 18),
        ("v2, App. D.9", 1),
        ("v1, Table 2", 4),
        ("v1, Table 5", 13),
        ("1912.11370, Table 2", 3),
        ("big_transfer, README", 2),
        ("results.csv, 1,000 examples", 5),
        ("vision_transformer, README, single runs", 10),
        ("2205.01580, 224 px", 4),
    ],
)
def test_every_row_of_a_table_is_present(source, count):
    assert sum(row.source.endswith(source) for row in ROWS.values()) == count


def test_every_score_belongs_to_a_known_task():
    assert {corpus for row in ROWS.values() for corpus in row.scores} == {
        *VTAB_CORPORA,
        *TRANSFER_CORPORA,
        "objectnet",
    }
    assert all(0 < value < 1 for row in ROWS.values() for value in row.scores.values())


@pytest.mark.parametrize(("label", "mean"), zip(TABLE_9, (77.63, 76.29, 72.71), strict=True))
def test_tasks_of_table_9_have_the_means_of_the_paper(label, mean):
    # Means of the rounded entries; Table 2 prints 77.63, 76.28 and 72.72.
    row = ROWS[label]
    assert 100 * fmean(row.scores[corpus] for corpus in VTAB_CORPORA) == pytest.approx(mean, abs=0.005)
    assert 100 * published_mean(row, "all") == pytest.approx(mean, abs=0.011)


@pytest.mark.parametrize(
    ("label", "groups"),
    zip(TABLE_9, ((86.69, 87.00, 65.03), (85.56, 86.72, 62.96), (83.27, 84.65, 57.50)), strict=True),
)
def test_groups_of_table_9_have_the_means_worked_out_by_hand(label, groups):
    means = [100 * published_mean(ROWS[label], group) for group in ("natural", "specialized", "structured")]
    assert means == pytest.approx(groups, abs=0.005)


@pytest.mark.parametrize("label", [label for label in ROWS if label.startswith("ResNet-50 ")])
def test_rows_of_the_vtab_authors_have_their_printed_mean(label):
    row = ROWS[label]
    assert fmean(row.scores.values()) == pytest.approx(row.printed_means["all"], abs=0.0005)


def test_columns_of_the_vtab_authors_are_assigned_to_the_right_tasks():
    # From scratch, SVHN (digits) scores far higher than SUN397 (397 scenes).
    row = ROWS["ResNet-50 From-Scratch"]
    assert (row.scores["vtab-svhn"], row.scores["vtab-sun397"]) == (0.661, 0.05)
    assert (row.scores["vtab-kitti-distance"], row.scores["vtab-dsprites-location"]) == (0.427, 0.784)


def test_printed_means_of_bit_re_runs_agree_with_their_groups():
    for row in (r for r in ROWS.values() if r.setting == "re-run"):
        groups = ("natural", "specialized", "structured")
        total = sum(len(group_corpora(group)) * row.printed_means[group] for group in groups)
        assert total / 19 == pytest.approx(row.printed_means["all"], abs=0.0002)


@pytest.mark.parametrize(
    ("label", "corpus", "value"),
    [
        ("ViT-L/16 (I21k)", "vtab-svhn", 0.809),
        ("ViT-L/16 (I21k)", "vtab-smallnorb-elevation", 0.417),
        ("ViT-H/14 (JFT)", "imagenet", 0.8855),
        ("ViT-L/16 (I21k), 384 px", "imagenet", 0.8515),
        ("ViT-H/14 (JFT), 384 px", "imagenet", 0.8804),
        ("ViT-H/14 (JFT), 14 epochs", "imagenet", 0.8808),  # as printed: Tables 5 and 6 differ
        ("ViT-H/14 (JFT), v1", "imagenet", 0.8836),
        ("ViT-H/14 (JFT), ObjectNet", "objectnet", 0.617),
        ("ViT-L/16 (I21k), Table 5 of v1", "imagenet", 0.7945),
        ("R50x1+ViT-L/16 (JFT), 7 epochs", "cifar100", 0.9364),
        ("ViT-B/16 (I21k), re-run, dropout 0.1", "cifar100", 0.9192),
        ("ViT-S/16 (ImageNet), plain, 90 epochs", "imagenet-v2", 0.642),
    ],
)
def test_known_entries_have_their_printed_values(label, corpus, value):
    assert ROWS[label].scores[corpus] == value


def test_rows_have_their_printed_costs_and_deviations():
    row = ROWS["ViT-L/16 (I21k)"]
    assert (row.tpuv3_core_days, row.deviations["all"], row.deviations["pets"]) == (230, 0.0021, 0.0015)
    assert ROWS["R50x1+ViT-L/16 (JFT), 7 epochs"].exaflops == 859
    assert ROWS["Noisy Student EfficientNet-L2 (JFT)"].scores == {"imagenet": 0.884, "imagenet-real": 0.9055}


def test_labels_of_version_1_rows_contain_v1():
    assert all("v1" in label for label, row in ROWS.items() if row.is_v1)
    assert not any("v1" in label for label, row in ROWS.items() if not row.is_v1)


def test_published_metrics_have_the_names_of_our_scores():
    metrics = published_metrics(ROWS["ViT-L/16 (I21k)"])
    assert metrics["vtab/cifar100/top1"] == 0.841
    assert metrics["tasks/cifar100/top1"] == 0.9325
    assert metrics["vtab/all/top1"] == 0.7272
    assert published_metrics(ROWS["ViT-H/14 (JFT), ObjectNet"]) == {"head/objectnet/top1": 0.617}
    assert metrics["vtab/natural/top1"] == pytest.approx(0.83271, abs=1e-5)


def test_unknown_label_is_refused_with_similar_labels():
    with pytest.raises(ValueError, match=r"ViT-L/16 \(I21k\)"):
        published_named("ViT-L/16 (i21k)")
