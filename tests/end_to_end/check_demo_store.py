"""Asserts what a demo left in the store of the stack that is up here, and in MLflow: run it after `vitline demo`."""

import json
import time
import urllib.request

from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.flows.catalog.lists import list_corpora, list_models, list_pipelines, list_runs_and_pipelines
from vitline.flows.cli.groups.stack import join_stack
from vitline.flows.to_mlflow import outbox
from vitline.infra.runs.journal import read_journal
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.published.models import load_model


def main() -> None:
    join_stack(["check"])
    settings = Settings()
    root, store = settings.root, open_store(settings.root)
    corpora = list_corpora(root)
    assert len(corpora) >= 2, corpora
    for corpus in corpora:
        report = verify_corpus(open_store(corpus["uri"]))
        assert not report.problems, report.problems
    runs = {row["stage"]: row for row in list_runs_and_pipelines(root)}
    assert {"prepare", "pretrain", "evaluate"} <= runs.keys(), runs
    assert all(row["state"] == "finished" for row in runs.values()), runs
    run = open_store(runs["pretrain"]["uri"])
    assert list_checkpoints(run)
    assert {"train/loss", "val/top1", "optim/lr"} <= {record.key for record in read_journal(run)}
    (model,) = list_models(root)
    assert len(load_model(model["uri"]).classes) == model["classes"]
    scores = [Score.load(store, key) for key in store.list("scores/")]
    tasks = {score.task for score in scores}
    assert len(scores) == 2 * len(tasks), scores
    tests = {row["name"]: row["splits"]["test"] for row in corpora if "test" in row["splits"]}
    assert all(score.num_examples == tests[score.task] for score in scores)
    (report,) = store.list("reports/")
    page = store.read(report).decode()
    assert "Inputs of the model" in page
    assert "http" not in page.replace("http-equiv", "")
    names = sorted(row["name"] for row in corpora)
    print(
        f"{', '.join(names)}: prepared and verified; run {runs['pretrain']['run']}; {len(scores)} scores on {sorted(tasks)}"
    )

    (pipeline,) = list_pipelines(root)
    assert (pipeline.state, [s.stage for s in pipeline.stages]) == ("finished", ["prepare", "pretrain", "evaluate"])
    ends = time.monotonic() + 240  # on a busy machine, the sender is done after the demo
    while (left := outbox.left(store)) and time.monotonic() < ends:
        time.sleep(1)
    assert not left, left
    stages = {run["data"]["tags"]["vitline.stage"]: run for run in mlflow_runs(settings)}
    assert {"prepare", "pretrain", "evaluate", "pretrain-then-transfer"} <= stages.keys(), stages.keys()
    assert all(run["info"]["status"] == "FINISHED" for run in stages.values())
    print(f"pipeline {pipeline.key}: {len(stages)} runs in MLflow")


def mlflow_runs(settings: Settings) -> list[dict]:
    """Every run of every experiment, with tags as a dict, by MLflow's REST API."""

    def ask(path: str, body: dict) -> dict:
        url = f"{settings.mlflow_tracking_uri}/api/2.0/mlflow/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), settings.mlflow_headers())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    experiments = ask("experiments/search", {"max_results": 100})["experiments"]
    runs = ask("runs/search", {"experiment_ids": [e["experiment_id"] for e in experiments], "max_results": 100})["runs"]
    for run in runs:
        run["data"]["tags"] = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
    return [run for run in runs if "vitline.stage" in run["data"]["tags"]]


if __name__ == "__main__":
    main()
