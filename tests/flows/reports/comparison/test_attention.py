"""Attention figures of pipelines beside each other."""

import re

import pytest

from vitline.flows.catalog.records import PipelineRecord, StageRecord
from vitline.flows.reports.comparison.attention import attention_beside
from vitline.flows.reports.comparison.page import render_comparison
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store


@pytest.fixture
def trained(root):
    """trained(key, *figures, images): the record of a pipeline whose training has left these figures of images."""

    def make(key, *figures, images=None):
        run = open_store(root).child(f"runs/{key}-t")
        run.write_json("inspection/inspection.json", {} if images is None else {"images_sha256": images})
        for name in figures:
            run.write(f"inspection/{name}", key.encode())
        write_state(run, "finished", 1, inspection=[f"inspection/{name}" for name in figures])
        stage = StageRecord(stage="pretrain", run_key=f"{key}-t", reused=False, wall_s=1.0, what="", where="")
        return PipelineRecord(key=key, name=key, request={}, started_at=0.0, updated_at=0.0, stages=(stage,))

    return make


def test_figures_that_several_pipelines_have_stand_beside_each_other(root, trained):
    both = ("attention-rollout.png", "attention-distance.png", "patch-filters.png")
    records = [trained("a", *both), trained("resnet", "patch-filters.png"), trained("b", *both)]
    store = open_store(root)
    rollout, distance = attention_beside(store, records)
    assert [each.key for each in rollout.figures] == [each.key for each in distance.figures] == ["a", "b"]
    assert rollout.figures[0].uri == "data:image/png;base64,YQ=="
    assert not attention_beside(store, records[:2])
    store.delete("runs/b-t/inspection/attention-rollout.png")
    assert [each.heading for each in attention_beside(store, records)] == ["Attention distance by layer"]


def test_the_page_lays_rollouts_of_the_same_images_over_the_first_without_a_script(root, trained):
    shown = {"a": "birds", "b": "birds", "other-images": "cats", "older": None, "c": "birds"}
    figures = ("attention-rollout.png", "attention-distance.png")
    records = [trained(key, *figures, images=images) for key, images in shown.items()]
    page = render_comparison(open_store(root), records)
    assert re.findall(r'class="wipe" tabindex="0" role="group" aria-label="(.*?)"', page) == [
        "Attention on validation images, a over b",
        "Attention on validation images, a over c",
    ]
    assert "<script" not in page


def test_figures_of_an_older_version_are_laid_over_nothing(root, trained):
    rollout = attention_beside(open_store(root), [trained(key, "attention-rollout.png") for key in "ab"])[0]
    assert rollout.same_images == []
