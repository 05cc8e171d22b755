"""What compose.yaml starts does start: each service's entry point, command and environment on a host of its own, in the order of its
dependencies, until its own health check succeeds. Then flow runs of two teams go through the proxy: one is submitted on Prefect's page,
those of the second team run by a worker on a further host.

What runs in vitline's images is a process of them, with a read-only root, its mounts and no capability, where this machine can build them;
else, and for the images of others, it is a plain process. Limits are not part of this, nor which service is in which network.
"""

import base64
import contextlib
import graphlib
import io
import json
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

from vitline.infra.children import child_environment, end_children
from vitline.infra.local.processes import free_ports, temporary_folder
from vitline.infra.local.seaweed import remove_sockets_of
from vitline.infra.local.stack_config import GRPC_PORT_OFFSET

from ...browser.pages import Prefect, chromium
from ...cluster.hosts import Hosts
from ...cluster.hosts import why_not_here as why_no_hosts
from ...eventually import eventually
from ...servers.images import why_not_here as why_no_images
from ...servers.stack import TINY
from ..container_process import FOREIGN, RAY_PATIENCE, RAY_START
from .services import FOLDER, Service, read

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(7200)]  # images are built
PUBLISHED = ("4200", "5000", "8265", "8333")
PEOPLE, BIRDS = "people", "birds"
"""Hosts beside those of the services: of people, and of the second team's worker."""
EXPERIMENTS = "/api/2.0/mlflow/experiments/search"
PICTURES = ("--set", "source=s3://vitline/pictures", "--set", "name=pictures")
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


def why_not_here():
    programs = (
        "nginx",
        "postgres",
        "initdb",
        "psql",
        "pg_isready",
        "weed",
        "openssl",
        "curl",
        "wget",
        "chromium",
        "prometheus",
    )
    beside = str(Path(sys.executable).parent)
    missing = [name for name in programs if not (shutil.which(name) or shutil.which(name, path=beside))]
    return why_no_hosts() or (f"{', '.join(missing)} not installed, which the images have" if missing else "")


@pytest.fixture(scope="module")
def machine(request, tmp_path_factory):
    """All services run, started in the order of their dependencies; this process is on the host of people."""
    if why := why_not_here():
        pytest.skip(why)
    images = None if why_no_images() else request.getfixturevalue("images")
    for target in ("flows", "train") if images else ():
        images.build(target)  # on this machine: the hosts cannot reach what it downloads
    composed = read({"VITLINE_HOST": ""})
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        folder.chmod(0o711)  # PostgreSQL and nginx do not run as root
        hosts = stack.enter_context(Hosts(folder, [*composed["services"], PEOPLE, BIRDS]))
        stack.enter_context(hosts.inside(PEOPLE))
        machine = Machine(tmp_path_factory.mktemp("logs"), hosts, images)
        stack.callback(remove_sockets_of, machine.store_ports.values())
        services = machine.composed["services"]
        order = graphlib.TopologicalSorter({name: of.get("depends_on", {}) for name, of in services.items()})
        machine.started = {name: stack.enter_context(running(machine, name)) for name in order.static_order()}
        yield machine


class Machine:
    """compose.yaml on `hosts`."""

    def __init__(self, logs, hosts, images):
        self.logs, self.hosts, self.images, self.secrets = logs, hosts, images, hosts.folder / "secrets"
        self.host = hosts.address("proxy")
        shutil.copy(FOLDER / "make-secrets.sh", hosts.folder)
        subprocess.run(["sh", hosts.folder / "make-secrets.sh", self.host], check=True, capture_output=True)
        settings = (hosts.folder / ".env").read_text().splitlines()
        self.composed = read(dict(line.split("=", 1) for line in settings))
        # SeaweedFS names sockets in the /tmp of this machine after these.
        names = ("s3", "master", "volume", "filer", "admin")
        self.store_ports = dict(zip(names, free_ports(len(names), GRPC_PORT_OFFSET), strict=True))

    def service(self, name):
        store = str(self.store_ports["s3"])
        here, more_words, programs = {"s3:8333": f"s3:{store}"}, [], {}
        if name == "s3":
            here = {"8333": store}
            more_words = [f"-{part}.port={port}" for part, port in self.store_ports.items() if part != "s3"]
        elif name == "postgres":  # as the entry point of its image sets it
            folder = self.hosts.folder / name / "var"
            more_words = ["-h", "0.0.0.0", "-D", f"{folder}/lib/postgresql/data", "-k", f"{folder}/run/postgresql"]
        elif name == "proxy":  # there is no DNS on the hosts
            servers = {"prefect": "4200", "mlflow": "5000", "ray-head": "8265"}
            here = {f"{name}:{port}": f"{self.hosts.address(name)}:{port}" for name, port in servers.items()}
            here["s3:8333"] = f"{self.hosts.address('s3')}:{store}"
        elif name.startswith("ray-"):
            here |= {"500000000": "100000000", "4000000000": "100000000"}  # bytes of Ray's objects
            more_words = [f"--node-ip-address={self.hosts.address(name)}"]
            if not self.images:
                more_words += [f"--temp-dir={self.hosts.folder}/{name[4]}"]  # short, for its sockets
            programs = {"ray": ["python" if self.images else sys.executable, *RAY_START]}
        return Service(
            self.composed,
            name,
            self.hosts,
            self.secrets,
            here,
            self.images,
            more_words,
            programs,
            as_nobody=name in ("postgres", "proxy"),
        )

    def secret(self, name):
        return (self.secrets / f"{name}.txt").read_text().strip()

    def ask(self, port, path, body=None, authorization=None, method=None):
        """A request through the proxy, whose certificate only the private authority vouches for."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{self.host}:{port}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if authorization:
            request.add_header("Authorization", authorization)
        trusted = ssl.create_default_context(cafile=self.secrets / "authority.crt")
        with urllib.request.urlopen(request, timeout=60, context=trusted) as reply:
            return json.loads(reply.read() or "null")

    def from_outside(self, **more):
        """The variables of somebody who works through the proxy, as README.md says, and `more`."""
        url = {port: f"https://{self.host}:{port}" for port in PUBLISHED}
        mine = {"PREFECT_API_URL": f"{url['4200']}/api", "PREFECT_API_AUTH_STRING": self.secret("prefect_login")}
        mine |= {"VITLINE_ROOT": "s3://vitline/vitline", "AWS_ENDPOINT_URL": url["8333"], "AWS_REGION": "us-east-1"}
        mine |= {"AWS_ACCESS_KEY_ID": "vitline", "AWS_SECRET_ACCESS_KEY": self.secret("store_secret_key")}
        authority = shutil.copy(self.secrets / "authority.crt", self.hosts.folder / PEOPLE)
        return mine | {"VITLINE_CA": authority} | more

    def as_team(self, project):
        """Those of a second team, with a root and a project of its own, whose worker runs on another machine."""
        return self.from_outside(
            VITLINE_PROJECT=project,
            VITLINE_ROOT=f"s3://vitline/{project}",
            MLFLOW_TRACKING_URI=f"https://{self.host}:5000",
            MLFLOW_TRACKING_USERNAME="admin",
            MLFLOW_TRACKING_PASSWORD=self.secret("mlflow_password"),
            RAY_ADDRESS=f"https://{self.host}:8265",
            RAY_AUTH_TOKEN=self.secret("ray_token"),
        )

    def command(self, team, *words):
        """What a command prints. Fails the test where it fails."""
        home = self.hosts.folder / PEOPLE / team.get("VITLINE_PROJECT", "vitline")
        home.mkdir(exist_ok=True)
        env = child_environment(team | {"VITLINE_HOME": str(home), "PREFECT_HOME": f"{home}/prefect"}, (), FOREIGN)
        done = subprocess.run(words, env=env, cwd=home, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]} {done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def experiments(self):
        """The names of MLflow's experiments."""
        login = basic(f"admin:{self.secret('mlflow_password')}")
        found = self.ask("5000", EXPERIMENTS, {"max_results": 100}, login)["experiments"]
        return {each["name"] for each in found}


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
        with open(service.place("/var/lib/postgresql/data/pg_hba.conf"), "a") as access:
            access.write("host all all all scram-sha-256\n")
    with service.running(machine.logs / f"{name}.log", **(RAY_PATIENCE if name.startswith("ray-") else {})):
        if name == "postgres":
            psql = ["psql", "-v", "ON_ERROR_STOP=1", "-U", known["POSTGRES_USER"], "-d", "postgres"]
            psql += ["-h", service.mapped("/var/run/postgresql")]
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
    """A hundred pictures of two classes."""
    for number in range(100):
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
        urllib.request.urlopen(f"https://{machine.host}:4200/api/health", timeout=60)

    nodes = machine.ask("8265", "/api/v0/nodes?detail=1", authorization=f"Bearer {machine.secret('ray_token')}")
    alive = [node for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    assert sorted(node["resources_total"].get("CPU", 0) > 0 for node in alive) == [False, True]
    (worker,) = eventually(lambda: machine.ask("4200", "/api/work_pools/vitline/workers/filter", {}, prefect))
    assert worker["name"] == "compose"

    outside = machine.from_outside()
    bucket = store_client(outside)
    upload_pictures(bucket)
    triggered(machine, outside, "prepare-corpus/default", *PICTURES)
    preparations = {"flows": {"name": {"any_": ["prepare-corpus"]}}}
    (run,) = machine.ask("4200", "/api/flow_runs/filter", preparations, prefect)
    assert run["state"]["type"] == "COMPLETED"
    kept = bucket.list_objects_v2(Bucket="vitline", Prefix="vitline/corpora/pictures/")["Contents"]
    assert [each["Key"] for each in kept if each["Key"].endswith("/manifest.json")]

    with prometheus(machine) as query:
        for name in (
            "vitline_root_up",
            "ray_node_cpu_count",
            "prefect_worker_channel_heartbeat_failures_total",
            "mlflow_http_request_total",
        ):
            eventually(lambda name=name: query(name), awaited=f"{name} in Prometheus")
        eventually(lambda: {value for _, value in query("up")} == {"1"}, awaited="an answer of every target")
        assert [job for job, _ in query("up")].count("ray") == 2
    of_compose = machine.started["prefect-worker"]
    seen = of_compose.run(of_compose.one_off("vitline", "ops", "doctor"))
    assert "a small job ran" in seen, seen
    eventually(lambda: machine.experiments() - {"Default"}, awaited="an experiment of vitline in MLflow")
    assert_no_traceback(machine)


def test_two_teams_pretrain_side_by_side_and_each_sees_its_own(machine):
    """The second one from a machine that reaches everything through the proxy, by the private authority that VITLINE_CA names, and with
    an evaluation protocol of its own."""
    first, birds = machine.from_outside(), machine.as_team("birds")
    home, login = machine.hosts.folder / PEOPLE, basic(machine.secret("prefect_login"))
    request = TINY | {"corpus": "pictures", "tasks": ["pictures"]}
    request["overrides"] = TINY["overrides"] | {"execution.probes.corpora": ["pictures"]}
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
        upload_pictures(store_client(first))
        with ThreadPoolExecutor(1) as thread:
            of_birds = thread.submit(triggered, machine, birds, "prepare-corpus/birds-default", *PICTURES)
            triggered(machine, first, "prepare-corpus/default", *PICTURES)
            of_birds.result()
        by_file = ("vitline", "flows", "deploy", "--file", str(home / "deployments.yaml"))
        machine.command(birds, *by_file)
        small = machine.ask("4200", "/api/deployments/name/pretrain-then-transfer/birds-small", None, login)
        edited = {"tags": [*small["tags"], "ours"]}
        machine.ask("4200", f"/api/deployments/{small['id']}", edited, login, "PATCH")
        machine.command(birds, *by_file)
        again = machine.ask("4200", f"/api/deployments/{small['id']}", None, login)
        assert (again["work_pool_name"], "ours" in again["tags"]) == ("birds", True)
        with ThreadPoolExecutor(1) as thread, prefect_page(machine) as prefect:
            of_birds = thread.submit(triggered, machine, birds, "pretrain-then-transfer/birds-small")
            run = prefect.submit("pretrain-then-transfer/default", **{name.title(): of for name, of in request.items()})
            assert run, prefect.refusal
            prefect.wait(run, "Completed")
            prefect.open_run(run)
            prefect.picture("of-the-first-team")
            of_birds.result()
    seen = [json.loads(machine.command(team, "vitline", "runs", "ls", "--json"))["runs"] for team in (first, birds)]
    trained = [[run["run"] for run in runs if run["stage"] == "pretrain"] for runs in seen]
    assert [key.partition("-")[0] for (key,) in trained] == ["tiny", "small"]
    assert {run["state"] for runs in seen for run in runs} == {"finished"}
    scores = store_client(birds).list_objects_v2(Bucket="vitline", Prefix="birds/scores/pictures/own-ours-")
    assert len(scores["Contents"]) == 2  # the model and its control
    machine.command(birds, "vitline", "runs", "send")  # a flow waits for its sender for some seconds only
    stages = {"prepare", "pretrain", "evaluate", "pretrain-then-transfer"}
    wanted = {f"{project}/{stage}" for project in ("vitline", "birds") for stage in stages}
    eventually(lambda: wanted <= machine.experiments(), awaited="experiments of both projects")
    assert_no_traceback(machine)


def triggered(machine, team, deployment, *fields):
    """Triggers a deployment as a team, and waits until its run has completed."""
    return machine.command(team, "vitline", "flows", "trigger", deployment, "--wait", *fields)


@contextlib.contextmanager
def prometheus(machine):
    """A Prometheus with the scrape config of infra/observability, once a second. Yields query(expression): jobs and values."""
    folder = machine.hosts.folder / PEOPLE / "prometheus"
    shutil.copytree(FOLDER.parent / "observability", folder)
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace(" 30s", " 1s").replace(" 20s", " 1s"))
    (folder / "prefect_password").write_text(machine.secret("prefect_login").partition(":")[2])
    (folder / "mlflow_password").write_text(machine.secret("mlflow_password"))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    server = machine.hosts.start(
        PEOPLE, [*command, "--web.listen-address=127.0.0.1:9090"], machine.logs / "prometheus.log", {}
    )

    def query(expression):
        asked = f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(expression)}"
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return [(each["metric"]["job"], each["value"][1]) for each in json.load(reply)["data"]["result"]]
        except OSError:
            return []

    try:
        yield query
    finally:
        end_children([server], 30)


@contextlib.contextmanager
def prefect_page(machine):
    """Prefect's pages, as people see them."""
    server = f"https://{machine.host}:4200", machine.secrets / "prefect_login.txt"
    with sync_playwright() as playwright, chromium(playwright) as browser:
        yield Prefect(browser, *server, machine.logs, machine.secrets / "authority.crt")


@contextlib.contextmanager
def worker_of(machine, team):
    """A team's own worker of the pool that is named like its project, on a host of its own that has the files of people, too."""
    project, folder = team["VITLINE_PROJECT"], machine.hosts.folder
    command = ["-P", "-m", "vitline.flows.on_prefect.worker", "--pool", project, "--name", project]
    if machine.images:
        (folder / BIRDS).chmod(0o777)
        mounts = {"/tmp": folder / BIRDS, f"{folder}/{PEOPLE}": folder / PEOPLE}
        command = machine.images.entered("flows", ["python", *command], mounts, team)
    else:
        command = [sys.executable, *command]
    worker = machine.hosts.start(BIRDS, command, machine.logs / f"worker-of-{project}.log", team)
    try:
        yield
    finally:
        end_children([worker], 30)


def assert_no_traceback(machine):
    for log in machine.logs.glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
