"""Curves of pre-trainings on the same axes."""

import json

import pytest

from vitline.flows.catalog.records import PipelineRecord, StageRecord
from vitline.flows.reports.comparison.curves import Point, course, curves
from vitline.flows.reports.comparison.vtab_bars import vtab_bars
from vitline.infra.config import replace
from vitline.infra.runs.journal import Journal
from vitline.infra.storage import open_store


@pytest.fixture
def trained(root, train_config):
    """trained(key, steps, parent, **changes): the record of a pipeline whose training of 16 images a step has a journal."""
    store = open_store(root)

    def make(key, steps, parent=None, **changes):
        config = replace(train_config(key), **changes).model_dump(mode="json")
        if parent is not None:
            config["parent"] = {"run": store.child(f"runs/{parent[0]}-t").uri, "step": parent[1], "allow": []}
        store.write_json(f"runs/{key}-t/config.json", {"config": config})
        journal = Journal(store.child(f"runs/{key}-t"), 1)
        for step in steps:
            journal.record({"train/loss": 3.0 - step / 10, "throughput/images_per_s": 8.0}, step)
        journal.record({"val/top1": 0.5}, steps[-1])
        journal.close()
        stage = StageRecord(stage="pretrain", run_key=f"{key}-t", reused=False, wall_s=1.0, what="", where="")
        return PipelineRecord(key=key, name=key, request={}, started_at=0.0, updated_at=0.0, stages=(stage,))

    return make


def test_a_branch_begins_with_the_curve_of_its_parent_and_hours_leave_out_the_nights_between(root, trained):
    trained("long", range(1, 11))
    trained("cooldown", range(5, 7), parent=("long", 4))
    points = list(course(open_store(root), "cooldown-t"))
    assert [(p.images, round(p.value, 1)) for p in points if p.metric == "train/loss"] == [
        (16 * step, round(3 - step / 10, 1)) for step in range(1, 7)
    ]
    hour = 16 / 8 / 3600
    assert points[-2].hours == pytest.approx(6 * hour)
    assert points[-1] == Point("val/top1", 6 * 16, points[-2].hours, 0.5)


def test_a_run_that_was_deleted_since_has_no_curve(root, trained):
    store = open_store(root)
    records = [trained("long", range(1, 11)), trained("cooldown", range(5, 7), parent=("long", 4))]
    store.delete("runs/long-t/config.json")
    points = list(course(store, "cooldown-t"))
    assert [point.images for point in points] == [80, 96, 96]
    assert points[-1].hours == pytest.approx(2 * 16 / 8 / 3600)  # its own two steps
    loss, *_ = curves(store, records)
    assert [line.name for line in loss.lines] == ["cooldown"]


def test_compute_is_an_axis_where_networks_differ(root, trained):
    small, same = trained("small", range(1, 4)), trained("same", range(1, 4))
    large = trained("large", range(1, 4), **{"recipe.model.depth": 4})
    by_images, by_hours = "Pre-training loss by images seen", "Pre-training loss by hours"
    assert [plot.what for plot in curves(open_store(root), [small, same])] == [by_images, by_hours]
    drawn = {plot.what: plot for plot in curves(open_store(root), [small, large])}
    assert [*drawn] == [by_images, "Pre-training loss by compute", by_hours]
    compute = drawn["Pre-training loss by compute"]
    assert compute.x.title == "MFLOP of training"
    ends = [line.points[-1][0] for line in compute.lines]
    assert ends[1] == 1.0
    assert 0.5 < ends[0] < 0.6, "two of the four blocks, and the same stem and head"


def test_a_run_without_rates_is_drawn_by_the_clock(root, trained):
    store, record = open_store(root), trained("old", range(1, 4))
    segment = next(key for key in store.list("runs/old-t/journal/") if key.endswith(".jsonl"))
    lines = [json.loads(line) for line in store.read(segment).decode().splitlines()]
    for line in lines:
        line["timestamp_ms"] = line["step"] * 1_800_000
    kept = [json.dumps(line) for line in lines if line["key"] != "throughput/images_per_s"]
    store.write(segment, "\n".join([*kept, ""]).encode())
    assert [p.hours for p in course(store, "old-t") if p.metric == "train/loss"] == [0.0, 0.5, 1.0]
    assert len(curves(store, [record])) == 2


def test_groups_of_vtab_stand_beside_the_published_rows_of_the_same_network(root, trained):
    large = {"patch_size_px": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096}
    changes = {f"recipe.model.{name}": value for name, value in large.items()}
    record = trained("large", range(1, 3), **changes)
    assert vtab_bars(open_store(root), [record]) is None
    scored = record.model_copy(update={"metrics": {"vtab/natural/top1": 0.5, "vtab/all_7of19/top1": 0.4}})
    drawn = vtab_bars(open_store(root), [scored, trained("other", range(1, 3))])
    assert [name for name, _ in drawn.keys][:3] == ["large", "ViT-L/16 (JFT)", "ViT-L/16 (I21k)"]
    assert len(drawn.keys) == 6
    bars = {bar.tooltip: bar for bar in drawn.bars}
    assert [name for name in bars if name.startswith("large")] == ["large, natural: 50.0 %"]
    assert bars["ViT-L/16 (JFT), all: 76.3 %"].height == pytest.approx(0.763, abs=5e-4)
