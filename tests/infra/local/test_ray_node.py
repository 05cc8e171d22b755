"""A real one-node Ray: jobs with ids of our choice, and no process left over however its owner ends."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from vitline.infra.children import processes_with
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.ray_jobs import RayJobs

from ...eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.servers]

# A driver that ignores SIGTERM, with a child in a session of its own that ignores it, too.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
os.write(1, b"deaf\\n")  # one write: print writes the line end separately, and two processes write here
time.sleep(1000)
"""
# A shell makes background programs ignore Ctrl-C, and their child processes inherit that.
OWNER = """
import json, pathlib, signal, sys, time
from vitline.infra.children import processes_with
from vitline.infra.local.local_ray import LocalRay
signal.signal(signal.SIGINT, signal.default_int_handler)
with LocalRay(pathlib.Path(sys.argv[1]), num_cpus=1) as ray:
    print(json.dumps(ray.env), flush=True)
    time.sleep(1000)
"""


def jobs_of(env):
    return RayJobs(env["RAY_ADDRESS"], env["RAY_AUTH_TOKEN_PATH"])


def processes_of(env):
    """All processes that inherited the token of a stack, whatever their parent is now."""
    return processes_with("RAY_AUTH_TOKEN_PATH", env["RAY_AUTH_TOKEN_PATH"])


def start_stubborn_job(env):
    jobs = jobs_of(env)
    jobs.submit("stubborn", ["python", "-c", STUBBORN], {}, {})
    try:
        eventually(
            lambda: jobs.logs("stubborn").splitlines().count("deaf") == 2, awaited="the stubborn job did not start"
        )
    except AssertionError as error:
        raise AssertionError(f"{error}: {jobs.find('stubborn')} {jobs.logs('stubborn')!r}") from None


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    logs = tmp_path_factory.mktemp("ray")
    with LocalRay(logs, num_cpus=1) as started:
        started.logs = logs
        yield started


def test_submitting_a_job_id_again_runs_nothing(ray):
    jobs = jobs_of(ray.env)
    assert jobs.find("a") is None
    script = "import os, sys, vitline; print(os.environ['VITLINE_X'], vitline.__name__); sys.exit(75)"
    for _ in range(2):
        jobs.submit("a", ["python", "-c", script], {"VITLINE_X": "it's"}, {"corpus": "c"})
    states = []
    job = jobs.follow("a", lambda job: states.append(job.state), poll_s=0.1)
    assert (job.state, job.exit_code) == ("failed", 75)
    assert states[-1] == "failed"
    # Ray itself writes one line, sometimes after those of a job as short as this one.
    assert "it's vitline" in jobs.logs("a").splitlines()
    jobs.submit("a", ["python", "-c", script], {"VITLINE_X": "again"}, {"corpus": "c"})
    assert jobs.find("a") == job


def test_stopped_job_gets_its_grace_period(ray):
    jobs = jobs_of(ray.env)
    script = """
import signal, sys, time
def leave(*_):
    time.sleep(5)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(1000)
"""
    jobs.submit("b", ["python", "-c", script], {"RAY_JOB_STOP_WAIT_TIME_S": "200"}, {})
    eventually(lambda: "ready" in jobs.logs("b").splitlines(), awaited="the job did not start")
    assert jobs.stop("b", wait_s=240).state == "stopped"
    assert jobs.logs("b").splitlines()[-1] == "saved"
    assert jobs.stop("b", wait_s=1).state == "stopped"


def test_a_wrong_token_is_refused(ray, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    with pytest.raises(Exception, match="Invalid authentication token"):
        RayJobs(ray.address, tmp_path / "token").find("a")


def assert_ended(env, logs):
    """No process is left of a Ray on which the stubborn job ran. Its folder was removed, and its logs were kept."""
    assert not processes_of(env)
    assert not Path(env["RAY_AUTH_TOKEN_PATH"]).parent.exists()
    assert list(logs.glob("session_*/job-driver-stubborn.log"))


@pytest.fixture
def owner(tmp_path):
    """A process with a Ray of its own, which a test ends, and the environment of its clients."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def end_owner(owner, number):
    """Ends it with a signal while the stubborn job runs. Only its supervisor is left then to end its Ray."""
    process, env = owner
    start_stubborn_job(env)
    assert len(processes_of(env)) > 10
    process.send_signal(number)
    folder = Path(env["RAY_AUTH_TOKEN_PATH"]).parent
    eventually(lambda: not folder.exists(), awaited="the supervisor has not ended")  # the last thing it removes


def test_no_process_is_left_after_the_owner_was_interrupted(ray, owner, tmp_path):
    end_owner(owner, signal.SIGINT)
    assert_ended(owner[1], tmp_path)
    assert jobs_of(ray.env).find("none") is None  # another Ray on this machine still runs


def test_no_process_is_left_after_the_context_or_after_the_owner_was_killed(ray, owner, tmp_path):
    """Two Rays on one machine, of which each ends alone."""
    start_stubborn_job(ray.env)
    assert jobs_of(owner[1]).find("stubborn") is None
    ray.__exit__()
    assert_ended(ray.env, ray.logs)
    assert jobs_of(owner[1]).find("none") is None
    end_owner(owner, signal.SIGKILL)
    assert_ended(owner[1], tmp_path)


def test_failed_start_raises_a_one_line_error(tmp_path):
    wanted = r"^Ray did not start: ray ended with code 1: ValueError: [^\n\x1b]*minimum allowed[^\n\x1b]*\nSee the logs in [^\n]+\.$"
    with pytest.raises(RuntimeError, match=wanted), LocalRay(tmp_path, object_store_bytes=-1):
        pass


@pytest.mark.long
def test_an_agent_that_is_slow_to_start_does_not_end_the_node(tmp_path):
    """Its raylet waits a fixed 15 s for it: on a busy machine several starts in a row came to nothing."""
    held, agents = [], "ray/dashboard/agent.py"

    def hold_the_agent():
        while not held:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any(word.endswith(agents) for word in process.cmdline()[:4]):
                        process.suspend()
                        held.append(process)
            time.sleep(0.05)
        time.sleep(20)
        held[0].resume()

    holding = threading.Thread(target=hold_the_agent, daemon=True)
    holding.start()
    with LocalRay(tmp_path, num_cpus=1) as ray:
        holding.join()
        assert held[0].is_running(), "Ray was started again"
        assert jobs_of(ray.env).list() == []
