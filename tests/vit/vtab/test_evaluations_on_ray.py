"""Evaluations on a real Ray: after kill -9, only what is missing is computed."""

import re

import pytest
import torch

from vitline.data_prep.shard_format import load_class_names
from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef
from vitline.vit.evaluation.protocols import SMALL_IMAGES
from vitline.vit.input.config import AugmentConfig
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.recipes.digits import network
from vitline.vit.run.run_spec import read_progress

from .conftest import published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def slow_model(root, digits) -> str:
    """A network that takes some ten milliseconds per image."""
    config = ViTConfig(image_size_px=48, patch_size_px=4, embed_dim=192, depth=4, num_heads=3, mlp_dim=768)
    torch.manual_seed(0)
    network = VisionTransformer(config, 10)
    return published(root, "slow", network, load_class_names(digits), AugmentConfig(image_size_px=48))


DIES = """
import os, signal, sys
from vitline.infra.storage import open_store
from vitline.vit.ray_jobs import task_driver

def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dies(task_driver.Extractor):
    ensure = dies

patches = {"Extractor": Dies, "score_probe": dies}
setattr(task_driver, sys.argv[1], patches[sys.argv[1]])
sys.exit(task_driver.drive(open_store(sys.argv[3]), int(sys.argv[5])))
"""


def submit(jobs, spec, program=("-m", "vitline.vit.ray_jobs.task_driver")):
    """A new attempt of the evaluation, as a flow submits it: the run and the id of the job."""
    run = open_store(spec.root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))

    def state(job_id):
        job = jobs.find(job_id)
        return job and job.state

    lease = acquire_lease(run, spec.run_key, job_state=state, owner="test")
    command = ["python", *program, "--run", run.uri, "--attempt", str(lease.attempt)]
    jobs.submit(lease.job_id, command, {}, {})
    return run, lease.job_id


@pytest.mark.long
def test_stored_parts_survive_killed_drivers_and_workers(
    ray_jobs, until, processes, slow_model, probe_spec, root, score, images_forwarded
):
    def parts():
        return {listed.key: listed.tag for listed in open_store(root).scan("features/")}

    spec = probe_spec("linear", slow_model)
    run, job = submit(ray_jobs, spec)
    until(lambda: len(parts()) >= 1, job)
    (driver,) = processes("vitline.vit.ray_jobs.task_driver", run.uri)
    driver.kill()
    assert ray_jobs.follow(job, lambda _: None, poll_s=0.2).state == "failed"
    before = parts()
    assert 1 <= len(before) < 5
    assert not open_store(root).list("scores/")

    run, job = submit(ray_jobs, spec)
    until(lambda: (read_progress(run) or {}).get("step", 0) > 0, job)
    assert read_progress(run)["total_steps"] == 1797
    until(lambda: len(parts()) > len(before), job)
    processes("ray::features-")[0].kill()
    assert ray_jobs.follow(job, lambda _: None, poll_s=0.2).state == "succeeded", ray_jobs.logs(job)
    assert parts().items() >= before.items()
    (recorded,) = read_state(run)["scores"]
    assert recorded["num_examples"] == 797
    assert recorded["value"] > 0.5
    progress = read_progress(run)
    assert (progress["step"], progress["total_steps"], progress["unit"]) == (1, 1, "scores")

    again = score(spec.model_copy(update={"run_key": "again-000000000000"}))
    assert [one.model_dump(mode="json") for one in again] == [recorded]
    assert images_forwarded == []


@pytest.mark.long
def test_a_killed_sweep_repeats_no_finished_trial(ray_jobs, until, processes, digits, root):
    rates = tuple(0.01 * (i + 1) for i in range(6))
    spec = EvaluationSpec(
        run_key="sweep-000000000000", tasks=(TaskRef(name="digits", corpus=digits.uri),), models=(None,),
        architecture=network(), protocol=replace(SMALL_IMAGES, learning_rates=rates, total_steps=30, warmup_steps=3),
        root=root,
    )  # fmt: skip

    def results():
        return [key for key in open_store(root).child("trials").list() if key.endswith(".json")]

    run, job = submit(ray_jobs, spec)
    until(lambda: len(results()) >= 3, job)
    (driver,) = processes("vitline.vit.ray_jobs.task_driver", run.uri)
    driver.kill()
    assert ray_jobs.follow(job, lambda _: None, poll_s=0.2).state == "failed"
    finished = results()  # what ended while it was killed counts too
    run, job = submit(ray_jobs, spec)
    assert ray_jobs.follow(job, lambda _: None, poll_s=0.2).state == "succeeded", ray_jobs.logs(job)
    ran = re.findall(r"trial=(\S+) top1=", ray_jobs.logs(job))
    assert len(ran) == len(set(ran)) == len(rates) + 1 - len(finished)
    assert {f"{key}.json" for key in ran}.isdisjoint(finished)
    (score,) = read_state(run)["scores"]
    assert len(score["trials"]) == len(rates) + 1


@pytest.mark.long
def test_workers_that_die_each_time_end_the_evaluation_with_a_reason(ray_jobs, models, probe_spec, root):
    spec = probe_spec("head", models.trained)

    def reason(what):
        run, job = submit(ray_jobs, spec, program=("-c", DIES, what))
        ended = ray_jobs.follow(job, lambda _: None, poll_s=0.2)
        assert (ended.state, ended.exit_code) == ("failed", 1), ray_jobs.logs(job)
        return read_state(run)["reason"]

    found = reason("Extractor")
    assert re.search(r"features-\w+-test-\S+ was tried \d+ times, and its process ended each time", found), found
    found = reason("score_probe")
    assert re.search(
        r"digits-head-\S+ was tried \d+ times, and its process ended each time; .* it was killed|crashed", found
    ), found


def test_model_without_weights_fails_with_one_sentence(ray_jobs, slow_model, probe_spec):
    model = open_store(slow_model)
    model.delete(model.read_json("config.json")["weights"])
    run, job = submit(ray_jobs, probe_spec("knn", slow_model, run_key="broken-000000000000"))
    assert ray_jobs.follow(job, lambda _: None, poll_s=0.2).state == "failed"
    assert "model.safetensors" in read_state(run)["reason"]
    assert "Traceback" not in read_state(run)["reason"]
