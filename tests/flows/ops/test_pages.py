"""Links lead to the pages that a Prefect server shows by default, and to the runs of vitline's experiments in MLflow."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitline.flows.ops.server_http import experiment_pages, flow_run_page
from vitline.infra.settings import Settings


@contextmanager
def answering(status, answer):
    """A server with one reply; its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


NEW = {"v1_base_url": "/", "v2_base_url": "/v2"}


@pytest.mark.parametrize(
    ("status", "answer", "path"),
    [
        (200, json.dumps(NEW | {"default_ui": "v2"}), "/v2"),
        (200, json.dumps(NEW | {"default_ui": "v1"}), ""),
        (200, '{"api_url": "http://elsewhere/api"}', ""),  # Prefect before it had two styles
        (404, "no such page", ""),
    ],
)
def test_a_page_of_a_flow_run_has_the_style_that_the_server_shows(status, answer, path):
    with answering(status, answer) as server:
        assert flow_run_page(Settings(prefect_api_url=f"{server}/api"), 7) == f"{server}{path}/runs/flow-run/7"


def test_a_named_address_and_prefect_cloud_are_not_asked():
    named = Settings(prefect_api_url="http://127.0.0.1:9/api", prefect_ui_url="https://prefect.example/v2/")
    assert flow_run_page(named, 7) == "https://prefect.example/v2/runs/flow-run/7"
    cloud = Settings(prefect_api_url="https://api.prefect.cloud/api/accounts/a/workspaces/w", prefect_ui_url=None)
    assert flow_run_page(cloud, 7) == "https://app.prefect.cloud/account/a/workspace/w/runs/flow-run/7"


def test_experiments_open_at_their_runs_as_trainings():
    found = {"experiments": [{"name": "vitline/pretrain", "experiment_id": "3"}]}
    with answering(200, json.dumps(found)) as server:
        pages = experiment_pages(Settings(mlflow_tracking_uri=f"{server}/"))
        assert pages == {"vitline/pretrain": f"{server}/#/experiments/3/runs?workflowType=machine_learning"}
    with answering(401, "log in") as server:
        assert experiment_pages(Settings(mlflow_tracking_uri=server)) == {}
    assert experiment_pages(Settings(mlflow_tracking_uri=server)) == {}  # nothing listens there any more
