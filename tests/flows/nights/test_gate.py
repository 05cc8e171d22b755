"""The gate: which nights may become the champion, and each reason against it."""

from dataclasses import replace

import pytest

from vitline.flows.catalog.records import write_pipeline
from vitline.flows.nights.from_records import night_of
from vitline.flows.nights.gate import leaked_images
from vitline.flows.nights.night_record import THE_GATE, read_champion
from vitline.flows.nights.promote import make_champion
from vitline.infra import config
from vitline.infra.storage import open_store

from .simulated import Nights, store_night

CONTRACT = {"evaluation": {"image_size_px": 32}, "low": -1.0}


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def night(store, corpus_with_leaks):
    """night(scores, leaked, contract, report): the record of a pipeline with its model and training corpus, and its night."""

    def make(scores, leaked=0, contract=CONTRACT, report="report.html"):
        record = store_night(store, scores)
        model = store.child(f"models/nightly/{scores.key}")
        model.write_json("config.json", {"schema_version": 2, "weights": "abc/model.safetensors"})
        model.write_json("abc/image_contract.json", contract)
        training = {"split": "train", "corpus": corpus_with_leaks(leaked)}
        store.write_json(f"runs/{record.stages[0].run_key}/config.json", {"config": training})
        record = config.replace(record, model=model.uri, report=report)
        write_pipeline(store, record)
        return record, night_of(store, record, "finished")

    return make


@pytest.fixture
def corpus_with_leaks(store, digits):
    """corpus_with_leaks(n): URI of a copy of the digits of which n training images are test images of the task `emoji`."""

    def make(num):
        copy = store.child(f"corpora/leaking/{num}")
        copy.write("manifest.json", digits.read("manifest.json"))
        found = {"count": num, "num_left_out": 0, "first": []}
        # Those of a validation split, and those found in images that are not trained on, do not count.
        leaks = {"emoji/1 test train": found, "emoji/1 val train": found, "emoji/1 test val": found} if num else {}
        copy.write_json("stats.json", digits.read_json("stats.json") | {"leakage": leaks})
        return copy.uri

    return make


@pytest.fixture
def champion(store, night):
    """The nights of a series whose first is the champion, by the gate."""
    nights = Nights(3, seeds_sd=0.1)
    record, first = night(nights.night(), leaked=1)
    assert (first.gate.passed, first.gate.reason) == (True, "The first whole night of its series becomes the champion.")
    make_champion(store, record, why=first.gate.reason, by=THE_GATE)
    for _ in range(2):
        night(nights.night())
    return nights


def test_a_better_night_passes_and_says_how_much_better(store, champion, night):
    record, better = night(champion.night(shift=2.0))
    assert better.gate.passed
    assert better.gate.reason.startswith("Better than the champion (night of 2026-01-02 02:00 UTC): +")
    made = make_champion(store, record, why=better.gate.reason, by=THE_GATE)
    assert (made.counter, made.by_hand) == (2, False)
    assert night_of(store, record, "finished").gate.reason == "It is the champion already."


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"leaked": 3}, "its training images show more test images of a task than the champion's: emoji 2"),
        ({"contract": CONTRACT | {"low": 0.0}}, "the models see images differently (low)"),
        ({"report": None}, "it has no report"),
    ],
)
def test_a_better_night_is_refused_with_the_reason(champion, night, changes, says):
    _, refused = night(champion.night(shift=2.0), **changes)
    assert refused.verdict.word == "better"
    assert (refused.gate.passed, refused.gate.reason) == (False, f"The champion stays: {says}.")


def test_a_night_without_a_task_or_that_is_no_better_is_refused(store, champion, night):
    scores = champion.night(shift=2.0)
    _, refused = night(replace(scores, tasks={"tasks/digits/top1": scores.tasks["tasks/digits/top1"]}))
    assert refused.gate.reason == "The champion stays: this night has no score on emoji."
    _, same = night(champion.night())
    assert same.gate.reason == "The champion stays: this night is not better (same)."
    for key in store.list("models/"):
        store.delete(key)
    _, gone = night(champion.night(shift=2.0))
    assert gone.gate.reason.startswith("The champion stays: the gate needs records that are gone (")
    assert read_champion(store, "nightly").counter == 1


def test_leaks_into_test_splits_are_counted_over_the_corpora_of_a_mixture(store, night, corpus_with_leaks):
    record, _ = night(Nights(0).night(), leaked=2)
    mixture = {"corpora": [{"corpus": corpus_with_leaks(2)}, {"corpus": corpus_with_leaks(5)}]}
    training = {"split": "train", "corpus": corpus_with_leaks(2), "mixture": mixture}
    store.write_json(f"runs/{record.stages[0].run_key}/config.json", {"config": training})
    assert leaked_images(store, record) == {"emoji": 7}
