"""A training run in one process, without Ray: what it writes to the store, and how it resumes, stops and fails."""

import itertools
import math
import subprocess
import sys
import threading
import time
import uuid
import zlib

import pytest
import torch

import vitline.vit.input.read_shards
import vitline.vit.training.loop as loop
from vitline.data_prep.decode import ImageRejected, decode
from vitline.data_prep.find_corpus import Corpora
from vitline.infra.config import replace
from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import LeaseLost, acquire_lease
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.runs.segments import list_segments
from vitline.infra.runs.stopping import StopPoller
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.best import best_checkpoint
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.checkpoints.restore import newest_checkpoint
from vitline.vit.config import TrainConfig
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.cost.memory import activation_bytes
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.published.models import adapt, load_model
from vitline.vit.run.hooks import RunHooks
from vitline.vit.run.resolved import resolve
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.reporter import Reporter, system_metrics
from vitline.vit.training.world import World

from ..trainings import losses_of


def test_a_finished_run_has_curves_checkpoints_a_score_and_a_model(finished, train_config, digits):
    run = finished(train_config("whole", inspect_images=5))
    state = read_state(run)
    assert state["state"] == "finished"
    assert state["images_seen"] == 20 * 16
    assert state["val_examples"] > 0
    assert sorted(losses_of(run)) == list(range(1, 21))
    assert list_checkpoints(run)[0].startswith("checkpoints/step-000000020")
    assert run.exists("inputs.png")
    assert "inspection/index.html" in state["inspection"]
    assert run.read("inspection/attention-rollout.png").startswith(b"\x89PNG")
    assert {r.step for r in read_journal(run) if r.key == "system/node0/memory_used_bytes"} <= set(range(21))
    assert any(r.key == "system/node0/memory_used_bytes" for r in read_journal(run))
    model = load_model(state["model"])
    assert len(model.classes) == 10
    assert model.provenance["corpus_digest"] == run.read_json("config.json")["inputs"]["corpus"]


def test_on_gpus_a_run_records_its_memory_beside_that_of_a_plan(finished, train_config, monkeypatch):
    """As if the GPU had had as much as the plan says, of a micro-batch of 8."""
    monkeypatch.setattr("vitline.vit.cost.training_memory.peak_of_workers", lambda world: 1_000_000)
    run = finished(train_config("memory", steps=4))
    state = read_state(run)
    weights = sum(p.numel() for p in load_model(state["model"]).network.parameters())
    planned = 4 * 4 * weights + activation_bytes(train_config("memory").recipe.model, 8)
    assert (state["peak_memory_bytes"], state["planned_memory_bytes"]) == (1_000_000, planned)


@pytest.mark.slow
def test_a_training_does_not_load_the_compiler_of_torch(start, train_config):
    """It takes as long to load as torch itself, in every worker, trial and process that resumes."""
    run, attempt = start(train_config("light", steps=4, save_every_steps=2, inspect_images=5))
    code = (
        "import sys; from vitline.infra.storage import open_store; from vitline.vit.run.training_run import TrainingRun; "
        "from vitline.vit.training.world import World;"
        "print(TrainingRun(open_store(sys.argv[1]), int(sys.argv[2]), World()).execute(), 'torch._dynamo' in sys.modules)"
    )
    command = [sys.executable, "-c", code, run.uri, str(attempt)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "finished False\n"


SMALL = {"image_size_px": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        HybridConfig(stages=(1,), patch_size=2, **SMALL),
        BiTConfig(image_size_px=16, stages=(1,)),
        ViTConfig(patch_size_px=8, pool="map", pos_embed="relative", stochastic_depth_rate=0.1, **SMALL),
        ViTConfig(patch_size_px=8, pos_embed="learned-2d", pos_embed_at="every-layer", pre_logits=True, **SMALL),
    ],
    ids=["hybrid", "bit", "map-relative", "2d-every-layer"],
)
def test_every_network_trains_is_published_and_can_be_fine_tuned(finished, train_config, model):
    run = finished(replace(train_config("networks", steps=4, inspect_images=2), **{"recipe.model": model}))
    state = read_state(run)
    assert all(math.isfinite(loss) for loss in losses_of(run).values())
    assert "inspection/patch-filters.png" in state["inspection"]
    source = load_model(state["model"]).network
    tuned = adapt(source, model.for_transfer(), 3)
    assert tuned.head.weight.shape[0] == 3
    kept = set(tuned.state_dict()) - {"head.weight", "head.bias"}
    assert all(torch.equal(tuned.state_dict()[name], source.state_dict()[name]) for name in kept)


def test_one_process_per_node_reports_system_metrics(root):
    """Rank 0's node writes to rank 0's journal, another node to its own journal; one process per node does."""
    run, steps = open_store(root), iter((5, 6, 6))
    held = Run(run, acquire_lease(run, "owls-0a", job_state=lambda job: None, owner="test").attempt)
    with Reporter(held, 10, active=True) as reporter:
        with system_metrics(held, World(), reporter.journal, lambda: next(steps)):
            pass
        with system_metrics(held, World(rank=3, node_rank=1, local_rank=1), None, lambda: next(steps)):
            pass
        with system_metrics(held, World(rank=2, node_rank=1), None, lambda: next(steps)):
            pass
    assert [s.key for s in list_segments(run)] == [
        "journal/a1/segment-000000.jsonl",
        "journal/a1/node-1/segment-000000.jsonl",
    ]
    assert {(r.key, r.step) for r in read_journal(run) if r.key.endswith("cpu_fraction")} == {
        ("system/node0/cpu_fraction", 5),
        ("system/node1/cpu_fraction", 6),
    }


def test_preempted_run_resumes_bit_for_bit_in_another_attempt(start, finished, train_config, stop_at):
    whole = finished(train_config("whole"))
    config = train_config("parts")
    run, attempt = start(config)
    stop_at(7, run, attempt)
    assert read_state(run)["step"] == 7
    run, attempt = start(config, run)
    assert attempt == 2
    assert TrainingRun(run, attempt, World()).execute() == "finished"
    assert losses_of(run) == losses_of(whole)
    assert load_model(read_state(run)["model"]).digest == load_model(read_state(whole)["model"]).digest


@pytest.mark.parametrize("stop", [5, 8])
def test_a_run_with_frozen_layers_resumes_bit_for_bit_in_the_steps_of_the_head_and_after(
    start, finished, train_config, stop_at, stop
):
    layers = {"recipe.optim.head_first_steps": 6, "recipe.optim.frozen": 1, "recipe.optim.layer_decay": 0.5}
    whole, config = (replace(train_config(name, steps=12), **layers) for name in ("whole", "parts"))
    whole, (run, attempt) = finished(whole), start(config)
    stop_at(stop, run, attempt)
    run = finished(config, run)
    assert losses_of(run) == losses_of(whole)
    assert load_model(read_state(run)["model"]).digest == load_model(read_state(whole)["model"]).digest


def test_a_damaged_checkpoint_is_marked_and_the_run_goes_on_from_an_older_one_bit_for_bit(
    start, finished, train_config, stop_at
):
    whole = finished(train_config("whole"))
    config = train_config("parts", save_every_steps=5, keep_checkpoints=3)
    run, attempt = start(config)
    stop_at(12, run, attempt)
    newest = list_checkpoints(run)[0]
    (weights,) = [key for key in run.list(newest) if key.endswith(".safetensors")]
    data = run.read(weights)
    run.write(weights, data[:-1] + bytes([data[-1] ^ 1]))
    run = finished(config, run)
    assert losses_of(run) == losses_of(whole)
    assert load_model(read_state(run)["model"]).digest == load_model(read_state(whole)["model"]).digest
    assert {weights, f"{newest}/rejected.json"} < set(run.list(newest))


def test_a_run_that_pauses_goes_on_bit_for_bit(start, finished, train_config):
    whole = finished(train_config("whole"))
    run, config = None, train_config("parts")
    for pause, state, steps in ((7, "paused", 7), (7, "paused", 7), (13, "paused", 13), (20, "finished", 20)):
        run, attempt = start(config, run, pause_at_step=pause)
        assert TrainingRun(run, attempt, World()).execute() == state
        assert (read_state(run)["step"], "model" in read_state(run)) == (steps, state == "finished")
        assert list_checkpoints(run)[0].startswith(f"checkpoints/step-{steps:09d}-")
    assert losses_of(run) == losses_of(whole)
    assert load_model(read_state(run)["model"]).digest == load_model(read_state(whole)["model"]).digest


def validation(run):
    """{(name, step): value} of the scores on held-out images."""
    return {(r.key, r.step): r.value for r in read_journal(run) if r.key.startswith("val/")}


@pytest.mark.parametrize("pool", ["token", "map"])
def test_scores_during_a_training_change_nothing_in_it(finished, train_config, pool):
    averaged = {"recipe.average_decay": 0.9, "recipe.model.pool": pool}
    plain = finished(replace(train_config("plain"), **averaged))
    scored = finished(replace(train_config("scored", evaluate_every_steps=3), **averaged))
    assert losses_of(scored) == losses_of(plain)
    assert load_model(read_state(scored)["model"]).digest == load_model(read_state(plain)["model"]).digest
    found = validation(scored)
    assert sorted({step for _, step in found}) == [3, 6, 9, 12, 15, 18, 20]
    assert {key for key, _ in found} == {"val/loss", "val/top1"}
    assert found["val/loss", 20] == validation(plain)["val/loss", 20]
    assert scored.read_json("progress.json")["validation"].startswith("val loss ")


def test_a_run_that_stops_where_it_would_be_scored_is_scored_on_resuming(start, finished, train_config, stop_at):
    whole = finished(train_config("whole", evaluate_every_steps=4))
    config = train_config("parts", evaluate_every_steps=4)
    run, attempt = start(config)
    stop_at(8, run, attempt)
    assert max(step for _, step in validation(run)) == 4
    run = finished(config, run)
    assert validation(run) == validation(whole)
    assert losses_of(run) == losses_of(whole)


def test_several_labels_per_image_are_scored_by_their_mean_average_precision(finished, train_config, tagged):
    changes = {"recipe.loss": "sigmoid", "recipe.input.num_lanes": 1, "recipe.input.augment.flip": False}
    config = replace(train_config("tags", evaluate_every_steps=10, steps=60), corpus=tagged.uri, **changes)
    run = finished(config)
    found = {step: value for (key, step), value in validation(run).items() if key == "val/mean_average_precision"}
    assert list(found) == [10, 20, 30, 40, 50, 60]
    assert found[60] == read_state(run)["val_mean_average_precision"]
    assert found[10] < found[60] <= 1
    assert "mAP" in run.read_json("progress.json")["validation"]


def test_a_resumed_run_keeps_the_same_lasting_checkpoints(start, finished, train_config, stop_at):
    keeping = {"save_every_steps": 3, "keep_checkpoints": 1, "keep_every_images": 100}  # of 16 a step
    config, kept = train_config("permanent", **keeping), []
    for stop in (None, 8):  # 8 is the first step after 100 images, but no regular one
        run = open_store(f"memory://{uuid.uuid4().hex}/runs/r")
        if stop:
            stop_at(stop, *start(config, run))
        finished(config, run)
        kept.append([int(prefix.split("-")[1]) for prefix in list_checkpoints(run)])
    assert kept == [[20, 15, 9]] * 2  # after 100 and 200 images; 300 are reached after the last regular one


@pytest.mark.parametrize("stop", [None, 14])
def test_the_checkpoint_with_the_best_score_is_kept_also_by_a_resumed_run(
    start, finished, train_config, stop_at, monkeypatch, stop
):
    config = train_config("best", save_every_steps=3, evaluate_every_steps=3, keep_checkpoints=1, keep_best=True)
    scores = {3: 0.2, 6: 0.7, 9: 0.4, 12: 0.7, 15: 0.6, 18: 0.1, 20: 0.5}
    run = open_store(f"memory://{uuid.uuid4().hex}/runs/r")

    def scored(hooks, network, step):
        hooks.note_score(step, scores[step])

    monkeypatch.setattr(RunHooks, "evaluate", scored)
    if stop:
        stop_at(stop, *start(config, run))
    finished(config, run)
    assert [int(prefix.split("-")[1]) for prefix in list_checkpoints(run)] == [20, 12]
    assert best_checkpoint(run) == {"step": 12, "score": 0.7}


def test_the_last_checkpoint_may_be_the_best(finished, train_config):
    run = finished(train_config("best", save_every_steps=10, evaluate_every_steps=10, keep_best=True))
    found = {record.step: record.value for record in read_journal(run) if record.key == "val/top1"}
    best = best_checkpoint(run)
    assert best["score"] == max(found.values()) == found[best["step"]]


def test_a_best_checkpoint_needs_scores_of_steps_that_are_saved(train_config):
    with pytest.raises(ValueError, match=r"evaluate_every_steps=15 is no multiple of save_every_steps=10\. Set both"):
        train_config("best", evaluate_every_steps=15, keep_best=True)


@pytest.fixture
def refuse(monkeypatch):
    """refuse(share): the decoder refuses this share of all images, as one of another version may do."""

    def start(share):
        def decode_some(data, policy):
            if zlib.crc32(data) < share * 2**32:
                raise ImageRejected("corrupt", "refused by the test")
            return decode(data, policy)

        monkeypatch.setattr(vitline.vit.input.read_shards, "decode", decode_some)

    return start


def test_a_run_with_bad_examples_finishes_counts_them_and_resumes_bit_for_bit(
    start, finished, train_config, refuse, stop_at
):
    refuse(0.02)
    whole = finished(replace(train_config("whole", decode_threads=2), val_split=None))
    counts = {r.step: r.value for r in read_journal(whole) if r.key == "input/bad_examples"}
    assert 0 < counts[20] <= 10
    assert sorted(counts.values()) == [counts[step] for step in range(1, 21)]
    config = replace(train_config("parts", micro_batch_size=8), val_split=None)
    run, attempt = start(config)
    stop_at(7, run, attempt)
    run = finished(config, run)
    assert losses_of(run) == losses_of(whole)
    assert load_model(read_state(run)["model"]).digest == load_model(read_state(whole)["model"]).digest


def test_too_many_bad_examples_fail_the_run_with_the_reason_and_without_a_restart(start, train_config, refuse):
    refuse(1)
    run, attempt = start(train_config("other-decoder", save_every_steps=1))
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    reason = read_state(run)["reason"]
    assert reason.startswith(
        "16 of the 16 examples read since the workers started cannot be decoded, but execution.max_bad_f"
    )
    assert reason.count("of split 'train'): corrupt: refused by the test") == 3
    assert "vitline data verify NAME --pixels" in reason
    assert not list_checkpoints(run)


def test_the_score_of_a_run_is_never_one_of_fewer_images(start, train_config, refuse):
    """With one bad image among those of the validation split the run ends with an error, as before."""
    refuse(0.02)
    run, attempt = start(train_config("scored"))
    with pytest.raises(ValueError, match=r"of split 'val'\) cannot be decoded"):
        TrainingRun(run, attempt, World()).execute()


@pytest.mark.slow
@pytest.mark.parametrize(("on_cancel", "kept"), [("checkpoint", 1), ("discard", 0)])
def test_stop_request_affects_its_own_attempt_only(start, finished, train_config, on_cancel, kept):
    run, attempt = start(train_config("stopped", on_cancel=on_cancel))
    request_stop(run, "cancelled", by="test", attempt=attempt)
    assert TrainingRun(run, attempt, World()).execute() == "cancelled"
    assert len(list_checkpoints(run)) == kept
    assert read_state(run)["reason"] == "test"
    run = finished(train_config("stopped"), run)


def test_run_whose_checkpoints_are_all_damaged_fails_with_the_list_instead_of_starting_anew(
    start, train_config, stop_at
):
    config = train_config("damaged")
    run, attempt = start(config)
    stop_at(1, run, attempt)
    (prefix,) = list_checkpoints(run)
    (weights,) = [key for key in run.list(prefix) if key.endswith(".safetensors")]
    run.delete(weights)
    before = run.list("checkpoints/")
    run, attempt = start(config, run)
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    assert read_state(run)["state"] == "failed"
    assert prefix in read_state(run)["reason"]
    assert run.list("checkpoints/") == sorted([*before, f"{prefix}/rejected.json"])
    assert set(losses_of(run)) <= {1}  # nothing was trained again


def test_attempt_that_lost_its_lease_writes_nothing(start, train_config):
    run, old = start(train_config("fenced"))
    start(train_config("fenced"), run)
    before = run.list()
    assert TrainingRun(run, old, World()).execute() is None
    assert run.list() == before


def test_attempt_that_loses_its_lease_at_a_save_ends_at_once_and_writes_nothing_more(start, train_config, monkeypatch):
    run, attempt = start(train_config("overtaken"))
    asked, before = itertools.count(1), []

    def take_over_before_the_save(watch):
        step = next(asked)
        if step == 10:  # it is saved, and so is step 20
            start(train_config("overtaken"), run)
            before.extend((key, run.read(key)) for key in run.list())
        for thread in threading.enumerate():
            if thread.name == "checkpoint-saver":
                thread.join()

    monkeypatch.setattr(StopPoller, "asked", take_over_before_the_save)
    with pytest.raises(LeaseLost):
        TrainingRun(run, attempt, World()).execute()
    assert next(asked) - 1 in (10, 11)
    assert [(key, run.read(key)) for key in run.list() if key != "lease.json"] == [
        (key, data) for key, data in before if key != "lease.json"
    ]


def test_restarts_without_progress_fail_the_run_with_their_first_error(start, train_config):
    """A corpus that was replaced fails every time, before the first step; the driver would restart it for ever."""
    run, attempt = start(train_config("stuck", max_restarts_without_progress=2))
    spec = run.read_json("config.json")
    run.write_json("config.json", {**spec, "inputs": {**spec["inputs"], "corpus": "0" * 64}})
    run.write_json(f"errors/a{attempt}-2-rank1.json", {"at": 2.0, "rank": 1, "error": "Connection closed by peer"})
    run.write_json(f"errors/a{attempt}-1-rank0.json", {"at": 1.0, "rank": 0, "error": "The corpus was replaced"})
    for _ in range(3):
        with pytest.raises(RuntimeError, match="it was replaced"):
            TrainingRun(run, attempt, World()).execute()
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    assert read_state(run)["reason"].endswith("rank 0: The corpus was replaced")


def test_an_error_before_the_newest_checkpoint_is_not_the_cause_of_later_failures(start, train_config, stop_at):
    """In weeks an attempt survives many errors. The reason names the first of those that no new checkpoint came after."""
    run, attempt = start(train_config("weeks", max_restarts_without_progress=1))
    run.write_json(f"errors/a{attempt}-1-rank0.json", {"at": 1.0, "rank": 0, "error": "a node was taken away"})
    stop_at(1, run, attempt)
    run.delete("state.json")  # as if the workers had been killed after the checkpoint, so that the attempt goes on
    spec = run.read_json("config.json")
    run.write_json("config.json", {**spec, "inputs": {**spec["inputs"], "corpus": "0" * 64}})
    for number in range(2):
        with pytest.raises(RuntimeError, match="it was replaced"):
            TrainingRun(run, attempt, World()).execute()
        error = {"at": time.time(), "rank": 0, "error": f"failure {number}"}
        run.write_json(f"errors/a{attempt}-2-{number}-rank0.json", error)
    assert TrainingRun(run, attempt, World()).execute() == "failed"
    assert read_state(run)["reason"].endswith("rank 0: failure 0")


@pytest.mark.parametrize(("poisoned", "state"), [({7}, "finished"), (range(7, 99), "diverged")])
def test_a_step_without_a_finite_loss_is_left_out_and_many_end_the_run(
    start, train_config, monkeypatch, poisoned, state
):
    config = train_config("diverging", micro_batch_size=16, save_every_steps=5, max_nonfinite_steps=2)
    run, attempt = start(config)
    forward, steps = loop.forward, itertools.count(1)  # each step has one micro-batch
    monkeypatch.setattr(loop, "forward", lambda *args: forward(*args) * (math.nan if next(steps) in poisoned else 1.0))
    assert TrainingRun(run, attempt, World()).execute() == state
    assert read_state(run)["state"] == state
    assert math.isnan(losses_of(run)[7])
    skipped = [r.step for r in read_journal(run) if r.key == "guard/nonfinite_steps" and r.value]
    assert skipped == ([7] if state == "finished" else [7, 8, 9])
    checkpoint = newest_checkpoint(run, pytest.fail)[1]
    assert all(tensor.isfinite().all() for tensor in checkpoint.values() if tensor.is_floating_point())


def test_run_key_depends_on_decode_policy_and_held_out_split(train_config, root, digits, tmp_path):
    """The corpus digest covers bytes and labels, not how they are decoded or what is scored at the end."""
    config = train_config("key")
    other_val = TrainConfig.model_validate(config.model_dump() | {"val_split": "test"})
    copy = open_store(str(tmp_path / "copy"))
    for key in digits.list():
        copy.write(key, digits.read(key))
    manifest = copy.read_json("manifest.json")
    manifest["decode_policy"]["background"] = [0, 0, 0]
    copy.write_json("manifest.json", manifest)
    other_pixels = TrainConfig.model_validate(config.model_dump() | {"corpus": copy.uri})
    assert len({resolve(c, root).spec().run_key for c in (config, other_val, other_pixels)}) == 3


def test_a_model_is_published_below_the_root_whatever_the_folder_of_the_job(train_config, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(train_config("relative"), "store").spec().models == f"{open_store(root).uri}/models"


def mixture_of(two_corpora, train_config, **changes):
    """A training on three parts of `birds` to one part of `city`, whose classes bus and tram are one, and whose owls are dropped."""
    birds, city = (Corpora(open_store(two_corpora)).find(name).store.uri for name in ("birds", "city"))
    mixture = {"corpora": [{"corpus": birds, "weight": 3}, {"corpus": city, "weight": 1}], **changes}
    return replace(train_config("mix", steps=12, save_every_steps=5), corpus=birds, mixture=mixture)


@pytest.fixture
def class_table(tmp_path):
    path = tmp_path / "classes.csv"
    rows = [
        "corpus,class,mixture_class",
        "birds,jay,bird",
        "birds,owl,bird",
        "city,bus,vehicle",
        "city,tram,vehicle",
        "city,owl,",
    ]
    path.write_text("\n".join(rows))
    return path


def test_a_run_on_a_mixture_records_its_corpora_weights_and_classes(finished, train_config, two_corpora, class_table):
    config = mixture_of(two_corpora, train_config, class_map=str(class_table))
    run = finished(config)
    state, model = read_state(run), load_model(read_state(run)["model"])
    assert model.classes == ("bird", "vehicle")
    val = {part.title: part.num_rows("val") for part in open_corpora(config).parts}
    assert state["val_examples"] == sum(val.values())
    assert [(each["corpus"].partition("/")[0], each["share"]) for each in model.provenance["mixture"]] == [
        ("birds", 0.75),
        ("city", 0.25),
    ]
    inputs, record = run.read_json("config.json")["inputs"], run.read_json("mixture.json")
    assert [each["digest"] for each in record["corpora"]] == [inputs["corpus.0"], inputs["corpus.1"]]
    assert (record["classes"], record["label_maps"]) == (["bird", "vehicle"], [[0, 0], [1, None, 1]])
    assert model.provenance["corpus_digest"] == inputs["corpus"]
    assert model.provenance["class_map_digest"] == record["class_map_digest"]


def test_a_resumed_mixture_equals_the_uninterrupted_one(start, finished, train_config, two_corpora, stop_at):
    config = mixture_of(two_corpora, train_config)
    whole = finished(config)
    stopped, attempt = start(config, open_store(whole.uri + "-resumed"))
    stop_at(7, stopped, attempt)
    _, attempt = start(config, stopped)
    assert TrainingRun(stopped, attempt, World()).execute() == "finished"
    assert losses_of(stopped) == losses_of(whole)
    assert read_state(stopped)["val_top1"] == read_state(whole)["val_top1"]


def test_the_key_of_a_mixture_covers_corpora_weights_and_classes(train_config, two_corpora, class_table, root):
    one = mixture_of(two_corpora, train_config)
    swapped = [each.model_dump() for each in reversed(one.mixture.corpora)]
    others = [
        mixture_of(two_corpora, train_config, class_map="prefixed"),
        mixture_of(two_corpora, train_config, class_map=str(class_table)),
        replace(one, **{"mixture.corpora": [each.model_dump() | {"weight": 1} for each in one.mixture.corpora]}),
        replace(one, corpus=swapped[0]["corpus"], **{"mixture.corpora": swapped}),
        replace(one, mixture=None),
    ]
    keys = [resolve(config, root).spec().run_key for config in (one, *others)]
    assert len(set(keys)) == len(keys)
    same = replace(
        one, **{"mixture.corpora": [each.model_dump() | {"weight": 5 * each.weight} for each in one.mixture.corpora]}
    )
    assert resolve(same, root).spec().run_key == keys[0]


def test_a_changed_class_table_is_refused(start, train_config, two_corpora, class_table):
    run, attempt = start(mixture_of(two_corpora, train_config, class_map=str(class_table)))
    class_table.write_text(class_table.read_text().replace("city,owl,", "city,owl,bird"))
    with pytest.raises(RuntimeError, match=r"class map .*classes.csv is not the one that this run was started on"):
        TrainingRun(run, attempt, World()).execute()
