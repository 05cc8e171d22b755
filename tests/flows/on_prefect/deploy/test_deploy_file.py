"""`vitline flows deploy --file` at a Prefect server: what a file names is sent each time, and everything else stays as people edit it."""

import functools
import json

import pytest

FILE = """\
defaults: {pool: vitline, tags: [vision]}
deployments:
  - name: file-b
    flow: pretrain-then-transfer
    job_variables: {name: big}
    concurrency: 2
    schedules: [{cron: "0 2 * * *", timezone: Europe/Berlin}, {cron: "0 5 * * 6", name: weekend, active: false}]
    request: {name: file-b, corpus: digits-0-to-4, recipe: digits, tasks: [digits-5-to-9], train_images: 1000}
  - name: file-s
    flow: pretrain-then-transfer
    schedules: [{cron: "30 2 * * *"}]
    request: {name: file-s, corpus: digits-0-to-4, recipe: digits, tasks: [digits-5-to-9]}
"""
BIG, SMALL = "pretrain-then-transfer/file-b", "pretrain-then-transfer/file-s"


@pytest.fixture
def deploy(in_stack, vitline):
    """deploy(*options): exit code, stdout and stderr of the command, in this process."""
    return functools.partial(vitline, "flows", "deploy")


@pytest.fixture
def file(tmp_path, flows):
    """file(text): the path of a deployments file; its deployments are deleted afterwards."""
    path = tmp_path / "deployments.yaml"

    def write(text=FILE):
        path.write_text(text)
        return str(path)

    yield write
    for name in (BIG, SMALL):
        found = flows.api.get(f"/deployments/name/{name}")
        if found.status_code == 200:
            flows.api.delete(f"/deployments/{found.json()['id']}").raise_for_status()


def read(flows, name=BIG):
    """A deployment, without what its worker changes when it looks for runs."""
    found = flows.api.get(f"/deployments/name/{name}").raise_for_status().json()
    return {name: value for name, value in found.items() if name not in ("last_polled", "status")}


def schedules_of(deployment):
    return {each["slug"]: (each["schedule"].get("cron"), each["active"]) for each in deployment["schedules"]}


def test_what_the_file_names_is_sent_and_edits_of_all_else_stay(deploy, file, flows):
    path = file()
    code, out, err = deploy("--file", path)
    assert (code, err) == (0, "")
    assert out.startswith("2 deployments registered\n")

    new = read(flows)
    assert schedules_of(new) == {"default": ("0 2 * * *", True), "weekend": ("0 5 * * 6", False)}
    assert new["global_concurrency_limit"]["limit"] == 2
    assert {"vitline", "stage:pipeline", "vision"} == {*new["tags"]}
    assert (new["work_pool_name"], new["job_variables"]) == ("vitline", {"name": "big"})
    before = [read(flows), read(flows, SMALL)]
    code, out, err = deploy("--file", path)
    assert (code, err) == (0, "")
    assert out.startswith("2 deployments up to date\n"), out
    assert [read(flows), read(flows, SMALL)] == before, "nothing is sent, not even what stays the same"

    # On the page: a value, a schedule, a tag and a variable of one's own, and the switch of a schedule that the file does not switch.
    page = f"/deployments/{new['id']}"
    ids = {each["slug"]: each["id"] for each in new["schedules"]}
    edits = {
        "parameters": {"request": {**new["parameters"]["request"], "seed": 7, "train_images": 5}},
        "tags": [*new["tags"], "mine"], "job_variables": {"name": "other", "stream_output": False},
        "description": "Ours.", "paused": True, "concurrency_limit": 5,
    }  # fmt: skip
    flows.api.patch(page, json=edits).raise_for_status()
    flows.api.patch(f"{page}/schedules/{ids['default']}", json={"active": False}).raise_for_status()
    flows.api.patch(
        f"{page}/schedules/{ids['weekend']}",
        json={"active": True, "schedule": {"cron": "0 6 * * 0", "timezone": "UTC"}},
    ).raise_for_status()
    mine = {"slug": "mine", "active": True, "schedule": {"cron": "0 7 1 1 *", "timezone": "UTC"}}
    flows.api.post(f"{page}/schedules", json=[mine]).raise_for_status()
    for _ in range(2):
        code, out, err = deploy("--file", path)
        assert (code, err) == (0, "")
        found = read(flows)
        assert found["parameters"]["request"] == {**new["parameters"]["request"], "seed": 7}, (
            "the file names train_images"
        )
        assert schedules_of(found) == {
            "default": ("0 2 * * *", False), "weekend": ("0 5 * * 6", False), "mine": ("0 7 1 1 *", True),
        }  # fmt: skip
        assert "mine" in found["tags"]
        assert found["job_variables"] == {"name": "big", "stream_output": False}
        assert (found["description"], found["paused"], found["global_concurrency_limit"]["limit"]) == ("Ours.", True, 2)
        (kept,) = [line for line in out.splitlines() if line.startswith(f"{BIG}: kept")]
        for part in (
            "request.seed 7 (default: 0)",
            "0 2 * * * Europe/Berlin, paused",
            "UTC, active, mine",
            "stream_output",
        ):
            assert part in kept
    assert f"{BIG}: updated" not in out
    assert {each["slug"]: each["id"] for each in found["schedules"]}.items() > ids.items(), "schedules are found again"

    less = file(FILE[: FILE.index("  - name: file-s")].replace("    concurrency: 2\n", "").replace("1000}", "2000}"))
    code, out, _ = deploy("--file", less, "--job-variable", "name=once")
    assert code == 0
    assert "request.train_images 1000 -> 2000" in out
    assert f"{SMALL} (active)" in out, out
    assert "`prefect deployment delete FLOW/NAME` deletes one." in out
    assert read(flows, SMALL)["schedules"], "what leaves the file stays"
    assert read(flows)["job_variables"]["name"] == "once", "an option wins over the file"
    code, out, _ = deploy("--file", less, "--json")
    assert SMALL in json.loads(out)["not in the file"]


def test_a_refused_file_changes_nothing(deploy, file, flows, tmp_path):
    assert deploy("--file", file())[0] == 0
    before = [read(flows), read(flows, SMALL)]
    changed = FILE.replace("1000}", "2000}")
    for text, says in [
        (changed.replace("file-s, corpus: digits-0", "file-s, corpus: digit-0"), "(line 12), file-s: request: There is no corpus"),
        (changed.replace("name: file-s\n", "name: file-s\n    pool: h100\n"), "(line 9), file-s: http"),
        (changed.replace("name: file-s\n", "name: file-s\n    job_variables: {enw: {}}\n"), "no variable 'enw'"),
        (changed.replace("name: file-s\n", "name: file-s\n    job_variables: {stream_output: maybe}\n"), "'maybe' is not"),
        ("project: birds\n" + changed, "(line 1): the file is for the project 'birds', but VITLINE_PROJECT names 'vitline'"),
    ]:  # fmt: skip
        code, out, err = deploy("--file", file(text))
        assert (code, out) == (2, "")
        assert says in err
        assert err.count("\n") == 1
    code, _, err = deploy("--file", file(changed), "--root", str(tmp_path / "theirs"))
    assert (code, "belongs to the root s3://vitline" in err) == (2, True)
    code, _, err = deploy("--file", file(changed), "--nightly")
    assert (code, "--nightly is for vitline's own deployments." in err) == (2, True)
    assert [read(flows), read(flows, SMALL)] == before


def test_deployments_of_a_file_are_listed_and_triggered_by_name(deploy, file, flows, vitline):
    assert deploy("--file", file())[0] == 0
    code, out, _ = vitline("flows", "ls", "--json")
    rows = {row["deployment"]: row for row in json.loads(out)["deployments"]}
    assert rows[BIG]["filled in"]["train_images"] == 1000
    schedules = {*rows[BIG]["schedule"].split("; ")}
    assert schedules == {"0 2 * * * Europe/Berlin, active", "0 5 * * 6 UTC, paused, weekend"}
    code, _, err = vitline("flows", "trigger", BIG, "--set", "corpus=brids")
    assert (code, "There is no corpus 'brids'" in err) == (2, True)
    code, _, err = vitline("flows", "trigger", "pretrain-then-transfer/file-c")
    assert code == 2
    assert f"Did you mean '{BIG}'?" in err or f"Did you mean '{SMALL}'?" in err
    code, out, err = vitline("flows", "trigger", SMALL, "--set", "train_images=640", "--json")
    assert code == 0, err
    run = json.loads(out)["flow_run"]
    assert flows.find(run)["parameters"]["request"]["name"] == "file-s"
    flows.cancel(run)
