"""`vitline data bench`: the loader of a training is measured, on one worker and on two; mistakes are named before anything is read."""

import json

import pytest

from vitline.data_prep.shard_format import ShardError
from vitline.vit.cost.input_speed import node_speed

from ...vit.input.conftest import make_corpus

QUICK = ("--recipe", "digits", "--seconds", "0.1")


def test_mistakes_are_one_sentence(refused, digits_root):
    def bench(*options):
        return refused("data", "bench", "digits", *QUICK, *options, "--root", digits_root)

    assert "'H2000' is not known" in bench("--gpu", "H2000")
    assert "--mfu 50 must be more than 0 and at most 1" in bench("--mfu", "50")
    assert "--images-per-s -1 must be more than 0" in bench("--images-per-s", "-1")
    assert "--workers 3 of a node must be 1 to execution.num_workers=2" in bench("--workers", "3")
    assert "no recipe" in bench("--recipe", "digitz")
    assert "num_lanes" in bench("--set", "recipe.input.num_lanes=512", "--set", "recipe.input.global_batch_size=1024")


def test_what_a_node_feeds_and_what_it_needs(vitline, digits_root):
    code, out, err = vitline("data", "bench", "digits", *QUICK, "--images-per-s", "1", "--root", digits_root)
    assert code == 0, err
    assert "No GPU waits: a node feeds " in out
    assert "the whole way" in out
    assert "To change" not in out
    assert "Decoder: " in out
    code, out, err = vitline("data", "bench", "digits", *QUICK, "--root", digits_root, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["needed_by_gpu"]["images_per_s"] == pytest.approx(0.5 * 67e12 / (3 * 26.48e6), rel=1e-3)
    assert not shown["keeps_up"]
    assert shown["fraction_of_need"] == shown["images_per_s"] / shown["needed_by_gpu"]["images_per_s"]
    assert sum(shown["shares_of_waits"].values()) == pytest.approx(1)
    assert shown["images_per_s"] == shown["workers"][0]["images_per_s"] > 0
    assert shown["decoders"]["whole"] > 0
    assert any(change.startswith("cores: ") for change in shown["changes"])


def test_a_mixture_is_measured_as_it_is_trained_on(vitline, two_corpora, tmp_path):
    """`owl` of both corpora is one class; trams are dropped, so that of city fewer rows are read than are stored."""
    table = tmp_path / "classes.csv"
    rows = ["birds,jay,jay", "birds,owl,owl", "city,bus,bus", "city,owl,owl", "city,tram,"]
    table.write_text("\n".join(["corpus,class,mixture_class", *rows]))
    small = ("--set", "recipe.input.global_batch_size=8", "--set", "recipe.input.num_lanes=2")
    given = ("birds=3", "city=1", "--class-map", str(table), *QUICK, *small, "--root", two_corpora, "--json")
    code, out, err = vitline("data", "bench", *given)
    assert code == 0, err
    shown = json.loads(out)
    assert [each.partition("/")[0] for each in shown["corpus"].split(" and ")] == ["birds", "city"]
    assert shown["images_per_s"] > 0
    assert shown["workers"][0]["read"]["images_per_s"] > 0


@pytest.mark.slow
def test_the_workers_of_a_node_are_measured_at_once_and_the_first_error_counts(train_config, tmp_path):
    config = train_config("pair", workers=2)
    speeds = node_speed(config, 2, 0.1)
    assert [speed.images_per_s > 0 for speed in speeds] == [True, True]
    made = make_corpus(tmp_path, (64,))
    made.store.write_json("manifest.json", made.manifest.model_dump(mode="json"))
    for key in made.store.list("train/"):
        made.store.delete(key)
    with pytest.raises(ShardError, match="is missing"):
        node_speed(config.model_copy(update={"corpus": made.store.uri}), 2, 0.1)
