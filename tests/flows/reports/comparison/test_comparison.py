"""The page that compares pipelines: two of one series, scored on real digits, and one that was never scored."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.catalog.records import write_pipeline
from vitline.flows.cli.main import app
from vitline.flows.reports.comparison.comparison import compare_with_first, task_pictures
from vitline.flows.reports.comparison.corpora import corpora_by_digest
from vitline.infra.runs.journal import Journal
from vitline.infra.storage import open_store

from ...nights.simulated import Nights, score, store_night

TASK = "tasks/digits/top1"


@pytest.fixture
def three(root, digits):
    """Pipelines night-1 to night-3 in a store with the digits corpus. On digits, night-2 gets 40 images right that night-1 gets wrong,
    and the other way round 10; night-3 has no scores."""
    store = open_store(root)
    for key in digits.list():
        store.write(f"corpora/digits/1/{key}", digits.read(key))
    manifest = load_manifest(digits)
    n = manifest.split("test").num_rows
    right = {"night-1": np.arange(n) >= 50, "night-2": (np.arange(n) >= 10) & (np.arange(n) < n - 10)}
    nights, records = Nights(1), []
    for _ in range(3):
        night = nights.night(num_seeds=1)
        if night.key in right:
            night.tasks[TASK] = (score(right[night.key], manifest.split("test").digest),)
        else:
            night.tasks.clear()
        record = store_night(store, night)
        records.append(record)
        training, evaluation = f"{night.key}-t0", f"runs/{night.key}-e0/state.json"
        scored = store.read_json(evaluation)
        for each in scored["scores"]:
            each["corpus_digest"] = manifest.digest if each["task"] == "digits" else "gone"
        store.write_json(evaluation, scored)
        store.write_json(f"runs/{training}/config.json", {"config": {"recipe": {"input": {"global_batch_size": 32}}}})
        journal = Journal(store.child(f"runs/{training}"), 1)
        for step in range(3):
            journal.record({"train/loss": 2.0 - step}, step)
        journal.close()
    return store, records


def test_pictures_are_those_that_only_one_gets_right(three):
    store, records = three
    (digits,) = task_pictures(store, corpora_by_digest(store), records)
    assert (digits.task, digits.other) == ("digits", "night-2")
    assert (digits.only_reference, digits.only_other) == (10, 40)
    assert [len(digits.lost), len(digits.won)] == [10, 12]
    assert {picture.right for picture in digits.won} == {"night-2"}
    assert all(picture.shown.picture.startswith("data:image/png") for picture in digits.won)


def test_differences_are_paired_and_a_pipeline_without_scores_is_not_compared(three):
    store, records = three
    scores, others = compare_with_first(store, records)
    found = others[0].difference(TASK)
    assert found.paired
    assert found.value == pytest.approx(30 / scores[0].tasks[TASK][0].num_examples)
    assert others[1].compared is None


def test_the_command_writes_one_file_that_loads_nothing(three, root, tmp_path):
    page = tmp_path / "compared.html"
    keys = ("night-1", "night-2", "night-3")
    done = CliRunner().invoke(app, ["runs", "compare", *keys, "--root", root, "--html", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert text.count("<polyline") == 6 + 3 * text.count(
        "Reliability on"
    )  # by images and by hours; two and the grey line
    assert "night-1, ECE 6.3 %" in text  # sure of all and wrong on 50 of 797
    assert "Pre-training loss by images seen" in text
    assert "night-3 cannot be compared: one of both has no scores." in text


def test_more_than_a_page_holds_is_refused_before_anything_is_written(three, root, tmp_path):
    store, records = three
    for number in range(4, 8):
        write_pipeline(store, records[0].model_copy(update={"key": f"other-{number}"}))
    page = tmp_path / "compared.html"
    done = CliRunner().invoke(app, ["runs", "compare", "--newest", "7", "--root", root, "--html", str(page)])
    assert "at most 6 pipelines, not 7" in str(done.exception or done.output)
    assert not page.exists()
