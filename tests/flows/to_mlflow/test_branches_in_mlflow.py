"""Both runs of a branch in MLflow, each with a link to the other."""

import pytest
from mlflow import MlflowClient

from vitline.flows.to_mlflow.child import sync_runs
from vitline.infra.config import replace
from vitline.infra.runs.run_state import write_state
from vitline.infra.settings import Settings
from vitline.vit.run.branch import pin_parent

from ...trainings import begin


@pytest.mark.stack
def test_a_branch_and_its_parent_link_to_each_other(stack, root, begin_run, train_config):
    settings = Settings(root=root, mlflow_tracking_uri=stack.env["MLFLOW_TRACKING_URI"])
    parent, parent_key, attempt = begin_run(root)
    parent.write_json("checkpoints/step-000000010-a1/manifest.json", {})
    write_state(parent, "finished", attempt, step=20)
    sync_runs(settings)
    name = parent_key.rpartition("-")[0]
    config = replace(train_config(name), parent={"run": parent.uri, "step": 10})
    run, lease = begin(config, root)
    pin_parent(config.parent, lease.run_key)
    write_state(run, "running", 1)
    sync_runs(settings, [lease.run_key])
    client = MlflowClient(settings.mlflow_tracking_uri, settings.mlflow_tracking_uri)

    def shown(store):
        (ids,) = store.read_json("mlflow.json")["servers"].values()
        return ids["url"], client.get_run(ids["run"]).data.tags

    (theirs, parent_tags), (ours, tags) = shown(parent), shown(run)
    assert tags["vitline.parent"] == f"{parent_key}@10"
    assert f"**Branch of:** [{parent_key}]({theirs}) at step 10" in tags["mlflow.note.content"]
    assert f"**Branched into:** [{lease.run_key}]({ours}) at step 10" in parent_tags["mlflow.note.content"]
    assert "vitline.parent" not in parent_tags
