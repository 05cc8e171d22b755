"""`vitline ops metrics`: what it says of runs and nights, and that Prometheus reads it with the rules and the dashboard of `infra`."""

import json
import re
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import yaml

from vitline.flows.nights.night_record import NightRecord, write_night
from vitline.flows.ops import metrics
from vitline.flows.ops.metrics import METRICS, RootMetrics, metrics_text
from vitline.infra.local.processes import free_ports
from vitline.infra.runs.handle import Run
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import StoreFailed, open_store

from ...eventually import eventually

OBSERVABILITY = Path(__file__).parents[3] / "infra" / "observability"
STEPS = {"step": 60, "total_steps": 100, "images_per_s": 200.0, "remaining_s": 20.0}


def values(text):
    """By metric and labels, as in the text."""
    return dict(re.findall(r"^vitline_(\S+?(?:\{.*\})?) (\S+)$", text, re.MULTILINE))


@pytest.fixture
def at_work(begin_run, root):
    """A training at step 60 of 100 with a checkpoint of step 40: its store."""
    run, key, attempt = begin_run(root, "busy")
    write_state(run, "running", attempt)
    held = Run(run, attempt)
    held.show(STEPS)
    journal = held.journal()
    journal.record({"train/loss": 2.5, "time/data_wait_fraction": 0.25}, 60)
    journal.close()
    run.write_json(f"checkpoints/step-000000040-a{attempt}/manifest.json", {})
    return key


def test_a_training_at_work(at_work, root):
    found = values(metrics_text(root))
    of_run = {
        name: float(found.get(f'run_{name}{{run="{at_work}",stage="pretrain"}}', "nan"))
        for name in (
            "step",
            "total_steps",
            "images_per_second",
            "remaining_seconds",
            "waiting",
            "attempts",
            "checkpoint_step",
        )
    }
    assert list(of_run.values()) == [60, 100, 200, 20, 0, 1, 40]
    config = open_store(root).read_json(f"runs/{at_work}/config.json")
    batch = config["config"]["recipe"]["input"]["global_batch_size"]
    assert float(found[f'run_unsaved_seconds{{run="{at_work}",stage="pretrain"}}']) == 20 * batch / 200
    assert float(found[f'run_metric{{metric="train/loss",run="{at_work}",stage="pretrain"}}']) == 2.5
    assert found['runs{stage="pretrain",state="running"}'] == "1.0"


def test_goodput_is_the_share_of_kept_steps(at_work, root):
    began = open_store(root).read_json(f"runs/{at_work}/attempts/a1.json")["started_at"]
    config = open_store(root).read_json(f"runs/{at_work}/config.json")
    kept_s = 60 * config["config"]["recipe"]["input"]["global_batch_size"] / 200
    families = {family.name: family for family in RootMetrics(root, lambda: began + 4 * kept_s).collect()}
    (sample,) = families["vitline_run_goodput_ratio"].samples
    assert sample.value == pytest.approx(0.25)


def test_the_newest_night_of_each_series(root):
    for day, outcome in ((1, "finished"), (2, "missed")):
        night = datetime(2026, 1, day, 2, tzinfo=UTC)
        write_night(open_store(root), NightRecord(name="nightly", night=night, outcome=outcome, at=1.0))
    found = values(metrics_text(root))
    assert found['night_verdict{series="nightly",verdict="missed"}'] == "1.0"
    assert float(found['night_timestamp_seconds{series="nightly"}']) == datetime(2026, 1, 2, 2, tzinfo=UTC).timestamp()


def test_a_store_that_is_away_is_one_number(root, monkeypatch, caplog):
    def away(*_):
        raise StoreFailed("connection refused")

    monkeypatch.setattr(metrics, "open_store", away)
    assert values(metrics_text(root)) == {"root_up": "0.0"}
    assert "its store did not answer" in caplog.text


def test_a_port_that_is_in_use_is_refused(refused, root):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused("ops", "metrics", "--port", port, "--root", root)
    assert f"cannot be served at 127.0.0.1:{port} (Address already in use). Choose another --port" in error


def expressions():
    """Of all rules and panels."""
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    panels = json.loads((OBSERVABILITY / "grafana.json").read_text())["panels"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    return rules + [target["expr"] for panel in panels for target in panel["targets"]]


def test_rules_and_panels_use_metrics_that_there_are():
    used = {name for expression in expressions() for name in re.findall(r"vitline_(\w+)", expression)}
    assert used <= {metric.name for metric in METRICS}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)")
def test_prometheus_scrapes_it_and_evaluates_every_rule_and_panel(at_work, root, tmp_path, http):
    port, prometheus = free_ports(2)
    config = (
        (OBSERVABILITY / "prometheus.yml")
        .read_text()
        .replace("metrics:9464", f"127.0.0.1:{port}")
        .replace(" 30s", " 1s")
        .replace(" 20s", " 1s")
    )
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(OBSERVABILITY / "alerts.yml", tmp_path)
    exporter = subprocess.Popen(
        [Path(sys.executable).with_name("vitline"), "ops", "metrics", "--port", str(port), "--root", root]
    )
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{prometheus}"]
    )  # fmt: skip
    try:

        def query(expression):
            reply = http.get(f"http://127.0.0.1:{prometheus}/api/v1/query", params={"query": expression})
            assert reply.status_code == 200, reply.text
            return reply.json()["data"]["result"]

        def scraped():
            try:
                return query("vitline_root_up == 1")
            except httpx.TransportError:
                return False

        eventually(scraped, awaited="the first scrape")
        for expression in expressions():
            query(expression)
        (late,) = eventually(lambda: query(re.sub("900", "-1", expressions()[1])), awaited="a scrape in time")
        assert late["metric"]["run"] == at_work
        rules = http.get(f"http://127.0.0.1:{prometheus}/api/v1/rules").json()["data"]["groups"][0]["rules"]
        eventually(lambda: {rule["health"] for rule in rules} <= {"ok", "unknown"}, awaited="rules without an error")
    finally:
        for process in (exporter, server):
            process.terminate()
            process.wait()
