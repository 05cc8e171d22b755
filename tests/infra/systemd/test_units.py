"""The units of infra/systemd: systemd reads them, and their commands start, work and stop as plain processes.

What systemd itself does is not part of this: users, credentials, restarts, and what a unit cannot reach.
"""

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from vitline.infra.children import child_environment, end_children
from vitline.infra.local.processes import free_ports, tail
from vitline.infra.ray_jobs import JobServerAway, RayJobs
from vitline.infra.settings import Settings, variables_of
from vitline.infra.storage import open_store

from ...eventually import eventually
from ...servers.stack import FlowRuns

FOLDER = Path(__file__).parents[3] / "infra" / "systemd"
BIN = "/opt/vitline/.venv/bin"
UNITS = tuple(sorted(file.stem for file in FOLDER.glob("*.service")))
NEWER = r".*: Unknown key '(RestartSteps|RestartMaxDelaySec)' in section \[Service\], ignoring\."
ENDED = 1
"""Exit code of `ray start --block` after SIGTERM, also where it has drained its node."""
FOREIGN = ("AWS_", "MLFLOW_", "PREFECT_", "RAY_", "VITLINE_")


def variables(text):
    """The assignments in a file of variables, as systemd reads it."""
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


class Unit:
    """A unit as a plain process. `machine` has what stands for /etc and /var/lib; `settings` replaces values of the file `settings`."""

    def __init__(self, name, machine, settings, here=()):
        self.lines = [
            line.split("=", 1)
            for file in (FOLDER / "vitline-.service.d" / "common.conf", FOLDER / f"{name}.service")
            for line in file.read_text().splitlines()
            if "=" in line and not line.startswith("#")
        ]
        self.here = {
            "%S": str(machine),
            "%N": name,
            "%d": str(machine),
            "%H": "host-1",
            BIN: str(Path(sys.executable).parent),
        }
        self.here |= dict(here)
        known = variables((FOLDER / "settings").read_text())
        assert settings.keys() <= known.keys()
        self.environment = known | settings
        for file in self.all("EnvironmentFile"):
            path = machine / file.removeprefix("-").removeprefix("/etc/vitline/")
            self.environment |= variables(path.read_text()) if path.exists() else {}
        for line in self.all("Environment"):
            self.environment |= dict(word.split("=", 1) for word in shlex.split(line))
        self.folder = Path(*self.all("WorkingDirectory"))
        self.folder.mkdir()
        for name in self.all("UnsetEnvironment"):
            self.environment.pop(name)
        (command,) = self.all("ExecStart")
        command = re.sub(r" \$(\w+)", lambda found: f" {self.environment.get(found[1], '')}", command)
        self.command = shlex.split(re.sub(r"\$\{(\w+)\}", lambda found: self.environment[found[1]], command))

    def all(self, key):
        pattern = "|".join(map(re.escape, self.here))
        return [re.sub(pattern, lambda found: self.here[found[0]], value) for name, value in self.lines if name == key]

    def works_and_stops(self, works, ends_with=0):
        """Starts it, waits until it works, stops it as systemd does, and expects a clean end."""
        environment = child_environment(self.environment, (), FOREIGN)
        with open(self.folder / "log", "wb") as log:
            process = subprocess.Popen(self.command, env=environment, cwd=self.folder, stdout=log, stderr=log)
        try:
            eventually(lambda: process.poll() is not None or works(), awaited=str(self.command))
            assert process.poll() is None, tail(self.folder / "log", 30)
            (number,) = self.all("KillSignal")
            process.send_signal(getattr(signal, number))
            assert process.wait(240) == ends_with, tail(self.folder / "log", 30)
        finally:
            end_children([process], 20)
        return (self.folder / "log").read_text()


def test_settings_of_the_units_are_those_of_vitline():
    known = {name for field in Settings.model_fields for name in variables_of(field)}
    assert variables((FOLDER / "settings").read_text()).keys() <= known


def test_systemd_reads_the_units(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    shutil.copytree(FOLDER, tmp_path / "units")
    files = [tmp_path / "units" / f"{name}.service" for name in UNITS]
    for file in files:
        file.write_text(file.read_text().replace(BIN, str(Path(sys.executable).parent)))
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if not re.fullmatch(NEWER, line)]


@pytest.mark.slow
@pytest.mark.servers
def test_the_sender_takes_the_lease_and_leaves_it(tmp_path):
    root = open_store(str(tmp_path / "root"))
    sender = Unit("vitline-sender", tmp_path, {"VITLINE_ROOT": root.uri, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"})

    def holds():  # once its first heartbeat has followed; before, it may be stopped between two writes
        return [key for key in root.list("leases/") if root.read_json(key)["counter"] > 0]

    sender.works_and_stops(holds)
    (lease,) = root.list("leases/")
    assert root.read_json(lease)["heartbeat"] == 0  # released


@pytest.mark.slow
@pytest.mark.servers
def test_the_metrics_are_served(tmp_path):
    (port,) = map(str, free_ports(1))
    metrics = Unit("vitline-metrics", tmp_path, {"VITLINE_ROOT": str(tmp_path / "root")}, {"9464": port})

    def served():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
                return b"vitline_root_up 1.0" in reply.read()
        except OSError:
            return False

    metrics.works_and_stops(served)


@pytest.mark.slow
def test_the_worker_joins_its_pool(stack, tmp_path):
    api = FlowRuns(stack.env).api
    api.post("/work_pools/", json={"name": "units", "type": "process"}).raise_for_status()
    (tmp_path / "prefect-login").write_text(f"PREFECT_API_AUTH_STRING={stack.env['PREFECT_API_AUTH_STRING']}\n")
    settings = {
        "VITLINE_ROOT": str(tmp_path / "root"),
        "VITLINE_PROJECT": "units",
        "PREFECT_API_URL": stack.env["PREFECT_API_URL"],
    }
    worker = Unit("vitline-worker", tmp_path, settings)

    def joined():
        found = api.post("/work_pools/units/workers/filter", json={}).raise_for_status().json()
        return [each["name"] for each in found] == ["host-1"]

    try:
        assert "Worker 'host-1' stopped!" in worker.works_and_stops(joined)
    finally:
        api.delete("/work_pools/units")


@pytest.mark.slow
@pytest.mark.servers
def test_a_node_of_ray_joins_the_head(tmp_path):
    token, (gcs, page, client, *agents) = "0123456789abcdef" * 4, map(str, free_ports(5))
    (tmp_path / "ray-token").write_text(token)
    jobs = RayJobs(f"http://127.0.0.1:{page}", tmp_path / "ray-token", away_s=1, report=lambda text: None)
    small = "--num-cpus=1 --object-store-memory=100000000 --min-worker-port=0 --max-worker-port=0"
    (tmp_path / "ray-node").write_text(f"RAY_OPTIONS={small} --ray-client-server-port={client}\n")
    ports = {"6379": gcs, "8265": page, "0.0.0.0": "127.0.0.1"}
    head = Unit("vitline-ray-head", tmp_path, {}, ports)
    options = (
        f"{small} --dashboard-agent-listen-port={agents[0]} --dashboard-agent-grpc-port={agents[1]} --labels=pool=birds"
    )
    (tmp_path / "ray-node").write_text(f"RAY_HEAD=127.0.0.1:{gcs}\nRAY_OPTIONS={options}\n")
    node = Unit("vitline-ray-node", tmp_path, {})

    def joined(number):
        with contextlib.suppress(JobServerAway):
            return jobs.num_nodes() == number
        return False

    def node_works():
        if joined(1):
            node.works_and_stops(lambda: joined(2), ENDED)
            return True
        return False

    head.works_and_stops(node_works, ENDED)
