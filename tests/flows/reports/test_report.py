"""The HTML report of a pipeline: one self-contained file, safe for any names."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitline.flows.catalog.records import StageRecord
from vitline.flows.reports.report import render, score_rows, stage_time, standard_error
from vitline.infra.html.plots import line_plot, ticks
from vitline.vit.evaluation.calibration import Bin, Calibration
from vitline.vit.evaluation.evaluate import Score

from ...elements import Elements

NASTY = '<script>alert("x")</script> & "birds" \'n\' <b>'


def score(task="digits", value=0.8, digest=None, **changes):
    tried = tuple({"peak_lr": lr, "total_steps": 100, "val_top1": top1} for lr, top1 in ((0.03, 0.5), (0.1, 0.75)))
    fields = {
        "task": task,
        "protocol": "p",
        "seed": 0,
        "model": digest,
        "model_digest": digest,
        "value": value,
        "num_examples": 100,
        "chosen": tried[1],
        "tried": tried,
        "majority_fraction": 0.25,
        "num_classes": 8,
        "corpus_digest": "c",
        "wall_s": 1,
        "cpu_s": 1,
        "trials": (),
    }
    return Score(**{**fields, **changes})


def stage(what="", where="", name="prepare", wall_s=1.0, reused=False):
    return StageRecord(stage=name, run_key=None, reused=reused, wall_s=wall_s, what=what, where=where)


def page(**changes):
    fields = {
        "title": "vitline: birds",
        "lead": "Pre-trained on birds.",
        "stages": [stage("800 images", "file:///store", wall_s=12.4)],
        "scores": [score(digest="d" * 64), score(value=0.5)],
        "plots": [line_plot("Loss", "step", {"a": [(0, 2.0), (100, 0.5)], "b": [(0, 2.5), (100, 1.5)]})],
        "inputs_png": b"\x89PNG",
        "notes": ("A note.",),
    }
    return render(**{**fields, **changes})


def test_the_page_has_no_external_references():
    text = page()
    elements = Elements(text)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text.replace("file:///", ""))
    assert {tag for tag, _ in elements.found}.isdisjoint({"script", "link", "iframe"})
    sources = [attributes.get("src") or attributes.get("href") for _, attributes in elements.found]
    assert [source for source in sources if source] == ["data:image/png;base64,iVBORw=="]


def test_names_are_shown_literally_and_never_executed():
    nasty = page(
        title=NASTY,
        lead=NASTY,
        stages=[stage(NASTY, NASTY, name=NASTY, reused=True)],
        scores=[score(task=NASTY, digest="d" * 64)],
        plots=[line_plot(NASTY, NASTY, {NASTY: [(0, 1.0)], "b": [(1, 2.0)]})],
        notes=(NASTY,),
    )
    elements = Elements(nasty)
    assert {"script", "b"}.isdisjoint(tag for tag, _ in elements.found)
    # Title twice, lead, note, 3 cells of the stage, its score, 2 settings, caption, axis and legend of the plot.
    assert elements.text.count(NASTY) == 13


def test_a_curve_of_one_point_is_a_dot():
    curves = {"one": [(50, 2.0)], "none": [(0, math.nan)], "two": [(0, 1.0), (100, 3.0)]}
    lines = [seen for tag, seen in Elements(page(plots=[line_plot("Loss", "step", curves)])).found if tag == "polyline"]
    assert [(line["class"], line["points"].split()) for line in lines] == [
        ("c1 lone", ["500.0,50.00", "500.0,50.00"]),
        ("c2", []),
        ("c3", ["0.0,100.00", "1000.0,0.00"]),
    ]


def test_a_page_without_scores_plots_or_images_is_valid():
    elements = Elements(page(scores=[], plots=[], inputs_png=None, notes=()))
    assert "Scores" not in elements.text
    assert "12" in elements.text


def test_stages_show_their_time_or_that_they_were_reused():
    assert stage_time(stage(wall_s=12.4)) == "0:12"
    assert stage_time(stage(wall_s=0.1, reused=True)) == "reused"


def test_a_row_compares_a_model_with_its_control_and_with_chance():
    calibration = Calibration(ece=0.05, bins=(Bin(examples=100, confidence=0.75, accuracy=0.8),))
    scores = [
        score(digest="d" * 64, calibration=calibration),
        score(value=0.625),
        score("emoji", 0.5, digest="d" * 64, num_examples=1897),
    ]
    assert score_rows(scores) == [
        ["digits", "p", "80.0 %", "62.5 %", "+17.5", "5.0 %", "25.0 %", "12.5 %", "8", "100"],
        ["emoji", "p", "50.0 %", "-", "-", "-", "25.0 %", "12.5 %", "8", "1,897"],
    ]
    assert score_rows([score(value=0.5)])[0][2:5] == ["-", "50.0 %", "-"]
    assert score_rows([score(value=0.25, digest="d"), score(value=0.5)])[0][4] == "-25.0"
    assert score_rows([]) == []


def test_each_protocol_of_a_task_has_a_row_of_its_own():
    scores = [score(digest="d", value=value, protocol=name) for name, value in (("fewshot-5", 0.5), ("q", 0.75))]
    assert [row[:3] for row in score_rows(scores)] == [["digits", "fewshot-5", "50.0 %"], ["digits", "q", "75.0 %"]]


def test_the_chosen_setting_is_marked_once_per_init():
    elements = Elements(page())
    assert elements.text.count("lr 0.1, 100 steps") == 2
    assert len(re.findall("75.0 %chosen", elements.text)) == 2
    assert "50.0 %chosen" not in elements.text


def test_the_standard_error_of_an_accuracy():
    assert standard_error(score(value=0.8)) == pytest.approx(0.04)  # sqrt(0.8 * 0.2 / 100)
    assert standard_error(score(value=1.0)) == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0, 1200, [0, 500, 1000, 1500]),
        (0.31, 2.3, [0, 0.5, 1, 1.5, 2, 2.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 0, [0, 0.2]),
        (5, 5, [5, 6]),
    ],
)
def test_ticks_worked_out_by_hand(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_cover_the_range(low, span):
    high = low + span
    found = ticks(low, high)
    step = found[1] - found[0]
    slack = 1e-6 * step + 1e-9 * max(abs(low), abs(high))
    assert 2 <= len(found) <= 7
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-3)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in itertools.pairwise(found))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(width=32)), max_size=20))
def test_a_curve_of_any_values_is_drawn_inside_its_figure(points):
    drawn = line_plot("p", "step", {"c": points})
    finite = [p for p in points if math.isfinite(p[1])]
    assert (drawn is not None) == bool(finite)
    if drawn is not None:
        assert len(drawn.lines[0].points) == len(finite)
        assert all(0 <= x <= 1 and -1e-9 <= y <= 1 + 1e-9 for x, y in drawn.lines[0].points)
        assert all(0 <= at <= 1 for axis in (drawn.x, drawn.y) for at, _ in axis.ticks)
