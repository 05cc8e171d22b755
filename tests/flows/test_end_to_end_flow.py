"""A tiny pipeline through real servers: started twice at once, checked in store, Prefect and MLflow, and started again."""

import json
import re
from datetime import UTC, datetime

import httpx
import pytest
from pyarrow import BufferReader
from pyarrow.parquet import read_table

from vitline.flows.catalog.records import attempt_records
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.nights.night_record import read_night
from vitline.flows.to_mlflow import outbox
from vitline.infra.runs.lease import job_id_of
from vitline.infra.storage import open_store

from ..eventually import eventually

STAGES = ["prepare", "pretrain", "evaluate"]


@pytest.fixture(scope="module")
def again(flows, pipelines) -> str:
    """A second flow run of the same request, after the first has ended."""
    run = flows.start("pretrain-then-transfer/tiny", name="twice")
    flows.wait(run)
    return run


def test_of_two_at_once_one_runs_and_the_other_is_skipped_with_a_link_to_it(flows, pipelines):
    worked, skipped = flows.find(pipelines.worked), flows.find(pipelines.skipped)
    assert worked["state_type"] == skipped["state_type"] == "COMPLETED"
    assert worked["state"]["message"].startswith("val/top1 ")
    assert "tasks/digits-5-to-9/top1_from_scratch" in worked["state"]["message"]
    assert pipelines.record.key in skipped["state"]["message"]
    assert pipelines.worked in skipped["state"]["message"]
    assert flows.parts(pipelines.skipped) == []


def test_fields_that_the_request_leaves_out_keep_the_values_of_the_deployment(flows, pipelines):
    form = flows.api.get("/deployments/name/pretrain-then-transfer/tiny").json()["parameters"]["request"]
    assert flows.find(pipelines.worked)["parameters"] == {"request": {"name": "twice"}}
    request = PipelineRequest.model_validate(form | {"name": "twice"})
    assert pipelines.record.request == request.model_dump(mode="json")
    assert form["name"] != "twice"
    assert PipelineRequest.model_validate(form) != PipelineRequest()


def test_the_record_names_outputs_and_origin(in_stack, pipelines):
    record, root = pipelines.record, open_store(in_stack.root)
    assert (record.state, record.reason, record.night) == ("finished", "", None)
    assert record.origin.flow_run_id == pipelines.worked
    assert record.origin.name == "Both at once"
    assert (record.origin.trigger, record.origin.deployment) == ("manual", "pretrain-then-transfer/tiny")
    assert [stage.stage for stage in record.stages] == STAGES
    assert set(record.metrics) >= {"val/top1", "tasks/digits-5-to-9/top1"}
    assert set(record.corpora) == {"digits-0-to-4", "digits-5-to-9"}
    assert open_store(record.model).read_json("config.json")["digest"] == record.model_digest
    assert record.report is not None
    assert root.exists(record.report.removeprefix(f"{root.uri}/"))
    trained = next(stage.run_key for stage in record.stages if stage.stage == "pretrain")
    (attempt,) = attempt_records(root.child(f"runs/{trained}"))
    assert (attempt.job_id, attempt.origin.pipeline) == (
        job_id_of(root.child(f"runs/{trained}"), trained, 1),
        record.key,
    )


def test_every_stage_is_a_subflow_with_progress_and_links(flows, pipelines):
    parts = flows.parts(pipelines.worked)
    assert [part["state_name"] for part in parts] == ["Completed"] * 3
    trained = flows.artifacts(parts[1]["id"])
    assert trained["pretrain"]["type"] == "progress"
    assert float(trained["pretrain"]["data"]) == 100.0
    run = next(stage.run_key for stage in pipelines.record.stages if stage.stage == "pretrain")
    links = trained["job"]["data"]
    assert f"/#/jobs/{job_id_of(open_store('s3://vitline').child(f'runs/{run}'), run, 1)}" in links
    assert f"s3://vitline/runs/{run}" in links
    for run in (parts[1]["id"], pipelines.worked):  # in the logs of the subflow and of its parent
        assert "pretrain twice: submitted" in " ".join(flows.lines(run))


def test_the_page_shows_stages_scores_and_links(flows, pipelines, stack):
    assert flows.find(pipelines.worked)["name"] == "Both at once"  # the name that was typed
    shown = flows.artifacts(pipelines.worked)
    stages = json.loads(shown["stages"]["data"])
    assert [row["stage"] for row in stages] == STAGES
    live = shown["progress"]["data"]
    for name in ("prepare-corpus", "pretrain", "evaluate"):
        (row,) = [line for line in live.splitlines() if line.startswith(f"| {name} | finished | ")]
        assert name == "prepare-corpus" or ("[Ray job](" in row and "[MLflow](" in row), row
    for name in pipelines.record.corpora:
        assert f"report of {name}: `s3://vitline/corpora/{name}/" in live
    (score,) = json.loads(shown["scores"]["data"])
    assert (score["task"], score["test images"]) == ("digits-5-to-9", "396")
    links = shown["links"]["data"]
    for target in (pipelines.record.report, pipelines.record.model, stack.env["MLFLOW_TRACKING_URI"]):
        assert target in links
    assert not [line for line in flows.lines(pipelines.worked) if "Traceback" in line]


def wait_for_mlflow(settings, *keys):
    """Until MLflow has these runs and pipelines as they ended: on a busy machine, the sender is done after the flow run."""
    root = open_store(settings.root)
    eventually(lambda: not {*keys} & {entry.key for entry in outbox.listed(root)}, awaited="the end of sending")


def test_mlflow_has_a_parent_and_a_child_for_every_stage(flows, pipelines, in_stack, stack):
    wait_for_mlflow(in_stack, pipelines.record.key, *(stage.run_key for stage in pipelines.record.stages))
    api = httpx.Client(
        base_url=f"{stack.env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow", auth=stack.mlflow_login, timeout=60
    )
    experiments = api.post("/experiments/search", json={"max_results": 100}).json()["experiments"]
    wanted = {"experiment_ids": [e["experiment_id"] for e in experiments], "max_results": 1000}
    found = api.post("/runs/search", json=wanted | {"filter": f"tags.`vitline.pipeline` = '{pipelines.record.key}'"})
    tags = {
        run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in found.json()["runs"]
    }
    assert {run["info"]["status"] for run in found.json()["runs"]} == {"FINISHED"}
    (parent,) = [run for run, tag in tags.items() if tag["vitline.stage"] == "pretrain-then-transfer"]
    children = {tag["vitline.stage"]: tag for run, tag in tags.items() if run != parent}
    assert (
        set(children) == {stage.stage for stage in pipelines.record.stages if stage.run_key} >= {"pretrain", "evaluate"}
    )
    for child in children.values():
        assert child["mlflow.parentRunId"] == parent
        assert child["vitline.flow_run_id"] == pipelines.worked
    (trained,) = [run for run, tag in tags.items() if tag["vitline.stage"] == "pretrain"]
    (run,) = [run for run in found.json()["runs"] if run["info"]["run_id"] == trained]
    probes = {each["key"]: each["step"] for each in run["data"]["metrics"] if each["key"].startswith("probe/")}
    assert probes == {"probe/digits-5-to-9/knn_top1": 6, "probe/digits-5-to-9/fewshot_top1": 6}


def test_a_second_run_reuses_every_stage_and_reports_it(flows, pipelines, again, in_stack):
    ended = flows.find(again)
    assert (ended["state_name"], ended["state"]["message"]) == (
        "Completed",
        f"{flows.find(pipelines.worked)['state']['message']} (every stage finished before; nights.night=now makes it a further night)",
    )
    stages = json.loads(flows.artifacts(again)["stages"]["data"])
    assert [row["time"] for row in stages] == ["reused"] * 3
    by_stage = {stage.stage: stage.run_key for stage in pipelines.record.stages}
    assert [row["run"] for row in stages[1:]] == [by_stage["pretrain"], by_stage["evaluate"]]
    for part in flows.parts(again):
        assert "job" not in flows.artifacts(part["id"])
    run = open_store(in_stack.root).child(f"runs/{by_stage['pretrain']}")
    assert len(attempt_records(run)) == 1


@pytest.mark.long
def test_a_night_that_was_missed_is_run_by_hand(flows, pipelines, in_stack):
    asked = pipelines.record.request["overrides"] | {"nights.night": "2026-11-23T02:00"}
    run = flows.start("pretrain-then-transfer/tiny", name="twice", overrides=asked)
    flows.wait(run)
    ended = flows.find(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    assert ended["state"]["message"].startswith("Not compared: there is neither a champion nor an earlier whole night.")
    night = read_night(open_store(in_stack.root), "twice", datetime(2026, 11, 23, 2, tzinfo=UTC))
    assert (night.outcome, night.origin.trigger) == ("finished", "manual")
    assert night.pipeline != pipelines.record.key
    assert json.loads(flows.artifacts(run)["stages"]["data"])[1]["time"] != "reused"


def test_a_plan_that_does_not_fit_its_deadline_is_refused_with_a_size_that_fits(flows, pipelines, in_stack):
    """The throughput is that of the tiny training, from its journal."""
    from vitline.flows.on_prefect import flows

    request = pipelines.record.request | {"train_images": 1_280_000_000, "deadline_hours": 0.5}
    request["overrides"] = {k: v for k, v in request["overrides"].items() if not k.startswith("recipe.")}
    state = flows.pretrain_then_transfer_flow(request, return_state=True)
    assert (state.type, state.name) == ("FAILED", "Failed")
    assert "1,280,000,000 images take " in state.message
    assert "but deadline_hours is 0.5. Set train_images to at most " in state.message


def test_the_model_predicts_the_classes_of_a_corpus(flows, pipelines, in_stack, stack):
    request = {"model": pipelines.record.model, "corpus": "digits-5-to-9", "splits": ["test"], "top_k": 2}
    run = flows.start("predict/default", **request)
    flows.wait(run)
    ended = flows.find(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    key = re.search(r"396 images: s3://vitline/runs/(\S+)/predictions$", ended["state"]["message"])[1]
    store = open_store(in_stack.root).child(f"runs/{key}")
    rows = [
        row for part in store.list("predictions/") for row in read_table(BufferReader(store.read(part))).to_pylist()
    ]
    assert sorted(row["row"] for row in rows) == list(range(396))
    assert {row["labels"][0] for row in rows} == {"5", "6", "7", "8", "9"}
    assert {row["class"] for row in rows} <= {"0", "1", "2", "3", "4"}  # what the model was trained on
    assert float(flows.artifacts(run)["predict"]["data"]) == 100.0
    wait_for_mlflow(in_stack, key)
    api = httpx.Client(
        base_url=f"{stack.env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow", auth=stack.mlflow_login, timeout=60
    )
    (experiment,) = api.post(
        "/experiments/search", json={"max_results": 1, "filter": "name = 'vitline/predict'"}
    ).json()["experiments"]
    (sent,) = api.post("/runs/search", json={"experiment_ids": [experiment["experiment_id"]]}).json()["runs"]
    assert {metric["key"]: metric["value"] for metric in sent["data"]["metrics"]}["predict/images"] == 396


@pytest.mark.long
def test_a_student_is_trained_on_images_that_a_teacher_labels(flows, pipelines, in_stack):
    """By the flow, which finds the predictions of the test before."""
    small = {"execution.num_workers": 1, "recipe.total_steps": 4, "recipe.optim.warmup_steps": 1}
    request = {
        "teacher": pipelines.record.model, "corpus": "digits-0-to-4", "unlabelled": "digits-5-to-9", "splits": ["test"],
        "top_k": 2, "min_score": 0, "predicted_weight": 3, "recipe": "digits", "overrides": small,
    }  # fmt: skip
    run = flows.start("self-train/default", **request)
    flows.wait(run)
    ended = flows.find(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    student = re.fullmatch(r"(\S+/models/digits-0-to-4-student/\w+), val .*", ended["state"]["message"])
    assert sorted(part["state_name"] for part in flows.parts(run)) == ["Completed"] * 3
    page = flows.artifacts(run)["progress"]["data"]
    assert re.findall(r"^\| ([\w-]+) \| (\w+)", page, re.MULTILINE)[1:] == [
        ("predict", "finished"),
        ("prepare-corpus", "finished"),
        ("pretrain", "finished"),
    ]
    made_of = open_store(student[1]).read_json("config.json")["provenance"]["mixture"]
    assert [(each["corpus"].split("/")[0], each["share"]) for each in made_of] == [
        ("digits-0-to-4", 0.25),
        ("digits-5-to-9-predicted", 0.75),
    ]


def test_two_protocols_are_two_evaluations_of_one_flow_run(flows, pipelines, in_stack):
    """The training is that of the pipeline before, and so is the second evaluation."""
    form = flows.api.get("/deployments/name/pretrain-then-transfer/tiny").json()["parameters"]["request"]
    overrides = {
        name.replace("protocol.", "protocol.small-images."): value for name, value in form["overrides"].items()
    }
    asked = {"name": "twice", "protocol": ["fewshot", "small-images"], "overrides": overrides}
    run = flows.start("pretrain-then-transfer/tiny", **asked)
    flows.wait(run)
    ended = flows.find(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    assert "fewshot/digits-5-to-9/5shot/top1 " in ended["state"]["message"]
    assert [part["parameters"]["request"].get("protocol") for part in flows.parts(run)[2:]] == [
        "fewshot",
        "small-images",
    ]
    page = flows.artifacts(run)["progress"]["data"]
    assert re.findall(r"^\| (evaluate [\w-]+) \| (\w+)", page, re.MULTILINE) == [
        ("evaluate fewshot", "finished"),
        ("evaluate small-images", "finished"),
    ]
    scores = json.loads(flows.artifacts(run)["scores"]["data"])
    assert [row["protocol"].partition("-")[0] for row in scores] == ["fewshot", "fewshot", "fewshot", "small"]
