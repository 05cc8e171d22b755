"""What compose.yaml starts does start: each service's entry point, command and environment as a plain process on 127.0.0.1, in the order of
its dependencies, until its own health check succeeds. Then flow runs of two teams go through the proxy.

Nothing runs in a container: images, read-only file systems, capabilities, networks and limits are not part of this.
"""

import base64
import contextlib
import ctypes
import graphlib
import io
import json
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import numpy as np
import pytest
from PIL import Image

from vitline.infra.children import child_environment, end_children
from vitline.infra.local.processes import free_ports, temporary_folder

from ...eventually import eventually
from ...servers.stack import TINY
from ..plain_processes import RAY_PATIENCE, RAY_START
from .services import FOLDER, Service, read

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(1800)]
PUBLISHED = ("4200", "5000", "8265", "8333")
CLONE_NEWNET = 0x40000000
EXPERIMENTS = "/api/2.0/mlflow/experiments/search"
DEPLOYMENTS = """
project: birds
defaults: {pool: birds}
deployments:
  - {name: default, flow: prepare-corpus}
  - name: small
    flow: pretrain-then-transfer
    schedules: [{cron: "0 2 * * *", active: false}]
    request: REQUEST
"""
GRPC = 10_000
"""SeaweedFS adds it to a port for the second port of a part."""


def missing_programs():
    programs = ("ip", "nginx", "postgres", "initdb", "psql", "pg_isready", "weed", "openssl", "curl", "wget")
    beside = str(Path(sys.executable).parent)
    return [name for name in programs if not (shutil.which(name) or shutil.which(name, path=beside))]


@pytest.fixture(scope="module")
def own_network():
    """Puts this thread and its children into a network that has only 127.0.0.1: elsewhere nodes of Ray listen on all addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip("only root may make a network")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory, own_network):
    """All services run, started in the order of their dependencies."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed, which the images have")
    with temporary_folder() as short, contextlib.ExitStack() as stack:
        machine = Machine(tmp_path_factory.mktemp("logs"), short)
        services = machine.composed["services"]
        order = graphlib.TopologicalSorter({name: of.get("depends_on", {}) for name, of in services.items()})
        machine.started = {name: stack.enter_context(running(machine, name)) for name in order.static_order()}
        yield machine


class Machine:
    """compose.yaml with what stands on this machine for what it names."""

    def __init__(self, logs, short):
        self.logs, self.short = logs, short
        short.chmod(0o711)  # PostgreSQL and nginx do not run as root
        shutil.copy(FOLDER / "make-secrets.sh", short)
        subprocess.run(["sh", short / "make-secrets.sh", "localhost"], check=True, capture_output=True)
        settings = dict(line.split("=", 1) for line in (short / ".env").read_text().splitlines())
        self.composed = read(settings)

        inside = dict(zip(PUBLISHED, [*free_ports(3), *free_ports(1, GRPC)], strict=True))
        self.published = dict(zip(PUBLISHED, free_ports(4), strict=True))
        postgres, gcs, *agents, health, metrics = free_ports(12)
        hosts = {"prefect:4200": inside["4200"], "mlflow:5000": inside["5000"], "ray-head:8265": inside["8265"]}
        hosts |= {"s3:8333": inside["8333"], "postgres:5432": postgres, "ray-head:6379": gcs}
        common = {host: f"127.0.0.1:{port}" for host, port in hosts.items()}
        common |= {f"localhost:{port}": f"localhost:{at}" for port, at in self.published.items()}
        common |= {port: str(at) for port, at in inside.items()}
        common |= {"5432": str(postgres), "6379": str(gcs), "0.0.0.0": "127.0.0.1"}
        common |= {"500000000": "100000000", "4000000000": "100000000"}  # bytes of Ray's objects
        head, worker = agents[:4], agents[4:]
        self.here = {
            "ray-head": {"52365": str(head[0]), "8080": str(head[1])},
            "ray-worker": {"52365": str(worker[0]), "8080": str(worker[1])},
            "prefect-worker": {"8080": str(health)},
            "metrics": {"9464": str(metrics)},
            "proxy": {f"listen {port}": f"listen 127.0.0.1:{at}" for port, at in self.published.items()},
        }
        self.here = {name: common | self.here.get(name, {}) for name in self.composed["services"]}
        database = short / "postgres/var"
        self.more_words = {
            "postgres": f"-D {database}/lib/postgresql/data -k {database}/run/postgresql -h 127.0.0.1 -p {postgres}".split(),
            "s3": seaweed_ports(),
            "ray-head": [*ray_ports(head), f"--ray-client-server-port={free_ports(1)[0]}", f"--temp-dir={short}/h"],
            "ray-worker": [*ray_ports(worker), f"--temp-dir={short}/w"],
        }

    def service(self, name):
        image = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "vitline", "VITLINE_HOME": "/tmp/vitline"}
        if name.startswith("ray-"):
            image |= RAY_PATIENCE
        return Service(
            self.composed,
            name,
            self.short / name,
            self.short / "secrets",
            self.here[name],
            image,
            self.more_words.get(name, ()),
            {"ray": [sys.executable, *RAY_START]},
            as_nobody=name in ("postgres", "proxy"),
        )

    def secret(self, name):
        return (self.short / "secrets" / f"{name}.txt").read_text().strip()

    def ask(self, port, path, body=None, authorization=None, method=None):
        """A request through the proxy, whose certificate only the private authority vouches for."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://localhost:{self.published[port]}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if authorization:
            request.add_header("Authorization", authorization)
        trusted = ssl.create_default_context(cafile=self.short / "secrets/authority.crt")
        with urllib.request.urlopen(request, timeout=60, context=trusted) as reply:
            return json.loads(reply.read() or "null")

    def from_outside(self, **more):
        """The environment of somebody who works through the proxy, as README.md says, with `more` variables."""
        authority = str(self.short / "secrets/authority.crt")
        url = {name: f"https://localhost:{port}" for name, port in self.published.items()}
        mine = {"PREFECT_API_URL": f"{url['4200']}/api", "PREFECT_API_AUTH_STRING": self.secret("prefect_login")}
        mine |= {"VITLINE_ROOT": "s3://vitline/vitline", "AWS_ENDPOINT_URL": url["8333"], "AWS_REGION": "us-east-1"}
        mine |= {"AWS_ACCESS_KEY_ID": "vitline", "AWS_SECRET_ACCESS_KEY": self.secret("store_secret_key")}
        home = self.short / "outside"
        home.mkdir(exist_ok=True)
        mine |= {"VITLINE_CA": authority, "VITLINE_HOME": str(home)}
        return child_environment(mine | more, (), ("AWS_", "MLFLOW_", "PREFECT_", "RAY_", "VITLINE_"))

    def as_team(self, project):
        """That of a second team, with a root and a project of its own, whose worker runs on another machine."""
        mlflow, ray = (f"https://localhost:{self.published[port]}" for port in ("5000", "8265"))
        home = self.short / project
        home.mkdir()
        return self.from_outside(
            VITLINE_PROJECT=project,
            VITLINE_ROOT=f"s3://vitline/{project}",
            VITLINE_HOME=str(home),
            PREFECT_HOME=str(home / "prefect"),
            MLFLOW_TRACKING_URI=mlflow,
            MLFLOW_TRACKING_USERNAME="admin",
            MLFLOW_TRACKING_PASSWORD=self.secret("mlflow_password"),
            RAY_ADDRESS=ray,
            RAY_AUTH_TOKEN=self.secret("ray_token"),
        )

    def command(self, environment, *words):
        """What a command prints. Fails the test where it fails."""
        done = subprocess.run(
            words, env=environment, cwd=environment["VITLINE_HOME"], capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]} {done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def experiments(self):
        """The names of MLflow's experiments."""
        login = basic(f"admin:{self.secret('mlflow_password')}")
        found = self.ask("5000", EXPERIMENTS, {"max_results": 100}, login)["experiments"]
        return {each["name"] for each in found}


def ray_ports(ports):
    """Those that compose.yaml leaves to Ray."""
    _, _, grpc, runtime_env = ports
    return [
        "--node-ip-address=127.0.0.1",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--dashboard-agent-grpc-port={grpc}",
        f"--runtime-env-agent-port={runtime_env}",
    ]


def seaweed_ports():
    names = ("master", "volume", "filer", "admin")
    return [f"-{name}.port={port}" for name, port in zip(names, free_ports(len(names), GRPC), strict=True)]


@contextlib.contextmanager
def running(machine, name):
    """A service in the order of the file; PostgreSQL with what the entry point of its image does before the first start."""
    service = machine.service(name)
    if name == "deploy":
        service.run()
        service.run()  # at each `docker compose up`
        yield service
        return
    if name == "postgres":
        known = service.environment()
        first = ["initdb", "--pgdata", service.mapped("/var/lib/postgresql/data"), "--username", known["POSTGRES_USER"]]
        first += ["--pwfile", known["POSTGRES_PASSWORD_FILE"], "--auth-local=trust", "--auth-host=scram-sha-256"]
        service.run(first)
    with service.running(machine.logs / f"{name}.log"):
        if name == "postgres":
            psql = ["psql", "-v", "ON_ERROR_STOP=1", "-U", known["POSTGRES_USER"], "-d", "postgres"]
            psql += ["-h", service.mapped("/var/run/postgresql"), "-p", service.mapped("5432")]
            service.run([*psql, "-c", f"CREATE DATABASE {known['POSTGRES_DB']}"])
            service.run([*psql, "-f", service.mapped("/docker-entrypoint-initdb.d/mlflow.sql")])
        yield service


def basic(login):
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def store_client(environment):
    """A client of the store, through the proxy."""
    given = {"endpoint_url": environment["AWS_ENDPOINT_URL"], "region_name": environment["AWS_REGION"]}
    given |= {"aws_access_key_id": environment["AWS_ACCESS_KEY_ID"], "verify": environment["VITLINE_CA"]}
    return boto3.client("s3", aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"], **given)


def upload_pictures(bucket):
    """Twenty pictures of two classes."""
    for number in range(20):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
        bucket.put_object(
            Bucket="vitline", Key=f"pictures/{('crow', 'jay')[number % 2]}/{number}.png", Body=file.getvalue()
        )


def test_all_services_start_and_a_flow_run_goes_through_the_proxy(machine):
    prefect = basic(machine.secret("prefect_login"))
    refused = [("4200", "/api/deployments/filter", {}), ("5000", EXPERIMENTS, {"max_results": 1})]
    refused += [("8265", "/api/jobs/", None), ("8333", "/vitline", None)]
    for port, path, body in refused:
        for guess in (None, basic("admin:guess")):
            with pytest.raises(urllib.error.HTTPError, match=r"400|401|403"):
                machine.ask(port, path, body, guess)
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        urllib.request.urlopen(f"https://localhost:{machine.published['4200']}/api/health", timeout=60)

    nodes = machine.ask("8265", "/api/v0/nodes?detail=1", authorization=f"Bearer {machine.secret('ray_token')}")
    alive = [node for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    assert sorted(node["resources_total"].get("CPU", 0) > 0 for node in alive) == [False, True]
    (worker,) = eventually(lambda: machine.ask("4200", "/api/work_pools/vitline/workers/filter", {}, prefect))
    assert worker["name"] == "compose"

    outside = machine.from_outside()
    bucket = store_client(outside)
    upload_pictures(bucket)
    trigger = ["vitline", "flows", "trigger", "prepare-corpus/default", "--wait"]
    machine.command(outside, *trigger, "--set", "source=s3://vitline/pictures", "--set", "name=birds")
    preparations = {"flows": {"name": {"any_": ["prepare-corpus"]}}}
    (run,) = machine.ask("4200", "/api/flow_runs/filter", preparations, prefect)
    assert run["state"]["type"] == "COMPLETED"
    kept = bucket.list_objects_v2(Bucket="vitline", Prefix="vitline/corpora/birds/")["Contents"]
    assert [each["Key"] for each in kept if each["Key"].endswith("/manifest.json")]

    counters = urllib.request.urlopen(f"http://127.0.0.1:{machine.here['metrics']['9464']}/metrics", timeout=60).read()
    assert b"vitline_root_up 1.0" in counters
    of_compose = machine.started["prefect-worker"]
    seen = of_compose.run(of_compose.one_off("vitline", "ops", "doctor"))
    assert "a small job ran" in seen, seen
    eventually(lambda: machine.experiments() - {"Default"}, awaited="an experiment of vitline in MLflow")
    assert_no_traceback(machine)


def test_two_teams_pretrain_side_by_side_and_each_sees_its_own(machine):
    """The second one from a machine that reaches everything through the proxy, by the private authority that VITLINE_CA names, and with
    an evaluation protocol of its own."""
    first, birds = machine.from_outside(), machine.as_team("birds")
    home, login = Path(birds["VITLINE_HOME"]), basic(machine.secret("prefect_login"))
    request = TINY | {"corpus": "digits", "tasks": ["digits"]}
    request["overrides"] = TINY["overrides"] | {"execution.probes.corpora": ["digits"]}
    ours = {name: value for name, value in request["overrides"].items() if not name.startswith("protocol.")}
    ours["protocol"] = str(home / "ours.yaml")
    Path(ours["protocol"]).write_text(
        "base: small-images\nprotocol: {total_steps: 4, warmup_steps: 1, learning_rates: [0.1], optim: {layer_decay: 0.7}}\n"
    )
    scheduled = request | {"name": "small", "overrides": ours}
    (home / "deployments.yaml").write_text(DEPLOYMENTS.replace("REQUEST", json.dumps(scheduled)))
    for_prefect = birds | {"SSL_CERT_FILE": birds["VITLINE_CA"]}
    machine.command(for_prefect, "prefect", "work-pool", "create", "birds", "--type", "process")
    machine.command(birds, "vitline", "flows", "deploy", "--pool", "birds")
    with worker_of(machine, birds):
        digits = ("--set", "preset=digits")
        at_once(machine, (first, "prepare-corpus/default", digits), (birds, "prepare-corpus/birds-default", digits))
        by_file = ("vitline", "flows", "deploy", "--file", str(home / "deployments.yaml"))
        machine.command(birds, *by_file)
        small = machine.ask("4200", "/api/deployments/name/pretrain-then-transfer/birds-small", None, login)
        edited = {"tags": [*small["tags"], "ours"]}
        machine.ask("4200", f"/api/deployments/{small['id']}", edited, login, "PATCH")
        machine.command(birds, *by_file)
        again = machine.ask("4200", f"/api/deployments/{small['id']}", None, login)
        assert (again["work_pool_name"], "ours" in again["tags"]) == ("birds", True)
        fields = [word for name, value in request.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        at_once(
            machine,
            (first, "pretrain-then-transfer/default", fields),
            (birds, "pretrain-then-transfer/birds-small", ()),
        )
    seen = [json.loads(machine.command(team, "vitline", "runs", "ls", "--json"))["runs"] for team in (first, birds)]
    trained = [[run["run"] for run in runs if run["stage"] == "pretrain"] for runs in seen]
    assert [key.partition("-")[0] for (key,) in trained] == ["tiny", "small"]
    assert {run["state"] for runs in seen for run in runs} == {"finished"}
    scores = store_client(birds).list_objects_v2(Bucket="vitline", Prefix="birds/scores/digits/own-ours-")
    assert len(scores["Contents"]) == 2  # the model and its control
    machine.command(birds, "vitline", "runs", "send")  # a flow waits for its sender for some seconds only
    stages = {"prepare", "pretrain", "evaluate", "pretrain-then-transfer"}
    wanted = {f"{project}/{stage}" for project in ("vitline", "birds") for stage in stages}
    eventually(lambda: wanted <= machine.experiments(), awaited="experiments of both projects")
    assert_no_traceback(machine)


def at_once(machine, *triggers):
    """Triggers deployments of several teams at the same time, and waits until all have completed."""
    with ThreadPoolExecutor(len(triggers)) as threads:
        started = [
            threads.submit(machine.command, team, "vitline", "flows", "trigger", deployment, "--wait", *fields)
            for team, deployment, fields in triggers
        ]
    for each in started:
        each.result()


@contextlib.contextmanager
def worker_of(machine, environment):
    """A team's own worker of the pool that is named like its project."""
    project = environment["VITLINE_PROJECT"]
    command = [sys.executable, "-P", "-m", "vitline.flows.on_prefect.worker", "--pool", project, "--name", project]
    with open(machine.logs / f"worker-of-{project}.log", "wb") as log:
        worker = subprocess.Popen(command, env=environment, cwd=environment["VITLINE_HOME"], stdout=log, stderr=log)
    try:
        yield
    finally:
        end_children([worker], 30)


def assert_no_traceback(machine):
    for log in machine.logs.glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
