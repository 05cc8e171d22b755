"""A real Slurm of two nodes: trainings over both, the time limit, a cancel, a command that is refused, and two nights."""

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from vitline.infra.children import is_running
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import newest_step

from ...eventually import eventually
from ...pictures import blurred
from ...servers.slurm_cluster import HOSTS, slurm_cluster, why_not_here
from ...trainings import losses_of

ROOT = Path(__file__).parents[3]
STEPS = 60
TRAINING = ["pretrain", "run", "--corpus=digits", "--recipe=digits", f"--set=recipe.total_steps={STEPS}"]
TRAINING += [
    "--set=recipe.optim.warmup_steps=10",
    "--set=execution.log_every_steps=1",
    "--set=execution.save_every_steps=10",
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
NEAR_MIN = 4
"""How long before the time limit Slurm sends the signal."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not_here()), reason=f"the Slurm of this test {why_not_here()}"),
]


class Jobs:
    """Jobs of the script on a root in the folder of a Slurm."""

    def __init__(self, slurm, folder, store):
        self.slurm, self.folder = slurm, folder
        self.store = open_store(str(store))
        self.env = {**os.environ, "VITLINE_ROOT": str(store), "VITLINE_JOB_PYTHON": sys.executable}
        self.env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def submit(self, options, command):
        return self.sbatch("--mem=1500", *options, str(ROOT / "infra/slurm/vitline.sbatch"), *command)

    def sbatch(self, *arguments):
        return self.slurm.on("h0", "sbatch", "--parsable", *arguments, env=self.env, cwd=self.folder).strip()

    def log(self, job, name="vitline"):
        file = self.folder / f"{name}-{job}.log"
        return file.read_text() if file.exists() else ""

    def minutes(self, job):
        """For how long a job has run."""
        hours, minutes, _ = self.slurm.job(job)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def until(self, condition, job, awaited):
        """Waits for a condition, as long as the job has not ended."""

        def found():
            fields = self.slurm.job(job)
            assert fields["JobState"] not in ENDED, f"{fields} {self.log(job)}"
            return condition()

        try:
            return eventually(found, 400, awaited, 0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(job)}") from None

    def ended(self, job):
        """The state of a job that has ended, and its exit code."""

        def fields():
            found = self.slurm.job(job)
            return found if found["JobState"] in ENDED else None

        found = eventually(fields, 400, f"the end of job {job}: {self.log(job)}")
        return found["JobState"], int(found["ExitCode"].split(":")[0]), int(found["Restarts"])

    def runs(self):
        return {key.split("/")[1]: self.store.child("/".join(key.split("/")[:2])) for key in self.store.list("runs/")}

    def training(self, job, but=()):
        """The run of a job, once it has saved a checkpoint."""

        def saved():
            new = [run for key, run in self.runs().items() if key not in but]
            return new[0] if new and newest_step(new[0]) else None

        return self.until(saved, job, "the first checkpoint")

    def workers(self):
        """The processes that train, by host."""
        found = {host: self._running(host, lambda line: "ray::RayTrainWorker" in line) for host in HOSTS}
        return {host: processes for host, processes in found.items() if processes}

    def left(self):
        """What still runs on the nodes beside Slurm."""
        return [
            process
            for host in HOSTS[1:]
            for process in self._running(host, lambda line: "slurmd" not in line and not line.startswith("sleep"))
        ]

    def _running(self, host, is_meant):
        found = []
        for pid in self.slurm.pids(host):
            with contextlib.suppress(psutil.Error):  # it has just ended
                process = psutil.Process(pid)
                if is_running(process) and is_meant(" ".join(process.cmdline())):
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, digits_root):
    folder = tmp_path_factory.mktemp("slurm")
    store = folder / "home" / "store"
    shutil.copytree(digits_root, store)
    with slurm_cluster(folder) as slurm:
        yield Jobs(slurm, folder / "home", store)


def test_a_training_over_two_nodes_survives_the_time_limit_beside_another_job(jobs):
    options = ["--nodes=2", "--time=60", f"--signal=B:USR1@{60 * NEAR_MIN}"]
    job = jobs.submit(options, [*TRAINING, "--num-workers=2"])
    run = jobs.training(job)
    workers = jobs.workers()
    assert {host: len(found) for host, found in workers.items()} == {"h1": 1, "h2": 1}
    # Slurm checks time limits every 30 s. The training is paused, so that it cannot finish before that.
    still = [process for found in workers.values() for process in found]
    for process in still:
        process.send_signal(signal.SIGSTOP)
    jobs.slurm.on("h0", "scontrol", "update", f"JobId={job}", f"TimeLimit={jobs.minutes(job) + NEAR_MIN}")
    refused = jobs.submit(["--nodes=1", "--nodelist=h1"], ["pretrain", "run", "--corpus=digits", "--recipe=digit"])
    jobs.until(lambda: "SIGUSR1: stopping the command" in jobs.log(job), job, "the signal before the time limit")
    for process in still:
        process.send_signal(signal.SIGCONT)
    jobs.until(lambda: jobs.slurm.job(job)["Restarts"] == "1", job, "the requeue")
    assert read_state(run)["state"] == "preempted"
    saved = newest_step(run)
    jobs.slurm.on("h0", "scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert jobs.ended(refused) == ("FAILED", 2, 0)
    assert "digits" in jobs.log(refused).splitlines()[-1], "the error suggests the right name"
    assert jobs.ended(job) == ("COMPLETED", 0, 1)
    state = read_state(run)
    assert (state["state"], state["attempt"]) == ("finished", 2)
    assert sorted(losses_of(run)) == list(range(1, STEPS + 1))
    assert 10 <= saved < STEPS
    assert not jobs.left()


def test_a_stop_by_scancel_saves_a_checkpoint_and_is_not_requeued(jobs):
    known = jobs.runs()
    job = jobs.submit(["--nodes=1"], [*TRAINING, "--seed=1", "--num-workers=1"])
    run = jobs.training(job, but=known)
    jobs.slurm.on("h0", "scancel", "--signal=TERM", "--batch", job)
    assert jobs.ended(job) == ("FAILED", 143, 0)
    assert read_state(run)["state"] == "preempted"
    assert sorted(losses_of(run)) == list(range(1, newest_step(run) + 1))

    again = jobs.submit(["--nodes=1"], [*TRAINING, "--seed=1", "--num-workers=1"])
    jobs.until(lambda: read_state(run)["attempt"] == 2, again, "the second attempt")
    jobs.slurm.on("h0", "scancel", again)
    assert jobs.ended(again)[0] == "CANCELLED"
    assert (read_state(run)["state"], read_state(run)["attempt"]) == ("preempted", 2)
    assert not jobs.left()


NIGHT = {
    "begin": "now+1hour",
    "prepare": "(data prepare --source pictures --name birds)",
    "prepare_on": "(--mem=1500)",
    "pretrain": f"({' '.join(TRAINING).replace('digits', 'birds', 1)} --num-workers=2 --name=birds)",
    "pretrain_on": "(--nodes=2 --mem=1500)",
    "evaluate": "(evaluate run --model=birds --task=birds --protocol=mine.yaml)",
    "evaluate_on": "(--mem=1500)",
}
"""What a user writes into the lines of night.sbatch."""
PROTOCOL = """
base: small-images
protocol: {total_steps: 4, warmup_steps: 1, learning_rates: [0.1]}
"""
JOBS_OF_A_NIGHT = re.compile(r"next night (\d+)\nprepare (\d+), pretrain (\d+), evaluate (\d+)")


def test_nights_of_jobs_that_wait_for_each_other_reach_the_scores(jobs):
    for kind in ("owl", "jay", "wren"):
        folder = jobs.folder / "pictures" / kind
        folder.mkdir(parents=True)
        for index in range(40):
            (folder / f"{index}.jpg").write_bytes(blurred([ord(kind[0]), index]))
    (jobs.folder / "vitline").symlink_to(ROOT)
    (jobs.folder / "mine.yaml").write_text(PROTOCOL)
    script = (ROOT / "infra/slurm/night.sbatch").read_text()
    for name, value in NIGHT.items():
        script, found = re.subn(rf"^{name}=.*$", f"{name}={value}", script, flags=re.M)
        assert found == 1
    (jobs.folder / "night.sbatch").write_text(script)
    known = jobs.runs()

    first = jobs.sbatch("--begin=now+2", "night.sbatch")
    assert jobs.ended(first)[0] == "COMPLETED"
    second, *stages = JOBS_OF_A_NIGHT.search(jobs.log(first, "night")).groups()
    assert [jobs.slurm.job(stage)["Reason"] for stage in stages[1:]] == ["Dependency", "Dependency"]
    assert [jobs.ended(stage)[:2] for stage in stages] == [("COMPLETED", 0)] * 3, [jobs.log(stage) for stage in stages]
    made = {key: read_state(run) for key, run in jobs.runs().items() if key not in known}
    assert {state["state"] for state in made.values()} == {"finished"}
    assert re.search(r"birds.*\d %", jobs.log(stages[-1])), jobs.log(stages[-1])

    assert jobs.slurm.job(second)["Reason"] == "BeginTime"
    jobs.slurm.on("h0", "scontrol", "update", f"JobId={second}", "StartTime=now")
    assert jobs.ended(second)[0] == "COMPLETED"
    third, *stages = JOBS_OF_A_NIGHT.search(jobs.log(second, "night")).groups()
    assert [jobs.ended(stage)[:2] for stage in stages] == [("COMPLETED", 0)] * 3, [jobs.log(stage) for stage in stages]
    again = {key: read_state(run) for key, run in jobs.runs().items() if key not in known}
    assert again == made, "nothing is done twice"
    jobs.slurm.on("h0", "scancel", third)
    assert not jobs.left()
