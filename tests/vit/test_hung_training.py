"""A training process whose reader hangs is killed with its stacks on record; the next start resumes from the checkpoint."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World

from ..trainings import begin, losses_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANK = """
import ctypes, os, signal, sys, threading, time
import torch._dynamo  # by the first optimizer; takes seconds on a busy machine
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import open_store
from vitline.vit.input.decoding import processes, training
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.training.world import World

run, gather = open_store(sys.argv[1]), training._gather
lock = threading.Lock()
lock.acquire()

def waits_for_a_lock():
    lock.acquire()

def reads_and_keeps_the_interpreter_lock():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def hanging(*args):
    if list_checkpoints(run):
        globals()[sys.argv[2]]()
    return gather(*args)

def stops_an_input_process(decoding, batches):
    if list_checkpoints(run):
        print(*decoding.pids, flush=True)
        os.kill(decoding.pids[1], signal.SIGSTOP)
    return collect(decoding, batches)

def start_is_no_hang():
    while not list_checkpoints(run):  # on a busy machine the start takes long
        note_progress()
        time.sleep(1)

threading.Thread(target=start_is_no_hang, daemon=True).start()
if sys.argv[2] == "stops_an_input_process":
    collect = processes.InputProcesses.collect
    processes.InputProcesses.collect = stops_an_input_process
else:
    training._gather = hanging
TrainingRun(run, 1, World()).execute()
"""


@pytest.mark.parametrize("hang", ["waits_for_a_lock", "reads_and_keeps_the_interpreter_lock"])
def test_a_hung_training_is_killed_with_its_stacks_and_resumes(train_config, root, hang):
    run, _ = begin(train_config("hung", steps=60, progress_timeout_s=15.0), root)
    ended = subprocess.run([sys.executable, "-c", RANK, run.uri, hang], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (error,) = [run.read_json(key) for key in run.list("errors/")]
    assert error["error"].startswith("no progress for 15 s")
    stacks = run.read(error["stacks"]).decode()
    assert f"in {hang}" in stacks
    assert f"in {hang}" in ended.stderr
    assert read_state(run)["state"] == "running"

    assert TrainingRun(run, 1, World()).execute() == "finished"
    assert any("-from-step-" in key for key in run.list("starts/"))
    assert sorted(losses_of(run)) == list(range(1, 61))


@pytest.mark.long
def test_an_input_process_that_stands_still_is_no_progress_and_ends_with_the_training(train_config, root):
    run, _ = begin(train_config("stopped", steps=60, progress_timeout_s=15.0, decode_processes=2), root)
    command = [sys.executable, "-c", RANK, run.uri, "stops_an_input_process"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list_checkpoints(run)
    (error,) = [run.read_json(key) for key in run.list("errors/")]
    assert error["error"].startswith("no progress for 15 s")
    assert "in collect" in run.read(error["stacks"]).decode()
    pids = {int(pid) for pid in ended.stdout.split()}
    assert len(pids) == 2
    while any(map(is_alive, pids)):  # the kernel kills them
        time.sleep(0.05)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_ray_train_starts_a_group_again_of_which_one_rank_stands_still(train_config, root, ray_jobs, until, processes):
    """The other rank waits for it in a collective: both leave what they know, and the same attempt goes on."""
    config = train_config("stands-still", workers=2, steps=2000, save_every_steps=50, progress_timeout_s=30.0)
    run, lease = begin(config, root)
    command = ["python", "-m", "vitline.vit.ray_jobs.train_driver", "--run", run.uri, "--attempt", "1"]
    ray_jobs.submit(lease.job_id, command, env={"RAY_JOB_STOP_WAIT_TIME_S": "11"}, metadata={})
    until(lambda: list_checkpoints(run), lease.job_id)
    processes("TrainWorker")[0].suspend()
    job = ray_jobs.follow(lease.job_id, lambda _: None, poll_s=0.2)
    assert job.state == "succeeded", ray_jobs.logs(lease.job_id)
    state = read_state(run)
    assert (state["state"], state["attempt"]) == ("finished", 1)
    hung = [run.read_json(key) for key in run.list("errors/")]
    hung = [error for error in hung if error["error"].startswith("no progress for 30 s")]
    assert {error["rank"] for error in hung} == {0, 1}
    stacks = [run.read(error["stacks"]).decode() for error in hung]
    assert any("T (stopped)" in text for text in stacks)
    assert any("all_reduce" in text for text in stacks)
    assert "no progress for 30 s" in ray_jobs.logs(lease.job_id)
    assert sorted(losses_of(run)) == list(range(1, 2001))
