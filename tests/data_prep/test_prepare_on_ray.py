"""Ray Data on a real Ray, with processes killed by SIGKILL, gives the digest of an uninterrupted run."""

import re
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, Digits, PrepareExecution
from vitline.data_prep.executors import OnRay
from vitline.data_prep.prepare.job import PrepareSpec, prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# A driver whose tasks wait once there are `most` files: so it is killed before the work is done, however late that is.
STOPS_SHORT = """
import glob, sys, time
from vitline.data_prep.prepare import job
from vitline.infra.storage import open_store

work = job.{work}

def {work}(task):
    while len(glob.glob({pattern!r})) >= {most}:
        time.sleep(0.1)
    return work(task)

job.{work} = {work}
sys.exit(job.drive(open_store(sys.argv[2]), int(sys.argv[4])))
"""
DIES = """
import os, signal, sys
from vitline.data_prep.prepare import job
from vitline.infra.storage import open_store

def dies(task):
    os.kill(os.getpid(), signal.SIGKILL)

job.examine_chunk = dies
sys.exit(job.drive(open_store(sys.argv[2]), 1))
"""


@pytest.fixture(scope="module")
def uninterrupted(fill_folder, request_for, tmp_path_factory):
    """A request for 900 pictures in 225 chunks, and the manifest that it gives in one process."""
    request = request_for(fill_folder(tmp_path_factory.mktemp("pictures"), per_class=300), examples_per_chunk=4)
    (manifest,) = prepare([request], f"memory://uninterrupted-{uuid.uuid4().hex}")
    # Otherwise one process would prepare all images.
    return replace(request, **{"execution.small_images": 0}), manifest


def submit(jobs, root, request, program=("-m", "vitline.data_prep.prepare.job")):
    """A new attempt of the preparation, as a flow submits it: the run and the id of the job."""
    run, key = open_store(root / "runs" / "prepare"), f"prepare-{root.name}"
    spec = PrepareSpec(run_key=key, root=str(root), requests=(request,))
    run.write_json("config.json", spec.model_dump(mode="json"))

    def state(job_id):
        job = jobs.find(job_id)
        return job and job.state

    lease = acquire_lease(run, key, job_state=state, owner="test")
    command = ["python", *program, "--run", run.uri, "--attempt", str(lease.attempt)]
    jobs.submit(lease.job_id, command, {}, {})
    return run, lease.job_id


def stamps(folder, pattern):
    return {path: path.stat().st_mtime_ns for path in folder.glob(pattern)}


def test_killed_drivers_and_workers_do_not_change_the_corpus(ray_jobs, until, processes, uninterrupted, tmp_path):
    request, expected = uninterrupted
    root = tmp_path / "killed"
    corpus = root / "corpora/folder" / expected.version
    records, shards = "_work/chunks-of-4/records-*.parquet", "_work/gather/*/s000/*[0-9].json"
    finished = {}

    def kill_at(work, pattern, at_least):
        program = STOPS_SHORT.format(work=work, pattern=str(corpus / pattern), most=2 * at_least)
        run, job = submit(ray_jobs, root, request, ("-c", program))
        until(lambda: len(stamps(corpus, pattern)) >= at_least, job)
        (driver,) = processes("job.drive", run.uri)
        driver.kill()
        ended = ray_jobs.follow(job, lambda _: None, poll_s=0.2)
        assert (ended.state, (corpus / "manifest.json").exists()) == ("failed", False)
        assert stamps(corpus, records).items() >= finished.items()
        finished.update(stamps(corpus, records))

    kill_at("examine_chunk", records, 20)
    assert len(finished) < 225
    kill_at("ensure_shard", shards, 5)
    assert len(finished) == 225
    written = stamps(corpus, shards)
    assert len(written) < sum(split.segments[0].num_shards for split in expected.splits.values())

    run, job = submit(ray_jobs, root, request)
    until(lambda: len(stamps(corpus, shards)) > len(written), job)
    for worker in processes("ray::", "Map")[:1]:
        worker.kill()
    ended = ray_jobs.follow(job, lambda _: None, poll_s=0.2)
    assert ended.state == "succeeded", ray_jobs.logs(job)
    assert stamps(corpus, shards).items() >= written.items()
    assert stamps(corpus, records) == finished
    assert load_manifest(open_store(corpus)).digest == expected.digest
    assert verify_corpus(open_store(corpus)).problems == {}
    assert read_state(run)["corpora"]["folder"]["digest"] == expected.digest


def test_missing_source_fails_with_a_reason_and_without_a_traceback(ray_jobs, tmp_path):
    request = CorpusConfig(name="nothing", source=ClassFolders(path=str(tmp_path / "absent")))
    run, job = submit(ray_jobs, tmp_path / "bad", request)
    ended = ray_jobs.follow(job, lambda _: None, poll_s=0.2)
    assert (ended.state, ended.exit_code) == ("failed", 1)
    assert f"{tmp_path / 'absent'} is neither a folder" in read_state(run)["reason"]
    assert "Traceback" not in ray_jobs.logs(job)


def test_a_task_whose_process_dies_each_time_ends_the_preparation_with_its_name(ray_jobs, tmp_path):
    source = Digits(digits=(0, 1), num_train=16, num_val=4)
    request = CorpusConfig(name="digits", source=source, execution=PrepareExecution(small_images=0))
    run, job = submit(ray_jobs, tmp_path / "dying", request, program=("-c", DIES))
    ended = ray_jobs.follow(job, lambda _: None, poll_s=0.2)
    assert (ended.state, ended.exit_code) == ("failed", 1), ray_jobs.logs(job)
    assert re.fullmatch(
        r"RuntimeError: examine-digits-\d+ was tried \d+ times, and its process ended each time; "
        "the last error: its process was killed, perhaps for its memory, or crashed",
        read_state(run)["reason"],
    ), read_state(run)


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes: a head node without CPUs for the driver, and a worker node."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    # A dead node is detected after 10 s instead of 30 s; a shorter limit would fail nodes on a busy machine.
    health = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "object_store_memory": 100_000_000, "include_dashboard": False, "_system_config": health}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.worker = nodes.add_node(num_cpus=2, object_store_memory=100_000_000)
    yield nodes
    nodes.shutdown()


def prepare_on(address, request, root):
    """The driver, in a process of its own: Ray decides once per process whether it uses tokens."""
    import ray

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    (manifest,) = prepare([request], root, OnRay())
    return manifest


@pytest.mark.long
def test_a_killed_node_loses_only_its_current_work(cluster, uninterrupted, tmp_path):
    """The only worker node is killed during examining and again during writing; each time another one joins."""
    request, expected = uninterrupted
    root = tmp_path / "store"
    corpus = root / "corpora/folder" / expected.version

    def kill_node_at(pattern, number):
        while len(stamps(corpus, pattern)) < number:
            assert not preparing.done(), preparing.result()
            time.sleep(0.02)
        left = stamps(corpus, pattern)
        cluster.remove_node(cluster.worker, allow_graceful=False)
        cluster.worker = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
        return left

    with ProcessPoolExecutor(1, get_context("spawn")) as driver:
        preparing = driver.submit(prepare_on, cluster.address, request, str(root))
        examined = kill_node_at("_work/chunks-of-4/records-*.parquet", 20)
        gathered = kill_node_at("_work/gather/*/s000/*[0-9].json", 5)
        manifest = preparing.result()
    assert 20 <= len(examined) < 225
    assert len(gathered) < len(stamps(corpus, "_work/gather/*/s000/*[0-9].json"))
    assert stamps(corpus, "_work/chunks-of-4/records-*.parquet").items() >= examined.items()
    assert stamps(corpus, "_work/gather/*/s000/*[0-9].json").items() >= gathered.items()
    assert manifest.digest == expected.digest
    assert verify_corpus(open_store(corpus)).problems == {}
