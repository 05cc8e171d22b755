"""The suite: what is chosen, what becomes of errors, what is written and what is left."""

import json
import time

import pytest
from typer.testing import CliRunner

from vitline.flows.chaos import suite
from vitline.flows.chaos.promises import NotTried, require
from vitline.flows.chaos.scenario import scenario
from vitline.flows.cli import app
from vitline.infra.storage import open_store


@scenario("a fault", "nothing", about_s=1)
def holds(bench):
    """This | holds."""
    bench.place.write("runs/a/claim.json", b"{}")
    return "as promised"


@scenario("a fault", "nothing", about_s=1)
def breaks(bench):
    """This does not hold."""
    require(False, "3 of 4")


@scenario("a fault", "nothing", about_s=1)
def fails(bench):
    """This raises."""
    bench.place.read("missing")


@scenario("a fault", "a store on Mars", about_s=1)
def needs_more(bench):
    """This cannot be tried."""
    raise NotTried("there is no store on Mars")


@pytest.fixture(autouse=True)
def scenarios(monkeypatch):
    monkeypatch.setattr(suite, "SCENARIOS", {each.name: each for each in (holds, breaks, fails, needs_more)})


def run(root, *names):
    return CliRunner().invoke(app, ["ops", "chaos", "run", *names, "--root", root])


def test_every_promise_is_reported_and_a_broken_one_is_exit_code_1(root):
    done = run(root)
    assert done.exit_code == 1
    assert "4 promises: 1 kept, 2 broken, 1 not tried" in done.stdout
    (key,) = [key for key in open_store(root).list() if key.endswith("report.json")]
    results = json.loads(open_store(root).read(key))["results"]
    assert [(result["name"], result["verdict"]) for result in results] == [
        ("holds", "kept"),
        ("breaks", "broken"),
        ("fails", "broken"),
        ("needs-more", "not tried"),
    ]
    assert results[1]["found"] == "3 of 4"
    assert "missing" in results[2]["found"]
    assert results[3]["found"] == "there is no store on Mars"
    assert "| kept | holds | a fault | This \\| holds. |" in open_store(root).read(key.replace(".json", ".md")).decode()


def test_only_the_report_stays(root):
    open_store(root).write("runs/other/claim.json", b"{}")
    assert run(root, "holds", "needs-more").exit_code == 0
    kept = [key.rpartition("/")[2] for key in open_store(root).list()]
    assert kept == ["report.json", "report.md", "claim.json"]


def test_report_can_lie_elsewhere(root, tmp_path):
    assert (
        CliRunner()
        .invoke(app, ["ops", "chaos", "run", "holds", "--root", root, "--out", str(tmp_path / "r")])
        .exit_code
        == 0
    )
    assert open_store(root).list() == []
    assert open_store(tmp_path / "r").list() == ["report.json", "report.md"]


def test_work_that_a_killed_chaos_run_left_is_deleted_after_a_day(root):
    store, now = open_store(root), int(time.time())
    for began in (now - 90_000, now - 60):
        store.write(f"chaos/{began}-0123abcd/work/runs/a/claim.json", b"{}")
        store.write(f"chaos/{began}-0123abcd/report.json", b"{}")
    run(root, "holds")
    assert not store.exists(f"chaos/{now - 90_000}-0123abcd/work/runs/a/claim.json")
    assert store.exists(f"chaos/{now - 90_000}-0123abcd/report.json")
    assert store.exists(f"chaos/{now - 60}-0123abcd/work/runs/a/claim.json")


def test_unknown_scenario_is_refused_by_name(root):
    done = run(root, "hold")
    assert done.exit_code != 0
    assert "There is no scenario 'hold'; available: breaks, fails, holds, needs-more. Did you mean 'holds'?" in str(
        done.exception
    )


def test_list_names_fault_promise_and_needs():
    done = CliRunner().invoke(app, ["ops", "chaos", "list", "--json"])
    assert json.loads(done.stdout)["scenarios"][3] == {
        "name": "needs-more",
        "fault": "a fault",
        "promise": "This cannot be tried.",
        "needs": "a store on Mars",
        "about": "1 s",
    }
