"""Aggregated scores: values worked out by hand, and properties."""

import pytest

from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.reference.published_scores import ROWS
from vitline.vit.evaluation.reference.report import (
    ScoreRecord,
    coverage,
    differences,
    group_means,
    latest_records,
    read_records,
    scores_by_model,
    table_of,
    vtab_means,
)
from vitline.vit.evaluation.tasks import GROUPS, VTAB_TASKS


def score(task, value, seed=0, digest=None, **changes):
    fields = {
        "task": task,
        "protocol": "p",
        "seed": seed,
        "model": digest and "s3://bucket/models/birds/0a1b2c3d4e5f",
        "model_digest": digest,
        "value": value,
        "num_examples": 10,
        "chosen": {},
        "tried": (),
        "majority_fraction": 0.1,
        "num_classes": 2,
        "corpus_digest": "c",
        "wall_s": 0,
        "cpu_s": 0,
        "trials": (),
    }
    return Score(**{**fields, **changes})


def test_the_table_has_nineteen_tasks_in_three_groups():
    sizes = [sum(task.group == group for task in VTAB_TASKS) for group in GROUPS]
    assert sizes == [7, 4, 8]
    assert len({task.corpus_name for task in VTAB_TASKS}) == 19


def test_group_mean_needs_every_task_of_the_group():
    scores = {"patch_camelyon": 0.8, "eurosat": 0.9, "resisc45": 0.7}
    assert group_means(scores) == {"vtab/all_3of19/top1": pytest.approx(0.8)}
    scores["diabetic_retinopathy"] = 0.6
    assert group_means(scores) == {
        "vtab/specialized/top1": pytest.approx(0.75),
        "vtab/all_4of19/top1": pytest.approx(0.75),
    }


def test_tasks_outside_vtab_are_in_no_mean():
    assert group_means({"digits": 0.9}) == {}
    assert group_means({"digits": 0.9, "dtd": 0.5}) == {"vtab/all_1of19/top1": 0.5}


def test_coverage_counts_corpora_of_vtab_only():
    assert coverage([]) == "VTAB: 0 of 19 tasks prepared"
    assert coverage(["vtab-dtd", "vtab-patch-camelyon", "digits", "dtd"]) == "VTAB: 2 of 19 tasks prepared"


def records(*scores, init="init"):
    return [ScoreRecord(init if s.model_digest else "scratch-0123456789ab", s) for s in scores]


def test_seeds_of_a_model_are_aggregated_and_models_kept_apart():
    scores = [score("digits", 0.5), score("digits", 0.7, seed=1), score("digits", 0.9, digest="d" * 64)]
    scratch, birds = scores_by_model(records(*scores))
    assert (scratch.label, birds.label) == ("from scratch (012345)", "birds/0a1b2c3d4e5f")
    cell = scratch.cells["digits"]
    assert (cell.statistic, cell.noise_of) == ("mean", "seeds")
    assert cell.value == pytest.approx(0.6)
    assert cell.noise == pytest.approx(0.1 * 2**0.5)  # of 0.5 and 0.7, by hand
    assert birds.cells["digits"].statistic == "one run"


def test_one_seed_has_the_binomial_error_of_its_test_split():
    (row,) = scores_by_model(records(score("digits", 0.8, num_examples=400)))
    assert row.cells["digits"].noise == pytest.approx(0.02)  # sqrt(0.8 * 0.2 / 400)
    assert row.cells["digits"].noise_of == "test images"


def test_bit_hyperrule_is_aggregated_by_the_median():
    scores = [score("digits", value, seed=i, protocol="bit-hyperrule") for i, value in enumerate((0.2, 0.8, 0.9))]
    (row,) = scores_by_model(records(*scores))
    assert (row.cells["digits"].value, row.cells["digits"].statistic) == (0.8, "median")


def test_controls_of_two_networks_have_separate_rows():
    rows = scores_by_model(
        [ScoreRecord("scratch-aaa", score("digits", 0.5)), ScoreRecord("scratch-bbb", score("digits", 0.7))]
    )
    assert [row.cells["digits"].value for row in rows] == [0.5, 0.7]


def test_full_cifar100_is_another_task_than_vtab_cifar100():
    (row,) = scores_by_model(records(score("cifar100", 0.9), score("vtab-cifar100", 0.5)))
    assert {name: cell.value for name, cell in row.cells.items()} == {"cifar100": 0.9, "vtab-cifar100": 0.5}
    assert vtab_means(row)["all"].value == 0.5
    assert (table_of("vit-paper", "cifar100"), table_of("vit-paper", "vtab-cifar100")) == ("transfer", "vtab")
    assert (table_of("vit-paper", "digits"), table_of("fewshot-5", "vtab-dtd")) == ("own", "frozen")


def test_mean_over_some_tasks_is_compared_with_the_same_tasks():
    published = ROWS["ViT-L/16 (I21k)"]
    (row,) = scores_by_model(records(score("vtab-dtd", 0.75), score("vtab-svhn", 0.85)))
    found = differences(row, published)
    assert found["vtab-dtd"].value == pytest.approx(0.75 - 0.741)
    assert found["all"].value == pytest.approx(0.80 - (0.741 + 0.809) / 2)
    assert vtab_means(row)["all"].num_tasks == 2


def test_noise_of_a_difference_combines_both_sides():
    (row,) = scores_by_model(records(score("cifar10", 0.9916, num_examples=10_000)))
    ours = (0.9916 * 0.0084 / 10_000) ** 0.5
    found = differences(row, ROWS["ViT-L/16 (I21k)"])["cifar10"]
    assert (found.value, found.noise) == pytest.approx((0.0001, (ours**2 + 0.0003**2) ** 0.5))


def test_noise_of_a_mean_over_tasks_is_that_of_the_means_per_seed():
    # Seed 0 is a point better on one task and a point worse on the other: the mean does not move.
    by_seed = {"vtab-dtd": (0.51, 0.50), "vtab-svhn": (0.80, 0.81)}
    scores = [score(task, value, seed=i) for task, values in by_seed.items() for i, value in enumerate(values)]
    (row,) = scores_by_model(records(*scores))
    assert vtab_means(row)["all"].noise == pytest.approx(0)
    assert vtab_means(row)["all"].noise_of == "seeds"


def test_record_on_the_present_corpus_replaces_one_on_another_corpus():
    old, new = score("digits", 0.5, corpus_digest="old"), score("digits", 0.6, corpus_digest="new")
    for order in ((old, new), (new, old)):
        kept, left_out = latest_records(records(*order), {"new"})
        assert ([record.score.value for record in kept], left_out) == ([0.6], 1)


def test_records_of_controls_are_distinguished_by_their_keys(tmp_path):
    root = open_store(tmp_path)
    for init in ("scratch-0123456789ab", "scratch-ba9876543210"):
        root.write(f"scores/digits/p/{init}-s0-abcdef.json", score("digits", 0.5).model_dump_json().encode())
    assert sorted(record.init for record in read_records(root, pytest.fail)) == [
        "scratch-0123456789ab",
        "scratch-ba9876543210",
    ]


def test_invalid_score_record_is_named_and_stops_no_report(tmp_path):
    root, odd = open_store(tmp_path), []
    root.write("scores/digits/p/a-s0-abcdef.json", score("digits", 0.5).model_dump_json().encode())
    root.write_json("scores/digits/p/notes.json", {"value": 1})
    (tmp_path / "scores/digits/p/zero.json").symlink_to("/dev/zero")
    assert [record.init for record in read_records(root, odd.append)] == ["a"]
    assert ["notes.json is not a record" in str(odd[0]), "zero.json is listed, but no file" in str(odd[1])] == [
        True,
        True,
    ]


@pytest.mark.parametrize("protocol", ["vit-paper", "fewshot-10", "linear", "knn", "head"])
def test_tasks_of_similar_names_have_different_metrics(protocol):
    whole, vtab = (score(task, 0.5, protocol=protocol).metric_name for task in ("cifar100", "vtab-cifar100"))
    assert whole != vtab
