"""Names of flow runs: a typed name is kept, a generated one is replaced by a descriptive one."""

from datetime import datetime

import pytest
from prefect.utilities.names import generate_slug

from vitline.flows.catalog.records import Origin
from vitline.flows.on_prefect.run_names import descriptive_name, given_name
from vitline.flows.to_mlflow.stage_snapshots import origin_tags

NOW = datetime(2026, 11, 21, 3)


@pytest.mark.parametrize(
    "name",
    [
        "Paul's night",
        "first-try",
        "lr 0.03, again",
        "birds",
        "2026-11-21",
        "beta-test",
        "eta",
        "lambda-sweep-2",
        "alpha3-birds",
        "Generic-Birds",
        "Awesome-run",
        "awesome",
        "owl-cat",
    ],
)
def test_a_typed_name_is_kept(name):
    assert given_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "alpha3-andromedae-flux",
        "nu-scorpii",
        "mu-canis-majoris",
        "beta987--v",
        "chi2",
        "Awesome-Olingo",
        "Tasty-Vicuña",
        "",
        None,
    ],
)
def test_a_name_that_the_page_suggests_is_replaced(name):
    assert given_name(name) is None


def test_names_that_the_server_or_vitline_generates_are_replaced():
    assert [name for name in (generate_slug(2) for _ in range(500)) if given_name(name)] == []
    assert given_name(descriptive_name("pretrain", {"recipe": "icons", "seed": 0}, NOW)) is None


def test_a_generated_name_describes_recipe_corpus_and_seed():
    names = [descriptive_name("pretrain", {"recipe": "icons", "corpus": "birds", "seed": seed}, NOW) for seed in (0, 1)]
    assert names == ["icons-birds-s0-1121-030000", "icons-birds-s1-1121-030000"]
    own = {"recipe": "icons", "corpus": "birds", "overrides": {"recipe": "s3://lab/My_crows.yaml"}}
    assert descriptive_name("pretrain", own, NOW) == "my-crows-birds-1121-030000"
    assert descriptive_name("reconcile", {}, NOW) == "reconcile-1121-030000"


def test_a_typed_name_is_a_tag_of_the_runs_in_mlflow():
    assert origin_tags(Origin(name="Paul's night"))["vitline.name"] == "Paul's night"
