"""The table of scores against numbers worked out by hand, and against the paper's own means."""

import pytest

from vit.vtab.evaluate import Score
from vit.vtab.report import PUBLISHED, coverage, group_means, published_row, scores_by_model
from vit.vtab.tasks import GROUPS, VTAB_TASKS


def score(task, value, seed=0, digest=None):
    return Score(
        task=task,
        protocol="p",
        seed=seed,
        model=digest and "s3://bucket/models/birds/0a1b2c3d4e5f",
        model_digest=digest,
        value=value,
        num_examples=10,
        chosen={},
        tried=(),
        majority_fraction=0.1,
        num_classes=2,
        corpus_digest="c",
        wall_s=0,
        cpu_s=0,
        trials=(),
    )


def test_the_table_has_nineteen_tasks_in_three_groups():
    sizes = [sum(task.group == group for task in VTAB_TASKS) for group in GROUPS]
    assert sizes == [7, 4, 8]
    assert len({task.corpus_name for task in VTAB_TASKS}) == 19


@pytest.mark.parametrize(
    ("name", "mean"),
    [("ViT-H/14 (JFT)", 77.63), ("ViT-L/16 (JFT)", 76.29), ("ViT-L/16 (I21k)", 72.71)],
)
def test_the_published_rows_have_the_means_of_the_paper(name, mean):
    # Means of Table 9's rounded entries; Table 2 states 77.63, 76.28 and 72.72.
    means = group_means(published_row(name))
    assert 100 * means["vtab/all/top1"] == pytest.approx(mean, abs=0.005)


def test_groups_of_the_published_row_are_table_nines():
    # Table 9, ViT-H/14 (JFT): seven natural, four specialized, eight structured, added up by hand.
    means = group_means(published_row("ViT-H/14 (JFT)"))
    assert 100 * means["vtab/natural/top1"] == pytest.approx(606.8 / 7)
    assert 100 * means["vtab/specialized/top1"] == pytest.approx(348.0 / 4)
    assert 100 * means["vtab/structured/top1"] == pytest.approx(520.2 / 8)


def test_published_values_stand_under_their_tasks():
    row = published_row("ViT-L/16 (I21k)")
    assert row["caltech101"] == pytest.approx(0.908)
    assert row["svhn"] == pytest.approx(0.809)
    assert row["patch_camelyon"] == pytest.approx(0.825)
    assert row["smallnorb_elevation"] == pytest.approx(0.417)
    assert all(len(values) == 19 for values in PUBLISHED.values())


def test_a_group_has_a_mean_only_when_it_is_whole():
    scores = {"patch_camelyon": 0.8, "eurosat": 0.9, "resisc45": 0.7}
    assert group_means(scores) == {"vtab/all_3of19/top1": pytest.approx(0.8)}
    scores["diabetic_retinopathy"] = 0.6
    assert group_means(scores) == {
        "vtab/specialized/top1": pytest.approx(0.75),
        "vtab/all_4of19/top1": pytest.approx(0.75),
    }


def test_tasks_beside_the_nineteen_count_in_no_mean():
    assert group_means({"digits": 0.9}) == {}
    assert group_means({"digits": 0.9, "dtd": 0.5}) == {"vtab/all_1of19/top1": 0.5}


def test_coverage_counts_corpora_of_the_nineteen():
    assert coverage([]) == "VTAB: 0 of 19 tasks prepared"
    assert coverage(["vtab-dtd", "vtab-patch-camelyon", "digits", "dtd"]) == "VTAB: 2 of 19 tasks prepared"


def test_seeds_of_a_model_are_averaged_and_models_kept_apart():
    scores = [score("digits", 0.5), score("digits", 0.7, seed=1), score("digits", 0.9, digest="d" * 64)]
    assert scores_by_model(scores) == {
        "from scratch (p)": {"digits": pytest.approx(0.6)},
        "birds/0a1b2c3d4e5f (p)": {"digits": pytest.approx(0.9)},
    }
