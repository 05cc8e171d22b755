"""What a plan says about loading: memory, threads and their origin, and the bytes that the store must send."""

import json
import re
import shutil

import pytest

from vitline.flows.plans.held_out import score_text
from vitline.flows.plans.training_cost import bandwidth_text, loading_text, training_cost
from vitline.flows.plans.training_plan import plan_rows
from vitline.infra.config import replace
from vitline.infra.runs.run_state import NO_STATE
from vitline.vit.cost.estimate import PlanGpus
from vitline.vit.input.decoding import which_decoder
from vitline.vit.run.resolved import resolve


def test_loading_names_each_setting_and_its_origin(train_config, monkeypatch):
    monkeypatch.setattr(which_decoder, "native_is_installed", lambda: False)
    config = train_config("plan", decode_threads=3)
    assert loading_text(config, high_latency=True, open_bytes=10**9) == (
        "a worker reads 2.15 GB ahead at most (execution.read_ahead_bytes, its default; a steady stream needs 1 GB), in as many "
        "threads as it needs up to 32 (a remote store), and decodes in 3 (execution.decode_threads, as the recipe or --set has it) of "
        "its own process (execution.decode_processes, its default); the native decoder is not installed on this machine"
    )
    monkeypatch.setattr(which_decoder, "native_is_installed", lambda: True)
    assert loading_text(config, high_latency=True, open_bytes=1).endswith(
        "the native decoder is installed on this machine"
    )
    little = replace(config, **{"execution.read_ahead_bytes": 10**6})
    text = loading_text(little, high_latency=False, open_bytes=10**9)
    assert (
        "1 MB ahead at most (execution.read_ahead_bytes, as the recipe or --set has it; less than the 1 GB of a" in text
    )
    assert "up to 2 (files)" in text


def test_auto_means_a_process_for_every_four_threads_and_a_number_itself(train_config):
    def text(lanes=4, **execution):
        config = train_config("plan", **execution)
        config = replace(config, **{"recipe.input.num_lanes": lanes})
        return loading_text(config, high_latency=False, open_bytes=10**9)

    auto = {"decode_processes": "auto"}
    assert "of its own process (" in text(decode_threads=4, **auto)
    assert (
        "of 3 input processes (execution.decode_processes, as the recipe or --set has it; one for every 4 threads)"
        in text(decode_threads=12, **auto)
    )
    assert "of 2 input processes (" in text(decode_threads=12, lanes=2, **auto)
    assert "of 1 input process (execution.decode_processes, as the recipe or --set has it)" in text(decode_processes=1)
    assert "of its own process (" in text(decode_threads=12)
    with pytest.raises(
        ValueError, match=r"execution.decode_processes=5 must be at most 2, the lanes of each of 2 workers"
    ):
        text(decode_processes=5, workers=2)


def test_bandwidth_is_that_of_the_gpus_of_one_node(train_config):
    config = train_config("plan", workers=2)
    # Multiply-adds: stem 4 x 192 x 32; in 2 blocks 5 x 8,192 of projections and 2 x 25 x 32 of attention; head 32 x 10.
    macs = 24_576 + 2 * (40_960 + 1600) + 320
    rate = 2 * 0.5 * 67e12 / (3 * 2 * macs)
    text = bandwidth_text(config, num_classes=10, image_bytes=1000, gpus=PlanGpus(mfu=0.5))
    assert text == (
        f"{rate / 1e6:.3g} GB/s for a node of 2 GPUs: {rate:,.0f} images/s, each H200 at 50% of its peak; `vitline data bench` "
        "measures it"
    )
    assert bandwidth_text(replace(config, **{"execution.device": "cpu"}), 10, 1000, PlanGpus()) == "1 kB an image"
    cost = training_cost(resolve(config, "nowhere"), PlanGpus("A100", 0.2))
    assert "each A100 at 20% of its peak" in cost["bandwidth"]


def test_a_plan_says_what_the_spike_guard_does(train_config):
    config = train_config("cost")
    assert "spike_guard" not in training_cost(resolve(config, "nowhere"))
    guard = {"action": "rewind", "rewind_steps": 50, "lr_factor": 0.5, "lr_steps": 200}
    config = replace(config, **{"recipe.spike_guard": guard})
    assert training_cost(resolve(config, "nowhere"))["spike_guard"] == (
        "rewind: where loss or gradient norm stands 10 spreads above the median of 128 steps, the training goes back and leaves out the "
        "updates of 50 steps before and after, then 0.5 of the learning rate for 200 steps; more than 10 spikes in 1,000 steps end it"
    )


def test_a_score_that_tells_nothing_or_is_missing_is_said_before_the_training_and_after_it(
    train_config, digits, tmp_path
):
    def of(num_classes=10, without="", **changes):
        """What is held out of a copy of the digits."""
        corpus = tmp_path / f"digits-{num_classes}{without}"
        shutil.copytree(digits.uri.removeprefix("file://"), corpus, dirs_exist_ok=True)
        manifest = json.loads((corpus / "manifest.json").read_text())
        manifest["num_classes"] = num_classes
        manifest["splits"].pop(without, None)
        (corpus / "manifest.json").write_text(json.dumps(manifest))
        cost = training_cost(resolve(replace(train_config("plan"), corpus=str(corpus), **changes), "nowhere"))
        assert dict(plan_rows(train_config("plan"), cost))["held-out images"] == cost["held_out"]
        return cost["held_out"], cost.get("warning")

    several, warning = of()
    assert re.fullmatch(r"\d+ images of the split val; the most frequent class alone is \d+\.\d %", several)
    assert warning is None
    one, warning = of(num_classes=1)
    assert one.startswith("all images are of one class, so that any network has a top-1 of 100 % ")
    assert warning == f"digits: {one}"
    none, warning = of(without="val")
    assert none.startswith(
        "no held-out images, so the training ends without a score; prepare the corpus with recipe.val_fraction "
    )
    assert warning == f"digits: {none}"

    state = {**NO_STATE, "state": "finished"}
    scored = {**state, "val_top1": 1.0, "val_examples": 12, "val_majority_fraction": 0.25}
    assert score_text(scored, labelled=True) == "val 100.0 %"
    same = {**scored, "val_majority_fraction": 1.0}
    assert score_text(same, labelled=True) == "val 100.0 %, which says nothing: all 12 held-out images are of one class"
    assert score_text(state, labelled=True) == "no score, because there were no held-out images"
    assert score_text(state, labelled=False) == ""
