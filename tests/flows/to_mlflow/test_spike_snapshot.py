"""The MLflow run of a training names its spikes and has their pages."""

from vitline.flows.to_mlflow.stage_snapshots import stage_snapshot
from vitline.infra.config import replace
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.run.resolved import resolve


def test_spikes_are_a_tag_a_line_and_pages(train_config, root):
    spec = resolve(replace(train_config("spiky"), **{"recipe.spike_guard.action": "skip"}), root).spec()
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))
    run.write("spikes/step-000001234.html", b"<html>")
    run.write("spikes/step-000001234.json", b"{}")
    write_state(run, "finished", 1, spikes=[1234, 2000])
    snapshot = stage_snapshot(open_store(root), spec.run_key)
    assert snapshot.params["spike_guard.action"] == "skip"
    assert snapshot.tags["vitline.spikes"] == "2"
    assert "**Spikes:** 2, at steps 1,234, 2,000; pictures in `spikes/`" in snapshot.facts
    assert [key for key in snapshot.files if key.startswith("spikes")] == ["spikes/step-000001234.html"]


def test_a_training_without_a_guard_says_nothing_of_spikes(train_config, root):
    spec = resolve(train_config("quiet"), root).spec()
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))
    write_state(run, "finished", 1)
    snapshot = stage_snapshot(open_store(root), spec.run_key)
    assert not [text for text in (*snapshot.params, *snapshot.tags, *snapshot.facts) if "pike" in text]
