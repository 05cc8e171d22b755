"""The home page, from records of nights in a store; in a real Prefect, it is one artifact that `reconcile` writes anew."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from vitline.flows.catalog.records import Origin, write_pipeline
from vitline.flows.nights.from_records import known_nights, night_of
from vitline.flows.nights.night_page import night_row
from vitline.flows.nights.night_record import write_night
from vitline.flows.nights.not_run import note_not_run
from vitline.flows.on_prefect.home.home import Upcoming, home_markdown
from vitline.flows.runs.stage import Skipped, still_running
from vitline.infra.storage import open_store

from ...nights.simulated import Nights, store_night
from ...nights.test_trend import store  # noqa: F401

DUE = Upcoming(datetime(2026, 11, 26, 2, tzinfo=UTC), "pretrain-then-transfer/nightly", "http://prefect/d")


def section(page: str, title: str) -> list[str]:
    return page.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0].splitlines()


def test_nights_champion_and_next_run_are_shown(store):  # noqa: F811
    page = home_markdown(store, ["The disk is full."], [DUE], "3 GB are free.")
    assert "3 GB are free." in page.splitlines()[0]
    nightly = section(page, "Nights of nightly")
    rows = [line for line in nightly if line.startswith("| 2") or line.startswith("| [2")]
    assert len(rows) == 7
    assert sum("▼ worse" in row for row in rows) == 1
    assert "missed" in rows[0]
    assert any(line.startswith("Champion `night-1`") and "the first" in line for line in nightly)
    assert (
        section(page, "Starts next")[2]
        == "| Thu 2026-11-26 02:00 UTC | [pretrain-then-transfer/nightly](http://prefect/d) |"
    )
    attention = section(page, "Needs a person")
    assert attention[0] == "- The disk is full."
    assert "missed" in attention[1]
    assert section(page, "At work") == ["Nothing."]


def test_a_night_that_came_due_while_another_was_running_needs_nobody(root):
    place, began = open_store(root), datetime(2026, 11, 23, 15, 10, tzinfo=UTC)
    night = replace(Nights(1).night(), night=began)
    record = store_night(place, night, state="running")
    waited = Skipped(still_running("the night", began.timestamp(), "http://prefect/runs/1"))
    note_not_run(place, "nightly", began.replace(hour=16, minute=0), Origin(), waited, late=False)

    def shown():
        page = home_markdown(place, [], [], "")
        rows = [line.split(" | ")[:2] for line in section(page, "Nights of nightly") if line.startswith("| 2")]
        return section(page, "Needs a person"), rows

    skipped = ["| 2026-11-23 16:00 UTC", "skipped"]
    assert shown() == (["Nothing."], [skipped, ["| 2026-11-23 15:10 UTC", "running"]])
    said = {row["verdict"]: row["sentence"] for row in map(night_row, known_nights(place, pytest.fail))}
    assert said["running"] == "Running: it began at 2026-11-23 15:10 UTC."
    assert said["skipped"].startswith("Skipped: the night that began at ")
    assert said["skipped"].endswith("15:10 is still running: http://prefect/runs/1")
    write_night(place, night_of(place, record, "failed", "no room"))
    write_pipeline(place, record.model_copy(update={"state": "failed"}))
    attention, rows = shown()
    assert rows == [skipped, ["| 2026-11-23 15:10 UTC", "✕ broken"]]
    assert attention == ["- nightly, night of 2026-11-23 15:10 UTC: Broken: the night failed. no room"]


def test_a_store_without_anything_needs_nobody(root):
    page = home_markdown(open_store(root), [], [], "")
    assert section(page, "Needs a person") == ["Nothing."]
    assert "vitline flows deploy --nightly" in section(page, "Starts next")[0]


@pytest.mark.long
def test_reconcile_writes_the_page_in_its_place(flows):
    texts = []
    for _ in range(2):
        run = flows.start("reconcile/default")
        flows.completes(run)
        wanted = {"artifacts": {"key": {"any_": ["vitline"]}}}
        (artifact,) = flows.api.post("/artifacts/filter", json=wanted).raise_for_status().json()
        texts.append((artifact["id"], artifact["data"]))
    assert texts[0][0] == texts[1][0]
    assert "GB are free on the disk" in texts[1][1]
