"""The spike guard in whole runs: rewind and skip against a run that never saw the steps; kills; what a run leaves of a spike."""

import json
import re
import threading

import numpy as np
import pytest
import torch

import vitline.vit.training.loop
from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.manifest import open_checkpoint
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.checkpoints.read import read_checkpoint
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.evaluation.top_losses import load_shown
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.guard.spike_guard import SpikeGuard
from vitline.vit.training.world import World

from ...trainings import losses_of
from .planted import plant

ACTIONS = {
    "skip": ({"action": "skip"}, range(25, 26)),
    "rewind": ({"action": "rewind", "rewind_steps": 3}, range(22, 29)),
}


@pytest.fixture
def begin(start, train_config):
    """begin(name, action): a claimed run of 40 steps with a checkpoint every 5, of which one is kept."""

    def make(name, action):
        guard = {**ACTIONS[action][0], "window_steps": 16}
        config = replace(
            train_config(name, steps=40, save_every_steps=5, keep_checkpoints=1), **{"recipe.spike_guard": guard}
        )
        return start(config)[0]

    return make


def execute(run):
    return TrainingRun(run, 1, World()).execute()


def last_checkpoint(run):
    ref = open_checkpoint(run, list_checkpoints(run)[0])
    return ref.manifest, read_checkpoint(run, ref)


def assert_same_end(run, other):
    (manifest, tensors), (others_manifest, others) = last_checkpoint(run), last_checkpoint(other)
    assert manifest["step"] == others_manifest["step"] == 40
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    windows = [[m["guard"][name] for name in ("losses", "grad_norms")] for m in (manifest, others_manifest)]
    assert windows[0] == windows[1]


@pytest.fixture
def never_saw(begin, monkeypatch):
    """never_saw(action): a finished run without the planted batch that leaves the updates of these steps out."""

    def make(action):
        run, left_out = begin(f"never-{action}", action), ACTIONS[action][1]
        with monkeypatch.context() as patch:
            patch.setattr(SpikeGuard, "skips", lambda self, step: step in left_out)
            assert execute(run) == "finished"
        return run

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "killed_at"),
    [("skip", None), ("skip", 26), ("skip", 31), ("rewind", None), ("rewind", 29), ("rewind", 31)],
)
def test_a_run_equals_one_that_never_saw_the_spike_also_after_a_kill(begin, never_saw, monkeypatch, action, killed_at):
    """Killed before the decision is in a checkpoint, and after; a rewind passes the steps twice, and is killed the first time that
    it reaches the step after it."""
    reference, run, killed = never_saw(action), begin("planted", action), []

    def kill(step):
        if step == killed_at and not killed:
            killed.append(step)
            raise KeyboardInterrupt

    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({25}, kill))
    if killed_at:
        with pytest.raises(KeyboardInterrupt):
            execute(run)
        for thread in threading.enumerate():  # a killed process would have ended it
            if thread.name == "checkpoint-saver":
                thread.join()
    assert execute(run) == "finished"
    assert_same_end(run, reference)
    assert read_state(run)["spikes"] == [25]
    guard = last_checkpoint(run)[0]["guard"]
    left_out = ACTIONS[action][1]
    assert [(s["step"], s["first"], s["last"]) for s in guard["spikes"]] == [(25, left_out[0], left_out[-1])]


@pytest.mark.slow
def test_a_rewind_to_before_the_first_checkpoint_starts_anew(begin, never_saw, monkeypatch):
    """The journal keeps what was measured the first time."""
    monkeypatch.setitem(ACTIONS, "rewind", ({"action": "rewind", "rewind_steps": 24}, range(1, 50)))
    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({25}))
    run = begin("from-the-beginning", "rewind")
    assert execute(run) == "finished"
    assert_same_end(run, never_saw("rewind"))
    assert losses_of(run).keys() == {*range(1, 25)}


def test_what_a_run_leaves_of_a_spike(begin, monkeypatch):
    """Ids and classes of the examples are those of the corpus; the page shows what the network saw."""
    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({25}))
    run = begin("pictures", "skip")
    assert execute(run) == "finished"
    assert run.list("spikes/") == ["spikes/step-000000025.html", "spikes/step-000000025.json"]
    record = run.read_json("spikes/step-000000025.json")
    found = [(r.key, r.value) for r in read_journal(run) if r.step == 25 and r.key.startswith(("guard/", "train/"))]
    assert ("guard/spikes", 1) in found
    assert ("guard/loss", record["loss"]) in found
    assert len(record["examples"]) == 16
    assert [e["loss"] for e in record["examples"]] == sorted((e["loss"] for e in record["examples"]), reverse=True)

    config = TrainingRun(run, 1, World()).config
    part = open_corpora(config).parts[0]
    order = part.order("train", config.recipe.input, config.recipe.seed)
    rows = order.locate(np.arange(24 * 16, 25 * 16)).row.tolist()
    shown = load_shown(part.store, part.manifest, "train", rows)
    names = open_corpora(config).class_names()
    assert {(e["example_id"], *e["classes"]) for e in record["examples"]} == {
        (s.example_id, *(names[i] for i in s.labels)) for s in shown.values()
    }
    page = run.read("spikes/step-000000025.html").decode()
    assert len(re.findall(r"data:image/png;base64", page)) == 16
    assert "Step 25 is a spike: loss " in page
    assert "its update is left out" in page
    assert "1 spike left out" in json.dumps(run.read_json("progress.json"))
