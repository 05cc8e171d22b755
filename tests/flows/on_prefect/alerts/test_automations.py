"""Alerts of a real Prefect: created once by the command, fired by real causes, sent to a real address, and left as their owner
edits them."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitline.flows.on_prefect.alerts.automations import ALERTS, created_variable
from vitline.flows.on_prefect.alerts.problems import SEEN
from vitline.infra.storage import open_store

from ....eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DISK, FAILED = "vitline: the disk is nearly full", "vitline: a run failed"


@pytest.fixture
def messages():
    """An address that takes messages: its URL, and a dict of all so far by subject."""
    found: dict[str, list[str]] = {}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.setdefault(message["subject"], []).append(message["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", found
    server.shutdown()
    server.server_close()


@pytest.fixture
def prefect(flows, in_stack):
    """The API of a Prefect that has never had an alert."""
    api = flows.api

    def delete_all():
        for automation in automations(api).values():
            api.delete(f"/automations/{automation['id']}").raise_for_status()
        api.delete(f"/variables/name/{created_variable()}")
        open_store(in_stack.root).delete(SEEN)

    delete_all()
    yield api
    delete_all()


def automations(api) -> dict[str, dict]:
    found = api.post("/automations/filter", json={"limit": 200}).raise_for_status().json()
    return {automation["name"]: automation for automation in found if automation["name"].startswith("vitline")}


def deploy(*options):
    command = [sys.executable, "-m", "vitline.flows.cli.main", "flows", "deploy", *options]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)


def create_block(api, url: str) -> None:
    """A notification block, as Prefect's page Blocks creates it."""
    kind = api.get("/block_types/slug/custom-webhook").raise_for_status().json()["id"]
    schemas = api.post("/block_schemas/filter", json={"block_schemas": {"block_type_id": {"any_": [kind]}}}).json()
    data = {"name": "morning", "url": url, "json_data": {"subject": "{{subject}}", "text": "{{body}}"}}
    block = {"name": "morning", "block_type_id": kind, "block_schema_id": schemas[0]["id"], "data": data}
    api.post("/block_documents/", json=block).raise_for_status()


@pytest.mark.long
def test_alerts_are_created_once_fire_once_and_belong_to_their_owner(prefect, flows, messages):
    url, sent = messages
    refused = deploy("--notify", "custom-webhook/evening")
    assert refused.returncode == 2
    assert "no block 'custom-webhook/evening'" in refused.stderr
    assert automations(prefect) == {}

    created = deploy()
    assert created.returncode == 0, created.stderr
    assert "6 alerts created: a run failed, " in created.stdout
    create_block(prefect, url)
    assert (
        "6 alerts without an action now sent to custom-webhook/morning"
        in deploy("--notify", "custom-webhook/morning").stdout
    )
    assert automations(prefect).keys() == {alert.name for alert in ALERTS}

    # By real causes: a request that the flow refuses, and a disk with less than is asked for.
    failed = flows.start("evaluate/default", model="no-such-model")
    assert flows.wait(failed)["state_name"] == "Failed"
    for _ in range(2):
        run = flows.start("reconcile/default", min_free_gb=1e6)
        flows.completes(run)
    (text,) = eventually(lambda: sent.get(FAILED))
    assert "evaluate" in text
    assert "no-such-model" in text
    assert failed in text
    eventually(lambda: sent.get(DISK))
    wanted = {"filter": {"event": {"name": ["vitline.alert.disk"]}}}
    assert prefect.post("/events/filter", json=wanted).raise_for_status().json()["total"] == 1
    (text,) = sent[DISK]
    assert "GB are left on the disk of" in text
    assert sent.keys() == {FAILED, DISK}

    prefect.delete(f"/automations/{automations(prefect)[FAILED]['id']}").raise_for_status()
    edited = automations(prefect)[DISK]
    prefect.patch(f"/automations/{edited['id']}", json={"enabled": False}).raise_for_status()
    before = automations(prefect)
    assert "alerts" not in deploy().stdout
    assert "alerts stay as they are" in deploy("--notify", "custom-webhook/morning").stdout
    assert automations(prefect) == before
