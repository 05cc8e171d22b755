"""The plan of a training: batch, schedule, decay, checkpoints, days and price, the origin of each setting, and earlier trainings."""

import pytest

from vitline.flows.plans import measured_speed as measured_speed_module
from vitline.flows.plans.measured_speed import MeasuredSpeed, measured_speed, measured_speeds
from vitline.flows.plans.training_plan import (
    batch_text,
    checkpoint_bytes,
    checkpoints_text,
    days_text,
    decay_text,
    lr_picture,
    memory_text,
    plan_rows,
    schedule_text,
    settings_of,
    training_plan,
    verdict_text,
)
from vitline.infra.config import replace
from vitline.infra.runs.journal import Journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.runs.segments import list_segments
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import PlanGpus
from vitline.vit.cost.memory import num_weights
from vitline.vit.cost.training_memory import PlannedMemory, worker_memory
from vitline.vit.models.build import meta_network
from vitline.vit.recipes import recipe_named
from vitline.vit.run.resolved import resolve
from vitline.vit.training.timing.gpus import gpu_named


@pytest.fixture
def b16():
    recipe, execution = recipe_named("vit-b16-i21k").make()
    return TrainConfig(name="birds", corpus="no corpus", recipe=recipe, execution=execution)


def test_a_step_is_shared_by_the_workers_and_by_the_fewest_of_them(b16):
    assert batch_text(b16) == "4,096 images a step: 8 workers x 2 micro-batches of at most 256"
    elastic = replace(b16, **{"execution.min_workers": 1, "execution.num_workers": 16})
    assert batch_text(elastic) == (
        "4,096 images a step: 16 workers x 1 micro-batch of at most 256; with the fewest workers, 1 worker x 16 micro-batches of at "
        "most 256"
    )
    found = batch_text(replace(b16, **{"execution.micro_batch_size": "auto"}))
    assert found.endswith("8 micro-batches of at most 64; a GPU may take another number, found at its start")


def test_the_schedule_is_said_and_drawn(b16):
    assert schedule_text(b16) == "10,000 steps of warmup (41.0 M images) to 0.001, then linear to 1e-05 at step 310,825"
    short = {"recipe.total_steps": 1_000, "recipe.optim.warmup_steps": 500, "recipe.optim.end_lr": 0.0}
    drawn = lr_picture(replace(b16, **short))
    assert (len(drawn), drawn[0], drawn[24], drawn[-1]) == (48, "▁", "█", "▁")
    stairs = {"recipe.optim.schedule": "staircase", "recipe.optim.milestones": (0.5,), "recipe.optim.warmup_steps": 0}
    staircase = replace(b16, **short | stairs)
    assert schedule_text(staircase) == "0.001 from the start, then divided by ten at steps 500"
    assert lr_picture(staircase) == 24 * "█" + 24 * "▁"
    probed = replace(staircase, **{"recipe.optim.head_first_steps": 200})
    assert schedule_text(probed) == "200 steps of the head alone at 0.001, then divided by ten at steps 600"
    warmed = schedule_text(replace(b16, **{"recipe.optim.head_first_steps": 200}))
    assert warmed.startswith(
        "200 steps of the head alone at 0.001, then 10,000 steps of warmup (41.0 M images) to 0.001, then lin"
    )
    cooled = replace(b16, **{"recipe.optim.cooldown_steps": 1_000})
    assert schedule_text(cooled).endswith("; linear to 0 in the last 1,000 steps")


def test_matrices_are_decayed_and_checkpoints_hold_weights_moments_and_average(b16):
    parameters = dict(meta_network(b16.recipe.model, 10).named_parameters())
    weights = sum(each.numel() for each in parameters.values())
    assert decay_text(b16, parameters).startswith("0.03 on 86.1 M weights in 51 tensors; none on 0.27 M in 103")
    assert decay_text(replace(b16, **{"recipe.optim.weight_decay": 0.0}), parameters) == "none on all 86.4 M weights"
    assert checkpoint_bytes(b16, weights) == 12 * weights
    assert checkpoint_bytes(replace(b16, **{"recipe.average_decay": 0.9}), weights) == 16 * weights
    assert checkpoints_text(b16, weights, 40_960.0) == (
        "1.04 GB each, every 2,000 steps (3:20), 156 in all: 162 GB to the store; the newest 2 are kept"
    )
    permanent = replace(b16, **{"execution.keep_every_images": 100_000_000})
    assert checkpoints_text(permanent, weights, None).endswith("and one every 100,000,000 images: 12.4 GB at the end")


def memory_of(config, weights):
    return memory_text(config, weights, worker_memory(config, weights))


def test_memory_counts_each_copy_of_the_weights_and_what_a_worker_keeps_of_them(train_config):
    config = train_config("plan")
    alone = memory_of(config, 10_000)
    held, _, rest = alone.partition(" for ")
    for part in ("weights ", "gradients ", "moments ", "activations for a micro-batch of "):
        assert part in rest
    assert (held, "split" in alone) == ("160 kB", False)  # of float32 weights, gradients and two moments
    four = {"execution.num_workers": 4, "execution.sharding": "fsdp"}
    assert f"{held} for " in memory_of(replace(config, **four), 10_000)
    assert ", split over 4 workers: " in memory_of(replace(config, **four), 10_000)
    weights = num_weights(config.recipe.model, 1000)
    frozen = replace(config, **{"recipe.optim.frozen": "backbone"})
    head = 1000 * config.recipe.model.embed_dim + 1000
    assert worker_memory(frozen, weights).parts == {
        "weights": 4 * weights,
        "moments": 8 * head,
        "average": 0,
        "gradients": 4 * head,
    }
    assert checkpoint_bytes(frozen, weights) == 4 * weights + 8 * head
    averaged = memory_of(replace(config, **{"recipe.average_decay": 0.9}), 10_000)
    assert ", average " in averaged


def test_memory_fits_is_tight_or_does_not_fit_with_what_would_help(b16):
    def text(gpu, held=6 * 10**9, activations=16 * 10**9, **execution):
        config = replace(b16, **{f"execution.{name}": value for name, value in execution.items()})
        return verdict_text(config, PlannedMemory({}, held, held, activations, 256), gpu_named(gpu))

    assert text("H200") == "fits: 22 GB of the 141 GB of H200 (16%)"
    assert text("1TFLOPS-24GB") == (
        "tight: 22 GB of the 24 GB of 1TFLOPS-24GB (92%); take execution.micro_batch_size=230 or "
        "execution.activation_checkpointing=full or execution.sharding=fsdp or a GPU with more memory"
    )
    sharded = text("V100", held=17 * 10**9, sharding="fsdp", activation_checkpointing="full", micro_batch_size=256)
    assert sharded == "does not fit: 33 GB of the 16 GB of V100 (206%); take a GPU with more memory"
    auto = text("V100", micro_batch_size="auto")
    assert auto.startswith("fits: 6.06 GB of the 16 GB of V100 (38%), with a micro-batch of 1; the largest that fits")
    assert text("1TFLOPS") == "not known: the memory of 1TFLOPS was not given; add it, as in 1TFLOPS-48GB"


def test_days_are_images_over_the_rate_and_have_a_price():
    assert days_text(3_600_000 * 60, 8, 1_000.0, PlanGpus("H100", 0.35, 2.5)) == (
        "2.5 days on 8 H100 at 35% of their peak (1,000 images/s): 480 GPU-hours, 1,200.00 at 2.5 each"
    )
    assert days_text(30_000, 1, 1_000.0, PlanGpus("A100", 0.4)) == (
        "0.5 min on 1 A100 at 40% of their peak (1,000 images/s): 0.0083 GPU-hours"
    )


def test_each_setting_has_its_origin(b16):
    found = settings_of(replace(b16, **{"recipe.seed": 3}), "vit-b16-i21k")
    assert found["recipe.seed"] == {"value": 3, "origin": "command line"}
    assert found["recipe.optim.peak_lr"] == {"value": 0.001, "origin": "default"}
    assert found["recipe.optim.weight_decay"] == {"value": 0.03, "origin": "recipe vit-b16-i21k"}


def test_a_speed_is_put_beside_the_plan_of_a_gpu_with_a_known_peak(b16):
    measured = MeasuredSpeed("birds-0a1b", b16, 3_440.0, 1, "NVIDIA H200")
    assert measured.text(21_843) == (
        "birds-0a1b: 3,440 images/s on 1 x NVIDIA H200, 1.05 of the plan at 35% of its peak"
    )
    held = MeasuredSpeed("birds-0a1b", b16, 3_440.0, 1, "NVIDIA H200", (33_000_000_000, 30_000_000_000))
    assert held.text(21_843).endswith("of its peak; 33 GB of memory, 1.10 of the plan")
    assert MeasuredSpeed("birds-0a1b", b16, 60.0, 2, "AMD EPYC").text(10) == "birds-0a1b: 60 images/s on 2 x AMD EPYC"
    assert MeasuredSpeed("birds-0a1b", b16, 60.0, 2, "").text(10) == "birds-0a1b: 60 images/s on 2 workers"


def test_the_speed_of_a_run_is_that_of_its_journal_and_a_damaged_one_has_none(b16, root, caplog):
    run = open_store(root).child("runs/birds-0a1b")
    acquire_lease(run, "birds-0a1b", job_state=lambda job: "running", owner="test")
    journal = Journal(run, 1)
    for step, rate in enumerate((10.0, 100.0, 120.0), 1):
        journal.record({"throughput/images_per_s": rate}, step)
    journal.seal()
    for number, world in enumerate((2, 4)):
        run.write_json(
            f"starts/a1-from-none-00{number}.json", {"at": number, "world_size": world, "hardware": "AMD EPYC"}
        )
    assert measured_speed(run, b16) == MeasuredSpeed("birds-0a1b", b16, 100.0, 4, "AMD EPYC")
    write_state(run, "running", 1, peak_memory_bytes=11, planned_memory_bytes=10)
    assert measured_speed(run, b16).memory == (11, 10)
    run.write(list_segments(run)[0].key, b"{}\n")
    assert measured_speed(run, b16) is None
    assert "the speed of" in caplog.text


def test_a_plan_has_all_of_it_and_knows_gpus_by_name(train_config, root):
    config = replace(train_config("owls", workers=2), **{"execution.device": "cpu"})
    plan = training_plan(resolve(config, root))
    assert plan["earlier_runs"] == []
    assert plan["memory_verdict"] == "not known for CPUs"
    assert plan["days"] == "not known for CPUs; `vitline model bench` measures a step"
    on_gpus = replace(config, **{"execution.device": "auto"})
    assert "on 2 A100 at 50% of their peak" in training_plan(resolve(on_gpus, root), PlanGpus("A100", 0.5))["days"]
    with pytest.raises(ValueError, match=r"The peak of the GPU 'T1000' is not known; available: A100"):
        training_plan(resolve(on_gpus, root), PlanGpus("T1000"))
    rows = dict(plan_rows(on_gpus, plan))
    assert "on GPUs" not in rows  # done in no time
    assert "on GPUs" in dict(plan_rows(on_gpus, {**plan, "images": 10**12}))
    assert "on GPUs" not in dict(plan_rows(config, {**plan, "images": 10**12}))


def test_the_speeds_of_a_plan_are_those_of_ended_trainings_like_it_the_newest_first(b16, root, monkeypatch):
    monkeypatch.setattr(measured_speed_module, "measured_speed", lambda run, config: run.uri.rpartition("/")[2])
    precision = "float32" if b16.recipe.precision == "bfloat16" else "bfloat16"
    other = replace(b16, **{"recipe.precision": precision})
    for key, config, state in (
        ("a", b16, "finished"),
        ("b", b16, "paused"),
        ("c", b16, "failed"),
        ("d", other, "finished"),
        ("e", b16, "finished"),
        ("f", b16, "finished"),
    ):
        run = open_store(root).child(f"runs/{key}")
        run.write_json("config.json", {"run_key": key, "config": config.model_dump(mode="json")})
        write_state(run, state, 1)
    run.write("config.json", b"{}")
    open_store(root).write("runs/e/attempts/a2.json", b"{}")  # it was submitted again
    assert [*measured_speeds(root, b16)] == ["b", "a"]
