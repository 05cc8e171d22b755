"""What the manifests start does start: each container's command and environment, until its own probes succeed. Once as plain processes, and
once as processes of the images, as the user of the pod, with a read-only root, its volumes and no capability.

Databases are SQLite files in place of PostgreSQL, and the store is a folder. Limits and network policies are not part of this. The servers
of Prefect's worker and of MLflow, whose images are others' own, are plain processes.
"""

import base64
import contextlib
import importlib.util
import json
import shlex
import shutil
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from PIL import Image

from vitline.infra.local.processes import free_ports, temporary_folder
from vitline.infra.ray_jobs import RayJobs

from ...cluster.hosts import Hosts
from ...cluster.hosts import why_not_here as why_no_hosts
from ...eventually import eventually
from ..container_process import RAY_PATIENCE, RAY_START
from .containers import Container
from .manifests import namespace_of, objects, of_kind, pods

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(7200)]  # images are built
LOGIN, PASSWORD, TOKEN = "admin:a-long-password", "a-long-password", "5e" * 32


@pytest.fixture(params=["processes", "images"])
def machine(request, tmp_path):
    """The set `gpu`, and what stands on this machine for what a cluster has."""
    images = request.getfixturevalue("images") if request.param == "images" else None
    with temporary_folder() as short:
        yield Machine(tmp_path, short, images)


class Machine:
    def __init__(self, logs, folder, images, entered=list):
        """`folder` has the volumes of the pods; its name is short, for the sockets of Ray. `entered` gives the words that run a command."""
        self.logs, self.entered, self.folder, self.images = logs, entered, folder, images
        self.found = objects("gpu")
        names = ("4200", "5000", "8265", "8080", "52365", "6379", "9464")
        self.ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        self.here = {
            "metadata.name": "pod-1",
            "metadata.namespace": "vitline",
            "status.podIP": "127.0.0.1",
            "prefect.vitline.svc.cluster.local": "127.0.0.1",
            "mlflow.vitline.svc.cluster.local": "127.0.0.1",
            "vitline-head-svc": "127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            **self.ports,
        }
        folder.chmod(0o755)
        for each in ("tmp/bucket", "etc/vitline", "etc/mlflow", "etc/ray-authority", "etc/ray-tls"):
            (folder / each).mkdir(parents=True)
            (folder / each).chmod(0o777)
        (folder / "tmp").chmod(0o777)
        self.secrets = {
            "prefect-login/auth-string": LOGIN,
            "prefect-database/url": "sqlite+aiosqlite:////tmp/prefect.db",
            "mlflow-database/url": "sqlite:////tmp/mlflow.db",
            "mlflow-database/session-key": TOKEN,
            "mlflow-login/username": "admin",
            "mlflow-login/password": PASSWORD,
            "ray-token/auth_token": TOKEN,
        }
        self.configs = {
            each["metadata"]["name"]: each["data"]
            for each in of_kind(self.found, "ConfigMap")
            if namespace_of(each) == "vitline"
        }

    def container(self, pod, name=None):
        (chosen,) = (each for each in pods(self.found) if each.name == pod)
        name = name or chosen.spec["containers"][0]["name"]
        return Container(chosen, name, self.configs, self.secrets, self.here, self.folder, self.images, self.entered)

    def ask(self, port, path, body=None, login=LOGIN):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[port]}{path}", None if body is None else json.dumps(body).encode()
        )
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
        request.add_header("Content-Type", "application/json")
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as refused:
                if refused.code != 503:  # Prefect's SQLite is busy; its own client asks again, too
                    raise
                time.sleep(0.5)


def test_prefect_starts_registers_the_deployments_and_a_flow_run_finds_its_code(machine):
    (machine.folder / "etc/vitline/flow-run.json").write_text(machine.configs["flow-run"]["flow-run.json"])
    with machine.container("prefect").running(machine.logs / "prefect.log"):
        machine.container("prefect-worker", "work-pool").run()
        machine.container("prefect-worker", "work-pool").run()  # at each start of the worker
        machine.container("prefect-worker", "deployments").run()
        pool = machine.ask("4200", "/api/work_pools/vitline")
        assert pool["base_job_template"] == json.loads(machine.configs["flow-run"]["flow-run.json"])
        deployment = machine.ask("4200", "/api/deployments/name/predict/default")
        assert deployment["work_pool_name"] == "vitline"
        assert deployment["job_variables"] == {
            "image": "registry.example.org/vitline-flows:0.1.0",
            "namespace": "vitline",
        }

        # The store has no model, so the flow ends with a sentence: after it has found its code, and before it needs Ray.
        run = machine.ask("4200", f"/api/deployments/{deployment['id']}/create_flow_run", {})["id"]
        machine.container("flow-run").result(PREFECT__FLOW_RUN_ID=run)
        state = machine.ask("4200", f"/api/flow_runs/{run}")["state"]
        assert state["type"] == "FAILED", state["message"]
        assert "icons" in state["message"]

        if importlib.util.find_spec("prefect_kubernetes"):  # which the worker's image has
            with machine.container("prefect-worker").running(machine.logs / "worker.log"):
                workers = eventually(lambda: machine.ask("4200", "/api/work_pools/vitline/workers/filter", {}))
                assert [worker["name"] for worker in workers] == ["pod-1"]


def test_mlflow_starts_with_its_login_beside_the_sender_and_the_metrics(machine):
    mlflow, sender, metrics = (machine.container(name) for name in ("mlflow", "sender", "metrics"))
    (machine.folder / "etc/mlflow/basic_auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{machine.folder}/tmp/logins.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    with contextlib.ExitStack() as stack:
        for each in (mlflow, sender, metrics):
            stack.enter_context(each.running(machine.logs / f"{each.title.replace('/', '-')}.log"))
        path = "/api/2.0/mlflow/experiments/search"
        login = f"admin:{PASSWORD}"
        found = machine.ask("5000", path, {"max_results": 1}, login)
        assert [each["name"] for each in found["experiments"]] == ["Default"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            machine.ask("5000", path, {"max_results": 1}, "admin:guess")
        with urllib.request.urlopen(f"http://127.0.0.1:{machine.ports['9464']}/metrics", timeout=60) as reply:
            assert b"vitline_root_up 1.0" in reply.read()


@pytest.fixture
def hosts(machine):
    """Two hosts, as Ray's nodes need addresses of their own. This process is on that of the head."""
    if why := why_no_hosts():
        pytest.skip(why)
    with Hosts(machine.folder, ["head", "cpu"]) as found, found.inside("head"):
        yield found


@pytest.fixture
def node(machine, hosts):
    """The machine of a second node of the cluster."""
    with temporary_folder() as short:
        found = Machine(machine.logs, short, machine.images, partial(hosts.entered, "cpu"))
        for each, name in ((machine, "head"), (found, "cpu")):
            each.here |= {"status.podIP": hosts.address(name), "0.0.0.0": "0.0.0.0"}
        yield found


def test_ray_starts_with_token_and_certificates_on_two_nodes_and_runs_the_ray_job(machine, node):
    authority = write_authority(machine.folder / "etc/ray-authority")
    shutil.copytree(authority, node.folder / "etc/ray-authority", dirs_exist_ok=True)
    cluster, job = (of_kind(machine.found, kind)[0] for kind in ("RayCluster", "RayJob"))
    head = machine.container("vitline head", "ray-head")
    machine.container("vitline head", "certificate").run(FQ_RAY_IP="head")
    worker = node.container("vitline cpu", "ray-worker")
    node.container("vitline cpu", "certificate").run(FQ_RAY_IP="head")
    given = {
        "RAY_AUTH_MODE": "token",  # KubeRay sets both from `authOptions`
        "RAY_AUTH_TOKEN": TOKEN,
        "VITLINE_ROOT": head.mapped("s3://my-bucket"),
        **RAY_PATIENCE,
    }
    of_head = {"port": "6379", "dashboard-port": "8265", "dashboard-host": "0.0.0.0"}
    command = kuberay_command(cluster["spec"]["headGroupSpec"], machine, head, "--head", **of_head)
    with head.running(machine.logs / "ray.log", command, **given):
        jobs = RayJobs(f"http://127.0.0.1:{machine.ports['8265']}", token_path=written(machine.logs / "token", TOKEN))
        assert jobs.version() == cluster["spec"]["rayVersion"]
        with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
            urllib.request.urlopen(f"{jobs.address}/api/jobs/", timeout=60)
        nodes = urllib.request.Request(
            f"{jobs.address}/api/v0/nodes?detail=1", headers={"Authorization": f"Bearer {TOKEN}"}
        )

        def resources():
            with urllib.request.urlopen(nodes, timeout=60) as reply:
                return [each["resources_total"] for each in json.load(reply)["data"]["result"]["result"]]

        assert [each["vitline_training"] for each in resources()] == [1]

        for name in ("crow", "jay"):
            for number in range(8):
                picture = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
                file = machine.folder / "tmp/bucket/pictures/birds" / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(file)
        entrypoint = head.mapped(job["spec"]["entrypoint"]).split()
        submit = ["ray", "job", "submit", "--address", jobs.address, "--submission-id", "one", "--", *entrypoint]
        head.run(submit, **given)

        (cpu,) = (each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == "cpu")
        command = kuberay_command(cpu, node, worker, f"--address=head:{machine.ports['6379']}")
        with worker.running(machine.logs / "worker.log", command, **given):
            assert sorted(each.get("CPU", 0) for each in resources()) == [0, 4]
            on_worker = ["--entrypoint-num-cpus", "1", "--", "sh", "-c", "test $(hostname) = cpu"]
            submit = ["ray", "job", "submit", "--address", jobs.address, "--submission-id", "two", *on_worker]
            head.run(submit, **given)
    assert list((machine.folder / "tmp/bucket/corpora/birds").glob("*/manifest.json"))


def kuberay_command(group, machine, container, kind, **options):
    """The command that KubeRay makes of a group (`generateRayStartCommand` in its controllers/ray/common/pod.go)."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    options |= {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    options |= {"num-cpus": limits["cpu"], "memory": str(int(limits["memory"].removesuffix("Gi")) << 30)}
    options |= group["rayStartParams"]
    # Ports and sizes of this machine.
    others = ("dashboard-agent-grpc-port", "runtime-env-agent-port", "ray-client-server-port")
    options |= dict(zip(others, free_ports(3), strict=True))
    options |= {"node-ip-address": machine.here["status.podIP"], "min-worker-port": 0, "max-worker-port": 0}
    options |= {"object-store-memory": 100_000_000, "temp-dir": container.place("/tmp/ray")}
    words = " ".join(f"--{name}={machine.here.get(str(value), value)}" for name, value in options.items())
    ray = shlex.join(["python" if container.in_image else sys.executable, *RAY_START])
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {ray} start {kind} --block {words}"]


def written(path, text):
    path.write_text(text)
    return path


def write_authority(folder):
    """As the guide's openssl command does."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ray-authority")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder
