"""Runs in Weights & Biases by the real package, offline: what it writes to its own file is what it would send."""

import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from vitline.flows.curves.curve_writer import CurveWriter, readers
from vitline.infra.runs.claims import take_claim
from vitline.infra.runs.journal import Journal
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where wandb writes, in a process that has not read its settings yet."""
    folder = tmp_path / "of-wandb"
    folder.mkdir()
    monkeypatch.setenv("WANDB_DIR", str(folder))
    yield folder
    wandb.teardown()


@pytest.fixture
def store(root):
    return open_store(root)


def begun(store, key: str) -> Journal:
    run = store.child(f"runs/{key}")
    run.write_json("config.json", {"config": {"recipe": {"total_steps": 9}}})
    take_claim(run, key, job_state=lambda job: "running", owner="test")
    return Journal(run, 1)


def records(folder: Path) -> list:
    """The records of a run's file, which has the format of LevelDB's log after seven bytes: blocks of 32 KiB with parts of records."""
    (file,) = folder.glob("*.wandb")
    data, at, part, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
    return found


def history(folder: Path) -> list[dict[str, float]]:
    rows = [r.history.item for r in records(folder) if r.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]
    assert all(1.7e9 < row["_timestamp"] < time.time() for row in rows)
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_each_run_is_a_run_of_the_project_with_its_config_and_every_point_at_its_step(store, folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    birds, city = begun(store, "birds-0a1b"), begun(store, "city-0a1b")
    with CurveWriter(store.uri, readers(Settings(wandb="my-team/nights"))) as curves:
        curves.follow("birds-0a1b")
        curves.follow("city-0a1b")
        for step in (1, 3):
            birds.record({"train/loss": 1 / step, "optim/lr": 0.25}, step)
        birds.record({"val/top1": 0.5}, 2)  # the score of a checkpoint comes later than its step
        birds.record({"val/top1": 0.75}, 2)
        birds.seal()
        city.record({"train/loss": 2.0}, 1)
        city.seal()
    wandb.teardown()  # its service may write the last of a file after the run has finished, and has ended after this
    by_run = {}
    for written in (folder / "wandb").glob("offline-run-*"):
        (run,) = [r.run for r in records(written) if r.WhichOneof("record_type") == "run"]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        by_run[run.run_id] = history(written)
        assert (run.entity, run.project, run.display_name) == ("my-team", "nights", run.run_id)
        assert config["recipe"] == {"total_steps": 9}
    assert by_run == {
        "birds-0a1b": [
            {"step": 1, "train/loss": 1.0, "optim/lr": 0.25},
            {"step": 3, "train/loss": 1 / 3, "optim/lr": 0.25},
            {"step": 2, "val/top1": 0.5},
        ],
        "city-0a1b": [{"step": 1, "train/loss": 2.0}],
    }


class Server(BaseHTTPRequestHandler):
    """As much of W&B's server as a run needs: a login, a run that is new, and lines of history, which it keeps."""

    lines: ClassVar[list[str]] = []
    answers: ClassVar[dict[str, dict]] = {
        "Viewer": {"viewer": {"id": "u", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}},
        "CreateRunFiles": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}},
        "UpsertBucket": {
            "upsertBucket": {
                "inserted": True,
                "bucket": {"id": "b", "name": "n", "project": {"name": "p", "entity": {"name": "team"}}},
            }
        },
    }

    def do_POST(self):
        body, found = self.rfile.read(int(self.headers.get("Content-Length") or 0)), {}
        if self.path == "/graphql":
            name = re.search(r"(?:query|mutation) (\w+)", json.loads(body)["query"])[1]
            found = {"data": self.answers.get(name, {})}
        elif self.path.endswith("file_stream"):
            self.lines += json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        answer = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


WORK = """
import logging, sys, time
from vitline.flows.curves import curve_writer, wandb_runs
from vitline.flows.curves.curve_writer import CurveWriter, readers
from vitline.infra.settings import Settings

logging.basicConfig(level=logging.WARNING)
wandb_runs.CLOSE_S, curve_writer.POLL_S = 0.5, 0.05
with CurveWriter(sys.argv[1], readers(Settings(wandb="team/p"))) as curves:
    curves.follow("birds-0a1b")
    sys.stdin.readline()
"""


def working(store, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A process that follows a run until it gets a line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder), "WANDB_DIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-c", WORK, store.uri]
    return subprocess.Popen(command, env=kept | home | variables, text=True, **pipes)


@pytest.mark.slow
def test_a_server_that_goes_away_does_not_keep_the_work_from_ending(store, tmp_path):
    server, journal = ThreadingHTTPServer(("127.0.0.1", 0), Server), begun(store, "birds-0a1b")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    journal.record({"train/loss": 1.0}, 1)
    journal.seal()
    url = f"http://127.0.0.1:{server.server_port}"
    work = working(store, tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=40 * "0")
    end = time.monotonic() + 120
    while not Server.lines:  # wandb sends them every 15 seconds
        assert work.poll() is None, work.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)
    server.shutdown()
    server.server_close()
    journal.record({"train/loss": 0.5}, 2)
    journal.seal()
    said, _ = work.communicate("\n", timeout=60)
    sent = json.loads(Server.lines[0])
    assert (work.returncode, sent["step"], sent["train/loss"]) == (0, 1, 1.0), said
    assert "W&B has not taken all of birds-0a1b in 0.5 s; `wandb sync`" in said


def test_without_a_login_a_warning_says_what_to_do_and_the_work_goes_on(store, tmp_path):
    journal = begun(store, "birds-0a1b")
    journal.record({"train/loss": 1.0}, 1)
    journal.seal()
    work = working(store, tmp_path, NETRC=str(tmp_path / "none"))
    said, _ = work.communicate("\n", timeout=60)
    assert (work.returncode, said.count("curves could not be written")) == (0, 1), said
    assert "to the project team/p of Weights & Biases" in said
    assert "run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline" in said
