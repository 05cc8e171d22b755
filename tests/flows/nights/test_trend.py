"""The page over all nights."""

import json
import re
from dataclasses import replace
from datetime import timedelta

import pytest

from vitline.flows.catalog.records import Look, read_pipeline, write_pipeline
from vitline.flows.nights.from_records import night_of
from vitline.flows.nights.night_record import NightRecord, note_night, write_night
from vitline.flows.nights.promote import pipeline_to, promote
from vitline.flows.nights.trend.trend import all_series, trend_plot
from vitline.infra import config
from vitline.infra.storage import open_store

from .simulated import Nights, store_night
from .test_from_records import run


@pytest.fixture
def store(root):
    """Six whole nights, of which the fourth is worse; the champion is the first; then a cut and a missed one."""
    store, nights = open_store(root), Nights(1, seeds_sd=0.1)
    for number, shift in enumerate((0.0, 0.0, 0.0, -2.0, 0.0, 0.0)):
        record = store_night(store, night := nights.night(shift=shift))
        found = night_of(store, record, "finished", "")
        write_night(store, found)
        if number == 0:
            promote(store, record.key, why="the first", by="a@b")
    record = store_night(store, nights.night(shift=-3), state="out_of_time")
    write_night(store, night_of(store, record, "out_of_time", "the deadline has passed"))
    note_night(
        store,
        NightRecord(name="nightly", night=night.night + timedelta(2), outcome="missed", reason="Nothing started."),
    )
    return store


def test_points_band_and_rows_are_those_of_the_records(store):
    (series,) = all_series(store, None, lambda unreadable: pytest.fail(str(unreadable)))
    assert [point.word for point in series.points].count("worse") == 1
    assert [point.mean is not None for point in series.points] == [True] * 6 + [False] * 2
    plot = trend_plot(series)
    assert [dot.kind == "bad" for dot in plot.dots] == [False, False, False, True, False, False]
    worse = series.points[3]
    assert plot.dots[3].what == f"{worse.night.night:%Y-%m-%d} 02:00 UTC: {100 * worse.mean:.1f} %, worse"
    assert plot.dots[3].y == min(dot.y for dot in plot.dots)
    half = len(plot.band) // 2
    upper, lower = plot.band[:half], plot.band[half:][::-1]
    inside = {round(x, 9): (low, high) for (x, high), (_, low) in zip(upper, lower, strict=True)}
    for dot, point in zip(plot.dots, series.points, strict=False):
        if round(dot.x, 9) in inside:
            low, high = inside[round(dot.x, 9)]
            assert (low <= dot.y <= high) == (point.against.word == "same")
    assert inside


def test_the_mean_of_a_night_that_was_decided_early_is_estimated_from_the_night_before(store):
    night = Nights(1, seeds_sd=0.1).night()
    (left_out, metric), of = list(night.tasks), night.tasks
    scored = replace(night, key="early", night=night.night + timedelta(30), tasks={metric: of[metric]})
    look = Look(groups=(("emoji",), ("digits",)), num_tasks=1, num_seeds=3, of_seeds=3, cost_fraction=0.4, level=0.001)
    record = config.replace(store_night(store, scored), look=look)
    write_pipeline(store, record)
    write_night(store, night_of(store, record, "finished"))
    (series,) = all_series(store, None, lambda unreadable: pytest.fail(str(unreadable)))
    early, whole = series.points[-1], series.points[5]
    other = whole.tasks[left_out] - whole.tasks[metric]
    assert early.mean == pytest.approx(early.tasks[metric] + other / 2)
    assert (
        trend_plot(series)
        .dots[-1]
        .what.startswith(f"{scored.night:%Y-%m-%d} 02:00 UTC: about {100 * early.mean:.1f} %")
    )


def test_the_page_links_every_point_to_its_row(store, root, tmp_path):
    page = tmp_path / "nights.html"
    done = run("nights", "ls", "--root", root, "--html", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text()
    links = re.findall(r'href="#([^"]+)"', text)
    assert len(links) == 6
    assert {*links} < {*re.findall(r'<tr id="([^"]+)"', text)}
    assert "Worse than the champion (night of 2026-01-02 02:00 UTC)" in text
    assert "the night was cut" in text
    assert "the night was missed" in text
    assert "promoted by a@b" in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)  # nothing is loaded from elsewhere


def test_a_whole_key_is_that_of_one_pipeline_though_others_begin_with_it(store, root):
    for number in (10, 11):
        record = read_pipeline(store, "night-1")
        write_pipeline(store, record.model_copy(update={"key": f"night-{number}"}))
    assert promote(store, "night-1", why="a whole key", by="a@b").pipeline == "night-1"
    with pytest.raises(ValueError, match="'night-' is the key of 9 pipelines"):
        promote(store, "night-", why="a part", by="a@b")
    assert run("runs", "show", "night-1", "--root", root, "--json").exit_code == 0
    assert run("runs", "compare", "night-1", "night-2", "--root", root).exit_code == 0


def test_without_nights_nothing_is_written(root, tmp_path):
    page = tmp_path / "nights.html"
    assert "No night" in run("nights", "ls", "--root", root, "--html", str(page)).output
    assert not page.exists()


def test_a_series_goes_back_to_the_champion_before_or_to_a_night(store, root):
    def back(to):
        done = run("model", "promote", "nightly", "--to", to, "--reason", "to look again", "--root", root, "--json")
        return json.loads(done.stdout)["pipeline"] if done.exit_code == 0 else str(done.exception or done.output)

    assert "first champion of nightly" in back("before")
    (series,) = all_series(store, "nightly", pytest.fail)
    second, last = series.points[1].night, series.points[-1].night
    assert back(second.night.isoformat()) == second.pipeline
    assert back("before") == "night-1"
    assert back("before") == second.pipeline
    assert "was missed, so it has no model" in back(last.night.isoformat())
    with pytest.raises(ValueError, match="has no champion"):
        pipeline_to(store, "other", "before")
