"""A week of scheduled nights on real servers, one after another, with something wrong in most of them; prints what each morning says.

`python -m tests.benchmarks.week_of_nights` takes about half an hour. The schedule is that of the deployment. Each of its runs is
made to start at once, as the night of its scheduled start; that of the late night starts when the schedule says, once there is a worker
again. What a person would do between two nights is done by the same requests: edits of
the form, new pictures, a promotion.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_digits

from vitline.flows.catalog.records import read_pipeline
from vitline.flows.nights.from_records import scores_of
from vitline.flows.nights.night_record import NightRecord, read_night
from vitline.flows.on_prefect.deployments import NIGHTLY_CRON
from vitline.infra.children import child_environment
from vitline.infra.local.stack import find_stack
from vitline.infra.night import night_at, night_text
from vitline.infra.settings import DEFAULT_PROJECT, changed_environment
from vitline.infra.storage import open_store

from ..servers.own_servers import AWAY, OwnServers, own_servers

SERIES, DEPLOYMENT = "week", "pretrain-then-transfer/nightly"
PER_CLASS, NEW_PER_CLASS, NUM_LEAKING = 80, 60, 5
FORM: dict[str, Any] = {
    "name": SERIES,
    "corpus": "pictures",
    "recipe": "digits",
    "tasks": ["digits-5-to-9"],
    "from_scratch": False,
    "deadline_hours": 1.0,
}
OVERRIDES: dict[str, Any] = {
    "execution.num_workers": 1,
    "execution.save_every_steps": 40,
    "recipe.total_steps": 16,
    "recipe.optim.warmup_steps": 4,
    "protocol.total_steps": 30,
    "protocol.warmup_steps": 3,
    "protocol.learning_rates": [0.1],
    "nights.num_seeds": 6,
    "nights.smallest_effect": 0.02,
    "nights.ingest": True,
    "nights.early_verdict": False,
}
BETTER = {"recipe.total_steps": 300, "recipe.optim.warmup_steps": 30}
BY_PEOPLE = {"nights.promote": False}


class Week:
    """The series, its pictures, and what its nights leave."""

    def __init__(self, servers: OwnServers, folder: Path) -> None:
        self.servers, self.pictures, self.store = servers, folder / "pictures", open_store(servers.env["VITLINE_ROOT"])
        self.deployment = servers.ask("prefect", f"/deployments/name/{DEPLOYMENT}")["id"]
        self.last_due = ""

    def add_pictures(self, first: int, stop: int) -> None:
        """Digits 0 to 4 as folders by class, from the first-th to the stop-th of each."""
        images, labels = load_digits(return_X_y=True)
        for digit in range(5):
            (self.pictures / str(digit)).mkdir(parents=True, exist_ok=True)
            for i in range(first, stop):
                self.save(images[labels == digit][i], f"{digit}/{i:03d}.png")

    def add_leaking(self) -> None:
        """Pictures of the task, under the label of another digit: leaks where the task has them in val or test."""
        images, labels = load_digits(return_X_y=True)
        for i, image in enumerate(images[labels >= 5][-NUM_LEAKING:]):
            self.save(image, f"0/leak{i}.png")

    def save(self, image: np.ndarray, name: str) -> None:
        pixels = np.clip(image.reshape(8, 8) * 16, 0, 255).astype(np.uint8)
        Image.fromarray(np.repeat(pixels[..., None], 3, axis=2)).save(self.pictures / name)

    def prepare(self) -> None:
        request = {"source": str(self.pictures), "name": "pictures", "val_fraction": 0.1, "test_fraction": 0.0}
        assert self.servers.ended(self.servers.start("prepare-corpus/default", request)).startswith("Completed")
        preset = self.servers.start("prepare-corpus/default", {"preset": "digits-5-to-9"})
        assert self.servers.ended(preset).startswith("Completed")

    def edit(self, changes: dict[str, Any]) -> None:
        """Edits the form of the deployment: fields, or overrides by their dotted names."""
        form = FORM | {name: value for name, value in changes.items() if "." not in name}
        overrides = OVERRIDES | {name: value for name, value in changes.items() if "." in name}
        body = {"parameters": {"request": form | {"overrides": overrides}}}
        self.servers.ask("prefect", f"/deployments/{self.deployment}", body, method="PATCH")

    def switch_on(self, cron: str = NIGHTLY_CRON) -> None:
        found = self.servers.ask("prefect", f"/deployments/{self.deployment}")
        body = {"active": True, "schedule": {"cron": cron, "timezone": "UTC"}}
        path = f"/deployments/{self.deployment}/schedules/{found['schedules'][0]['id']}"
        self.servers.ask("prefect", path, body, method="PATCH")

    def late_night(self) -> None:
        """A night that is due in a minute or two, on a form that allows it to be half a minute late; the workers come back later."""
        self.edit({"max_late_hours": 30 / 3600})
        due = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=2)
        self.switch_on(f"{due.minute} {due.hour} * * *")
        run = self.next_due()
        self.servers.ask("prefect", f"/work_pools/{DEFAULT_PROJECT}", {"is_paused": True}, method="PATCH")
        time.sleep((due - datetime.now(UTC)).total_seconds() + 60)
        self.servers.ask("prefect", f"/work_pools/{DEFAULT_PROJECT}", {"is_paused": False}, method="PATCH")
        print(f"\n{night_text(due)}  its start was late\n  {self.servers.ended(run['id'])}", flush=True)
        self.switch_on()

    def next_due(self) -> dict[str, Any]:
        """The next run that the schedule has made, after that of the last night."""
        wanted = {
            "flow_runs": {"deployment_id": {"any_": [self.deployment]}, "state": {"type": {"any_": ["SCHEDULED"]}}},
            "sort": "EXPECTED_START_TIME_ASC",
        }
        # By itself Prefect makes the runs of the next three days only, and an edit of the deployment removes them.
        self.servers.ask("prefect", f"/deployments/{self.deployment}/schedule", {"min_runs": 20, "max_runs": 20})
        deadline = time.monotonic() + 300
        while True:
            for run in self.servers.ask("prefect", "/flow_runs/filter", wanted):
                if run["expected_start_time"] > self.last_due:
                    self.last_due = run["expected_start_time"]
                    return dict(run)
            assert time.monotonic() < deadline, "the schedule has made no run"
            time.sleep(1)

    def miss(self) -> None:
        """The next night does not take place, as on a machine that is off."""
        self.next_due()

    def night(self, what: str, meanwhile: Callable[[str], None] = lambda run: None, **changes: Any) -> None:
        """The next night; prints how it ended."""
        self.edit(changes)
        run = self.next_due()
        now = {"type": "SCHEDULED", "state_details": {"scheduled_time": datetime.now(UTC).isoformat()}}
        self.servers.ask("prefect", f"/flow_runs/{run['id']}/set_state", {"state": now, "force": True})
        began = time.monotonic()
        meanwhile(run["id"])
        ended = self.servers.ended(run["id"])
        night = self.last_night()
        gate = night.gate.reason if night.gate else "none"
        print(
            f"\n{night_text(night.night)}  {what}  ({time.monotonic() - began:.0f} s)\n  {ended}\n  gate: {gate}",
            flush=True,
        )
        print(f"  champion: {self.champion()}", flush=True)

    def last_night(self) -> NightRecord:
        found = read_night(self.store, SERIES, night_at(datetime.fromisoformat(self.last_due)))
        assert found is not None
        return found

    def luckiest_seed(self) -> int:
        """The seed of the last night that scored highest."""
        scores = scores_of(self.store, read_pipeline(self.store, str(self.last_night().pipeline)), predictions=False)
        assert scores is not None
        values = scores.values(list(scores.tasks)).mean(axis=1)
        print("\nby seed:", *(f"{100 * value:.1f}" for value in values), flush=True)
        return int(np.argmax(values))

    def champion(self) -> str:
        """The version of MLflow's registry that has the alias, and the pipeline that the store names."""
        found = self.servers.ask("mlflow", "/registered-models/alias", name=SERIES, alias="champion")["model_version"]
        return f"version {found['version']}, {self.store.read_json(f'champions/{SERIES}.json')['pipeline']}"

    def promote(self, to: str, why: str) -> None:
        """As a person does, in a terminal: the model of a night, or of the champion `before`."""
        words = ("model", "promote", SERIES, "--to", to, "--reason", why)
        command = [sys.executable, "-P", "-m", "vitline.flows.cli.main", *words]
        done = subprocess.run(command, env=child_environment(self.servers.env), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(f"\npromoted: {to} ({why})", flush=True)

    def alerts(self) -> list[str]:
        """The alerts that have fired, by the name of their automation. Prefect holds those of runs that were made less than five minutes
        before they started, as here, back for up to a quarter of an hour."""
        since = {"since": "2020-01-01T00:00:00Z", "until": datetime.now(UTC).isoformat()}
        wanted = {"filter": {"occurred": since, "event": {"prefix": ["prefect.automation.triggered"]}}, "limit": 50}
        found = self.servers.ask("prefect", "/events/filter", wanted)["events"]
        return sorted(str(event["resource"].get("prefect.resource.name")) for event in found)


def first_worker(servers: OwnServers) -> psutil.Process:
    """A worker of the training two seconds after it has begun."""
    stack = find_stack(servers.directory)
    assert stack is not None
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for process in psutil.Process(stack.supervisor_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RayTrainWorker" in " ".join(process.cmdline()):
                    time.sleep(2)
                    return process
        time.sleep(0.2)
    raise AssertionError("no training has begun")


def worker_killed(servers: OwnServers) -> Callable[[str], None]:
    """SIGKILL to the first worker of the training."""
    return lambda run: first_worker(servers).kill()


def without_store(servers: OwnServers) -> Callable[[str], None]:
    """The store is away for a minute in mid training."""

    def meanwhile(run: str) -> None:
        first_worker(servers)
        with servers.away("s3"):
            time.sleep(60)

    return meanwhile


def without_mlflow(servers: OwnServers) -> Callable[[str], None]:
    """MLflow is away for the whole night."""

    def meanwhile(run: str) -> None:
        with servers.away("mlflow"):
            servers.ended(run)

    return meanwhile


def run_week(week: Week) -> None:
    week.add_pictures(0, PER_CLASS)
    week.prepare()
    week.late_night()
    week.night("the first night, of a poor recipe")
    week.night("MLflow is away", without_mlflow(week.servers))
    week.night(
        "a better recipe, but people promote; a worker is killed", worker_killed(week.servers), **BETTER, **BY_PEOPLE
    )
    week.miss()
    week.night("after a missed night, the better recipe again", **BETTER)
    lucky = {"seed": week.luckiest_seed(), "nights.num_seeds": 1}
    week.night("one lucky seed in place of six", **BETTER, **lucky)
    week.night("six other seeds; the store is away for a minute", without_store(week.servers), **BETTER, seed=10)
    week.add_pictures(PER_CLASS, PER_CLASS + NEW_PER_CLASS)
    week.add_leaking()
    week.night("new pictures, some of the task's", **BETTER)
    week.promote(week.last_due[:10], "a person trusts the new pictures")
    week.night("a planted bug: training ends after 16 steps")
    week.promote("before", "nights shall be compared with the model before")
    week.night("the bug is mended", **BETTER)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="week-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    with temporary() as folder, own_servers(None) as servers, changed_environment(**servers.env):
        week = Week(servers, folder)
        run_week(week)
        print("\nalerts:", *week.alerts(), sep="\n  ")
        print(
            "\ntracebacks in the logs of the servers:",
            *servers.new_tracebacks(AWAY),
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
