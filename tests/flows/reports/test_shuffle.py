"""`vitline data shuffle-report`: a corpus that was prepared passes, one that is sorted by class is refused until its window is
long enough."""

import json

import pytest

from ...vit.input.conftest import make_corpus


@pytest.fixture(scope="module")
def sorted_corpus(tmp_path_factory):
    """The URI of a corpus of 192 rows in 24 row groups, sorted by class."""
    made = make_corpus(tmp_path_factory.mktemp("sorted"), (192,), 8, labels=[[i // 39] for i in range(192)])
    made.store.write_json("manifest.json", made.manifest.model_dump(mode="json"))
    return made.store.uri


INPUT = ("--set", "recipe.input.global_batch_size=16", "--set", "recipe.input.num_lanes=2")


def test_a_prepared_corpus_passes(vitline, digits_root):
    code, out, err = vitline("data", "shuffle-report", "digits", "--recipe", "digits", "--root", digits_root)
    assert code == 0, err
    assert "digits/" in out
    assert "class entropy, bits" in out
    assert "no less than chance explains. Measured on 64 batches, with the labels of" in out
    code, out, err = vitline(
        "data", "shuffle-report", "digits", "--recipe", "digits", "--batches", "9", "--root", digits_root, "--json"
    )
    assert code == 0, err
    shown = json.loads(out)
    assert shown["passed"]
    assert shown["window_needed"] is None
    assert shown["num_batches"] == 9
    assert shown["shuffle_window"] == 4
    assert shown["class_entropy_bits"]["value"] / shown["class_entropy_bits"]["perfect"] == shown["entropy_fraction"]


@pytest.mark.slow
def test_a_sorted_corpus_is_refused_with_the_window_that_makes_it_pass(vitline, sorted_corpus):
    def report(window):
        chosen = (*INPUT, "--set", f"recipe.input.shuffle_window={window}", "--set", "recipe.loss=sigmoid")
        code, out, err = vitline("data", "shuffle-report", sorted_corpus, "--recipe", "digits", *chosen, "--json")
        return code, json.loads(out), err

    code, shown, err = report(1)
    assert code == 1
    assert not shown["passed"]
    assert shown["entropy_fraction"] < shown["least_entropy_fraction"]
    needed = shown["window_needed"]
    error = err.splitlines()[-1]
    assert error.startswith("error: tiny/0, split 'train': batches have ")
    assert f"Add --set recipe.input.shuffle_window={needed}, with which a worker keeps " in error
    code, shown, err = report(needed)
    assert code == 0, err
    assert shown["passed"]
    assert report(needed // 2)[0] == 1


def test_mistakes_are_one_sentence(refused, digits_root):
    assert "no recipe" in refused("data", "shuffle-report", "digits", "--recipe", "digitz", "--root", digits_root)
