"""What web pages, and other users of this machine, can do with the servers of the local stack: nothing, without the login."""

import json
import re
import sqlite3
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import websockets.sync.client

from vitline.infra.local.stack import find_stack
from vitline.infra.local.stack_config import GRPC_PORT_OFFSET, load_stack_config
from vitline.infra.settings import basic_authorization
from vitline.infra.storage import open_store

pytestmark = pytest.mark.servers

FLOW = {"name": "planted"}
ATTACKERS = [{}, {"Origin": "http://attacker.example"}, {"Authorization": basic_authorization("vitline:wrong")}]


@pytest.mark.parametrize("headers", ATTACKERS)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_prefect_registers_no_flow_without_the_login(stack, headers, kind):
    api, body = stack.env["PREFECT_API_URL"], json.dumps(FLOW)
    reply = httpx.post(f"{api}/flows/", content=body, headers=headers | {"Content-Type": kind}, timeout=60)
    assert reply.status_code == 401
    asked = {"Origin": "http://attacker.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{api}/flows/", headers=asked, timeout=60).headers
    auth = tuple(stack.env["PREFECT_API_AUTH_STRING"].split(":"))
    known = httpx.post(f"{api}/flows/filter", json={"flows": {"name": {"any_": ["planted"]}}}, auth=auth, timeout=60)
    assert known.raise_for_status().json() == []


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out"])
def test_prefect_sockets_need_the_login(stack, path):
    url = f"{stack.env['PREFECT_API_URL'].replace('http', 'ws', 1)}/{path}"
    with websockets.sync.client.connect(url, subprotocols=["prefect"], open_timeout=60) as socket:
        socket.send(json.dumps({"type": "auth", "token": "wrong"}))
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            next(iter(lambda: socket.recv(timeout=60), None))
    assert closed.value.rcvd.code == 1008


OPEN_IN_PREFECT = {"/", "/ui-settings", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
OPEN_IN_PREFECT |= {"/api/health", "/api/ready"}


def test_prefect_answers_only_the_paths_of_security_md_without_the_login(stack):
    server = stack.env["PREFECT_API_URL"].removesuffix("/api")
    with httpx.Client(base_url=server, timeout=60) as client:
        described = client.get("/openapi.json").json()["paths"]
        known = {f"/api{path}" for path, methods in described.items() if "get" in methods}
        asked = {re.sub("[{}]", "", path) for path in known} | OPEN_IN_PREFECT | {"/api/docs", "/api/openapi.json"}
        answered = {path for path in asked if client.get(path).status_code != 401}
    assert len(known) > 30
    assert answered == OPEN_IN_PREFECT
    table = (Path(__file__).parents[3] / "SECURITY.md").read_text()
    assert all(f"`{path}`" in table for path in OPEN_IN_PREFECT)


def test_a_page_of_another_port_reads_nothing_with_the_login_of_a_browser(stack):
    page = {"Origin": "http://127.0.0.1:9999"}
    token = {"Authorization": f"Bearer {(stack.directory / 'ray-token').read_text()}"}
    mlflow = f"{stack.env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=1"
    image = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    jobs = f"{stack.env['RAY_ADDRESS']}/api/jobs/"
    for url in (mlflow, jobs):
        assert httpx.get(url, auth=stack.mlflow_login, timeout=60).status_code == 200
        assert httpx.get(url, timeout=60).status_code == 401
        for headers in (page, image):
            reply = httpx.get(url, headers=headers, auth=stack.mlflow_login, timeout=60)
            assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (403, False)
    reply = httpx.post(
        f"{stack.env['RAY_ADDRESS']}/api/authenticate", headers=token | {"User-Agent": "Mozilla/5.0"}, timeout=60
    )
    assert (reply.status_code, "set-cookie" in reply.headers) == (200, False)
    if "AWS_ENDPOINT_URL" in stack.env:
        for method in ("GET", "OPTIONS"):
            asked = page | {"Access-Control-Request-Method": "PUT"}
            reply = httpx.request(method, f"{stack.env['AWS_ENDPOINT_URL']}/vitline/x", headers=asked, timeout=60)
            assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (403, False)


@pytest.mark.parametrize("headers", ATTACKERS)
def test_mlflow_reads_and_writes_nothing_without_the_login(stack, headers):
    uri = stack.env["MLFLOW_TRACKING_URI"]
    location = f"file://{stack.directory}"  # with credentials.json
    body = {"name": f"planted-{len(headers)}", "artifact_location": location}
    expected = 403 if "Origin" in headers else 401
    created = httpx.post(f"{uri}/api/2.0/mlflow/experiments/create", json=body, headers=headers, timeout=60)
    assert created.status_code == expected
    for path in ("/", "/get-artifact", "/api/2.0/mlflow-artifacts/artifacts", "/api/2.0/mlflow/experiments/search"):
        reply = httpx.get(uri + path, headers=headers, timeout=60)
        assert reply.status_code == expected
        assert reply.headers.get("WWW-Authenticate", "")[:5] == ("Basic" if expected == 401 else "")
    with sqlite3.connect(f"file:{stack.directory}/mlflow/mlflow.db?mode=ro", uri=True, timeout=60) as database:
        assert database.execute("select count(*) from experiments where name like 'planted%'").fetchone() == (0,)
    assert httpx.get(f"{uri}/", auth=stack.mlflow_login, timeout=60).status_code == 200


def test_mlflow_answers_only_whether_it_lives(stack):
    replies = {path: httpx.get(stack.env["MLFLOW_TRACKING_URI"] + path, timeout=60) for path in ("/health", "/version")}
    assert {path: reply.status_code for path, reply in replies.items()} == {"/health": 200, "/version": 200}


@pytest.fixture
def inner_ports(stack):
    """The ports of SeaweedFS's parts, which have no login of their own."""
    ports = load_stack_config(stack.directory).ports
    if "s3" not in ports or not stack.env["VITLINE_ROOT"].startswith("s3://"):
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    return {name: port for name, port in ports.items() if name.startswith("s3.")}


@pytest.fixture
def grpc_ports(stack, inner_ports):
    """The ports for gRPC of all parts, and that of S3 itself, with which its configuration can be changed."""
    ports = {"s3": load_stack_config(stack.directory).ports["s3"], **inner_ports}
    return {name: port + GRPC_PORT_OFFSET for name, port in ports.items()}


REQUESTS = [
    ("GET", "/buckets/vitline/"),
    ("PUT", "/buckets/vitline/.access/planted"),
    ("DELETE", "/buckets/vitline/.access?recursive=true"),
    ("GET", "/dir/assign"),
    ("GET", "/dir/status"),
    ("POST", "/submit"),
    ("GET", "/col/delete?collection=vitline"),  # the whole bucket
    ("GET", "/status"),
    ("GET", "/metrics"),
]
CALLS = ("filer_pb.SeaweedFiler/DeleteEntry", "filer_pb.SeaweedFiler/ListEntries", "master_pb.Seaweed/CollectionDelete")
CALLS += ("master_pb.Seaweed/VolumeList", "volume_server_pb.VolumeServer/DeleteCollection", "s3_pb.SeaweedS3/Configure")


def test_no_port_of_the_store_answers_without_credentials(stack, inner_ports, grpc_ports, monkeypatch):
    for name, value in stack.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    store = open_store(stack.env["VITLINE_ROOT"]).child(".access")
    store.write("object", b"kept")
    for port in inner_ports.values():
        for method, path in REQUESTS:
            for scheme in ("http", "https"):
                assert answer(method, f"{scheme}://127.0.0.1:{port}{path}") in (400, None), (port, method, path)
    for port in grpc_ports.values():
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            codes = {channel.unary_unary(f"/{call}").future(b"").exception(60).code().name for call in CALLS}
        assert codes == {"UNAVAILABLE"}, (port, codes)
    url = f"{stack.env['AWS_ENDPOINT_URL']}/vitline/.access/object"
    assert [httpx.request(method, url, timeout=60).status_code for method in ("GET", "PUT", "DELETE")] == [403] * 3
    assert store.list() == ["object"]
    assert store.read("object") == b"kept"


def answer(method: str, url: str) -> int | None:
    """The status of the reply; None where the connection was closed instead, as TLS does without a certificate."""
    try:
        return httpx.request(
            method, url, verify=False, headers={"Origin": "http://attacker.example"}, timeout=60
        ).status_code
    except httpx.TransportError:
        return None


def test_each_server_knows_only_the_logins_that_it_uses(stack):
    password = stack.env["MLFLOW_TRACKING_PASSWORD"]
    known = {
        service.name: {name for name, value in psutil.Process(service.pid).environ().items() if password in value}
        for service in find_stack(stack.directory).services
    }
    assert not known["s3"] | known["ray"]
    assert not {name for name in known["prefect"] if not name.startswith("PREFECT_")}
    assert not {name for name in known["mlflow"] | known["sender"] if not name.startswith("MLFLOW_")}
