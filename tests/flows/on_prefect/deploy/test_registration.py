"""`vitline flows deploy` run repeatedly as a command, after users have edited everything that Prefect's page lets them edit."""

import functools
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
EDITED = "pretrain-then-transfer/nightly"
PAGE_FIELDS = (
    "parameters", "schedules", "paused", "tags", "job_variables", "work_queue_name", "work_pool_name",
    "global_concurrency_limit", "concurrency_options", "enforce_parameter_schema",
)  # fmt: skip


@pytest.fixture
def deploy(in_stack):
    """deploy(*options): exit code, stdout and stderr of the command."""

    def call(*options):
        command = [sys.executable, "-m", "vitline.flows.cli.main", "flows", "deploy", *options]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return call


class Page:
    """A deployment, read and edited by the requests of Prefect's page."""

    def __init__(self, api, name):
        self.api, self.name = api, name

    def read(self):
        return self.api.get(f"/deployments/name/{self.name}").raise_for_status().json()

    def edit(self, **changes):
        self.api.patch(f"/deployments/{self.read()['id']}", json=changes).raise_for_status()

    def fill(self, **fields):
        found = self.read()["parameters"]["request"]
        self.edit(parameters={"request": found | fields})

    def add_schedule(self, **schedule):
        self.api.post(f"/deployments/{self.read()['id']}/schedules", json=[schedule]).raise_for_status()

    def edited(self):
        """The fields that users can edit, without the update times of schedules."""
        found = {name: value for name, value in self.read().items() if name in PAGE_FIELDS}
        for part in (*found["schedules"], found["global_concurrency_limit"] or {}):
            part.pop("updated", None)
        return found

    def restore(self, before):
        for schedule in self.read()["schedules"]:
            self.api.delete(f"/deployments/{self.read()['id']}/schedules/{schedule['id']}").raise_for_status()
        for schedule in before["schedules"]:
            kept = ("schedule", "active", "parameters", "slug")
            self.add_schedule(**{name: schedule[name] for name in kept if schedule[name] is not None})
        fields = ("parameters", "tags", "paused", "job_variables", "work_pool_name", "description")
        self.edit(
            **{name: before[name] for name in fields}, parameter_openapi_schema=before["parameter_openapi_schema"]
        )


@pytest.fixture
def page(flows):
    """page(name): a deployment, restored afterwards."""
    opened = []

    def open_page(name):
        found = Page(flows.api, name)
        opened.append((found, found.read()))
        return found

    yield open_page
    for found, before in opened:
        found.restore(before)


def test_edits_by_users_survive_every_registration(deploy, page):
    nightly = page(EDITED)
    nightly.fill(train_images=200, tasks=["digits"])
    (own,) = nightly.read()["schedules"]
    url = f"/deployments/{nightly.read()['id']}/schedules/{own['id']}"
    nightly.api.patch(
        url, json={"active": True, "slug": "ours", "parameters": {"request": {"seed": 3}}}
    ).raise_for_status()
    nightly.add_schedule(
        slug="weekend", active=False, parameters={"request": {"seed": 7}}, max_scheduled_runs=2,
        schedule={"cron": "0 5 * * 6", "timezone": "Europe/Berlin"},
    )  # fmt: skip
    tags = ["mine", *nightly.read()["tags"][1:]]
    nightly.edit(paused=True, tags=tags, job_variables={"env": {"A": "1"}}, concurrency_limit=3, description="Ours.")
    before = nightly.edited()
    for _ in range(2):
        code, out, err = deploy()
        assert (code, err) == (0, "")
        (kept,) = [line for line in out.splitlines() if line.startswith(f"{EDITED}: kept")]
        for part in (
            "request.train_images 200 (default: 102400)", 'request.tasks ["digits"]', "description", "0 2 * * * UTC, active, ours",
            "0 5 * * 6 Europe/Berlin, paused, weekend", '"seed": 7', "job variable env", "paused",
        ):  # fmt: skip
            assert part in kept
        after = nightly.edited()
        assert after["tags"] == ["vitline", "stage:pipeline", "mine"]
        assert after | {"tags": tags} == before
    assert nightly.read()["description"] == "Ours."
    assert f"{EDITED}: updated" not in out  # nothing is sent if vitline's own fields have not changed


def test_the_list_has_the_values_schedules_and_next_starts_that_prefect_has(page, in_stack):
    nightly = page(EDITED)
    nightly.fill(train_images=200)
    (own,) = nightly.read()["schedules"]
    url = f"/deployments/{nightly.read()['id']}/schedules/{own['id']}"
    nightly.api.patch(
        url, json={"active": True, "schedule": {"cron": "7 5 1 1 *", "timezone": "UTC"}}
    ).raise_for_status()
    # The next one may be a year away; Prefect plans 100 days ahead by itself.
    first = {"min_runs": 1, "end_time": (datetime.now(UTC) + timedelta(days=400)).isoformat()}
    nightly.api.post(f"/deployments/{nightly.read()['id']}/schedule", json=first).raise_for_status()
    command = [sys.executable, "-m", "vitline.flows.cli.main", "flows", "ls", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["deployment"]: row for row in json.loads(done.stdout)["deployments"]}
    assert rows[EDITED]["filled in"]["train_images"] == 200
    assert rows[EDITED]["schedule"] == "7 5 1 1 * UTC, active"
    assert rows[EDITED]["next start"].endswith("-01-01 05:07 UTC")
    assert rows["reconcile/default"]["schedule"].startswith("*/15 * * * * UTC, ")
    assert (rows["pretrain/default"]["schedule"], rows["pretrain/default"]["next start"]) == ("", "")


def test_only_named_values_are_registered_and_they_stay(page, in_stack):
    """So a new default of the form reaches every deployment whose values do not name the field."""
    from vitline.flows.on_prefect.deploy import registration
    from vitline.flows.on_prefect.deployments import NIGHT, PIPELINE, Deployment, Schedule
    from vitline.infra.settings import Settings

    def register(request, cron="0 2 * * *"):
        schedules = (Schedule(cron=cron, active=False),)
        night = Deployment(PIPELINE, "nightly", request, "pipeline", schedules, purpose=cron)
        (done,) = registration.register(Settings(), [night])
        return done

    nightly = page(EDITED)
    assert nightly.read()["parameters"] == {"request": NIGHT}
    register(NIGHT)
    nightly.edit(enforce_parameter_schema=False)  # of a form that has the field `gone`
    nightly.fill(deadline_hours=2.0, train_images=None, gone=1)
    done = register({**NIGHT, "max_late_hours": 1.0, "deadline_hours": 5.0}, cron="0 3 * * *")
    kept = {**NIGHT, "deadline_hours": 2.0, "train_images": None}
    assert nightly.read()["parameters"]["request"] == kept
    assert [s["schedule"]["cron"] for s in nightly.read()["schedules"]] == ["0 2 * * *"]
    assert "request.gone 1 removed: the form no longer has this field" in done.updated
    assert "description" in done.updated
    assert {
        "request.max_late_hours 3.0 (default: 1.0)",
        "request.deadline_hours 2.0 (default: 5.0)",
        "request.train_images null (default: 102400)",
        "schedule 0 2 * * * UTC, paused",
    } <= {*done.kept}
    nightly.edit(enforce_parameter_schema=True)
    again = register({**NIGHT, "max_late_hours": 1.0, "deadline_hours": 5.0}, cron="0 3 * * *")
    assert again.updated == []
    assert nightly.read()["parameters"]["request"] == kept


@pytest.fixture
def deploy_again(in_stack, vitline):
    """deploy_again(*options): exit code, stdout and stderr of the command, in this process."""
    return functools.partial(vitline, "flows", "deploy")


def test_a_value_that_the_new_form_rejects_is_named_and_kept(page, deploy_again):
    nightly = page(EDITED)
    nightly.edit(enforce_parameter_schema=False)
    nightly.fill(recipe="vit-g")
    nightly.edit(parameter_openapi_schema={"type": "object", "properties": {}}, enforce_parameter_schema=True)
    code, out, err = deploy_again()
    assert (code, err) == (1, "")
    assert f"{EDITED} keeps its old form, because the new one rejects the values of this deployment (recipe: " in out
    assert "not 'vit-g'). Edit its parameters on its page, then run `vitline flows deploy` again." in out
    assert nightly.read()["parameters"]["request"]["recipe"] == "vit-g"
    nightly.fill(recipe="digits")
    assert deploy_again()[0] == 0
    assert nightly.read()["parameter_openapi_schema"]["properties"]["request"]


def test_pool_and_job_variables_are_kept_unless_options_change_them(deploy_again, page, flows):
    from vitline.flows.on_prefect.deployments import DEPLOYMENTS

    pages = [page(deployment.full_name) for deployment in DEPLOYMENTS]
    template = flows.api.get("/work_pools/vitline").json()["base_job_template"]
    made = {"name": "gpus", "type": "process", "base_job_template": template}
    flows.api.post("/work_pools/", json=made).raise_for_status()
    try:
        code, out, err = deploy_again("--pool", "gpu")
        assert (code, out) == (2, "")
        assert (
            "has no work pool 'gpu'; available: gpus, vitline. Did you mean 'gpus'? `prefect work-pool create gpu"
            in err
        )
        code, _, err = deploy_again("--job-variable", "image")
        assert (code, err) == (2, "error: --job-variable 'image' does not have the form NAME=VALUE.\n")
        code, _, err = deploy_again("--job-variable", "stream_output=perhaps")
        assert code == 2
        assert "the work pool vitline rejects the job variables of prepare-corpus/default: " in err
        assert "'perhaps' is not of type 'boolean'" in err
        code, _, err = deploy_again("--job-variable", "enw={}")
        assert (code, "the jobs of the work pool vitline have no variable 'enw'; available: " in err) == (2, True)
        pages[0].edit(job_variables={"working_dir": "/data"})
        code, out, err = deploy_again(
            "--pool", "gpus", "--job-variable", 'env={"A": "1"}', "--job-variable", "name=night"
        )
        assert (code, err) == (0, "")
        assert 'work pool vitline -> gpus; job variable env = {"A": "1"}; job variable name = "night"' in out
        for _ in range(2):
            found = [(p.read()["work_pool_name"], p.read()["job_variables"]) for p in pages]
            assert found == [
                ("gpus", {"env": {"A": "1"}, "name": "night"} | ({"working_dir": "/data"} if p is pages[0] else {}))
                for p in pages
            ]
            code, out, err = deploy_again("--json")
            assert (code, err) == (0, "")
            assert all("work pool gpus" in row["kept"] for row in json.loads(out)["deployments"])
        gone = flows.api.get(f"/deployments/name/{pages[0].name}").json()["id"]
        flows.api.delete(f"/deployments/{gone}").raise_for_status()
        assert "1 deployment registered" in deploy_again()[1]
        made = pages[0].read()
        assert (made["work_pool_name"], made["job_variables"]) == ("gpus", {"env": {"A": "1"}, "name": "night"})
    finally:
        for p in pages:
            p.edit(work_pool_name="vitline")
        flows.api.delete("/work_pools/gpus")


def test_another_root_is_refused_and_can_register_under_another_project(
    deploy_again, page, flows, vitline, tmp_path, monkeypatch
):
    nightly = page(EDITED)
    before, other = nightly.edited(), ["--root", str(tmp_path / "theirs")]
    code, out, err = deploy_again(*other, "--pool", "vitline", "--nightly")
    assert (code, out) == (2, "")
    assert f"belongs to the root s3://vitline, not to file://{tmp_path}/theirs, so nothing was changed." in err
    assert "Set VITLINE_PROJECT=NAME" in err
    code, _, err = vitline("flows", "trigger", "reconcile/default", *other)
    assert (code, "belongs to the root s3://vitline" in err) == (2, True)
    assert nightly.edited() == before
    monkeypatch.setenv("VITLINE_PROJECT", "birds")
    assert "has no work pool 'birds'" in deploy_again(*other)[2]
    theirs = []
    try:
        code, out, err = deploy_again(*other, "--pool", "vitline")
        assert (code, err) == (0, "")
        assert "12 deployments registered" in out
        assert "6 alerts created" in out
        theirs = [d for d in flows.api.post("/deployments/filter", json={}).json() if d["name"].startswith("birds-")]
        assert {d["name"] for d in theirs} == {"birds-default", "birds-demo", "birds-nightly"}
        assert all("birds" in d["tags"] and "vitline" not in d["tags"] for d in theirs)
        assert nightly.edited() == before
    finally:
        for deployment in theirs:
            flows.api.delete(f"/deployments/{deployment['id']}").raise_for_status()
        for alert in flows.api.post("/automations/filter", json={}).json():
            if alert["name"].startswith("birds: "):
                flows.api.delete(f"/automations/{alert['id']}").raise_for_status()
        flows.api.delete("/variables/name/birds_alerts")
