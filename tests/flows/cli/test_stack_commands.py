"""`vitline stack`, and how other commands find a running stack: run as programs, in a folder with a stack below it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitline.infra.local.processes import free_ports
from vitline.infra.local.stack import stack_environment, start_stack, stop_stack
from vitline.infra.local.stack_config import ALL, prepare_stack_config

from ...eventually import eventually

ROOT = Path(__file__).parents[3]
OURS = ("AWS_", "RAY_", "VITLINE_", "MLFLOW_", "PREFECT_")


@pytest.fixture
def run(tmp_path):
    """run(*arguments, **env): exit code, stdout and stderr of `vitline` in `tmp_path`, with `env` as the only settings."""

    def call(*arguments, **env):
        plain = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        done = subprocess.run(
            [sys.executable, "-m", "vitline.flows.cli.main", *arguments],
            cwd=tmp_path,
            env={**plain, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture
def joined(stack, tmp_path):
    (tmp_path / ".vitline").mkdir()
    (tmp_path / ".vitline" / "stack").symlink_to(stack.directory)
    return stack


@pytest.mark.slow
def test_without_a_stack(run):
    assert run("stack", "status")[:2] == (
        1,
        f"No stack is running in {run_folder(run)}; `vitline stack up` starts it.\n",
    )
    code, out, _ = run("stack", "down", "--json")
    assert (code, json.loads(out)["was_up"]) == (0, False)
    code, _, err = run("stack", "restart", "ray")
    assert code == 1
    assert "Start it with `vitline stack up`" in err
    code, _, err = run("stack", "restart", "minio")
    assert code == 2
    assert "'minio' is not a service of the stack. The services are s3, mlflow" in err
    code, _, err = run("stack", "up", "--s3-port", "80")
    assert code == 2
    assert "--s3-port=80: must be from 1024 to 55535" in err
    code, _, err = run("data", "ls")
    assert "down" not in err


def run_folder(run):
    return json.loads(run("stack", "status", "--json")[1])["directory"]


@pytest.mark.slow
def test_commands_that_would_use_a_stopped_stack_mention_it(run, tmp_path):
    prepare_stack_config(tmp_path / ".vitline" / "stack", {})
    expected = f"the local stack in {tmp_path}/.vitline/stack is down, so its store cannot be read; `vitline stack up` starts it\n"
    assert run("data", "ls", "--json") == (0, '{\n "corpora": []\n}\n', expected)
    for quiet in (("data", "ls", "--root", "elsewhere"), ("data", "--help"), ("stack", "status")):
        assert "cannot be read" not in run(*quiet)[2]
    assert "cannot be read" not in run("data", "ls", VITLINE_ROOT="elsewhere")[2]


def test_status_shows_services_addresses_and_ports(run, joined):
    def shown():
        """Both forms, once no process of Ray has begun or ceased to listen between them."""
        (code, out, _), (code_of_text, text, _) = run("stack", "status", "--json"), run("stack", "status")
        assert (code, code_of_text) == (0, 0)
        lines = (line for line in text.splitlines() if " listens on " in line)
        ports = {int(number) for line in lines for number in line.split(": ")[1].split(", ")}
        return ports == {listener["port"] for listener in json.loads(out)["listeners"]} and (out, text)

    out, text = eventually(shown, awaited="the same ports in both forms")
    report = json.loads(out)
    assert report["up"]
    assert [s["state"] for s in report["services"]] == ["up"] * len(ALL)
    assert all(url in text for url in report["links"].values())
    for name, page in report["experiments"].items():
        assert f"{page} ({name})" in text
        assert re.search(r"/#/experiments/\d+/runs\?workflowType=machine_learning$", page), page
    assert "Nothing can be reached from other machines." in text
    assert f"{'ray':<14} listens on loopback: " in text
    assert str(joined.log_dir) in text
    assert joined.env["AWS_SECRET_ACCESS_KEY"] not in out + text


def test_commands_use_a_running_stack_unless_a_root_is_given(run, joined, tmp_path):
    # Credentials of another store have no effect.
    others = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "other", "AWS_PROFILE": "other"}
    code, _, err = run("data", "show", "nope", **others)
    assert code == 2
    assert "no corpus 'nope' below s3://vitline" in err
    for arguments, env in ((("--root", str(tmp_path)), {}), ((), {"VITLINE_ROOT": str(tmp_path)})):
        assert f"no corpus 'nope' below {tmp_path}" in run("data", "show", "nope", *arguments, **env)[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_stack_with_an_existing_store_starts_the_other_services(run, s3_uri, tmp_path):
    """A flow runs in the worker that was started, and uses the store with the credentials of this shell."""
    keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    try:
        code, out, err = run("stack", "up", "--json", VITLINE_ROOT=s3_uri, **keys)
        assert code == 0, err
        report = json.loads(out)
        assert (report["up"], report["root"]) == (True, s3_uri)
        assert {s["name"] for s in report["services"]} == {*ALL} - {"s3"}
        code, out, err = run(
            "flows", "trigger", "reconcile/default", "--wait", "--json", **keys
        )  # without VITLINE_ROOT
        assert (code, json.loads(out)["state"]) == (0, "Completed"), err
        assert f"below {s3_uri}" in run("data", "ls", **keys)[2]
    finally:
        assert run("stack", "down")[0] == 0
    expected = (
        f"the local stack in {tmp_path}/.vitline/stack is down; `vitline stack up` starts it. Its store is {s3_uri}\n"
    )
    code, out, err = run("data", "ls", **keys)
    assert (code, err.startswith(expected), f"below {s3_uri}" in err) == (0, True, True)
    code, _, err = run("stack", "up", VITLINE_ROOT=s3_uri, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert code == 1
    assert f"store: yours, at {s3_uri}, cannot be used" in err


def test_a_store_elsewhere_has_to_be_named(run):
    for variables, problem in (
        (
            {"RAY_ADDRESS": "http://ray:8265"},
            "RAY_ADDRESS is http://ray:8265, whose nodes cannot reach a store of the stack",
        ),
        ({"AWS_ENDPOINT_URL": "http://s3:9000"}, "AWS_ENDPOINT_URL is http://s3:9000, but no store there is named"),
    ):
        code, _, err = run("stack", "up", **variables)
        assert (code, problem in err) == (2, True), err


@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_stack_beside_an_own_prefect_and_mlflow_starts_the_rest_and_runs_a_flow_with_them(run, tmp_path):
    """`vitline.toml` names both; their logins are in the environment."""
    own, ports = tmp_path / "own", dict(zip(("mlflow", "prefect", "ray"), free_ports(3), strict=True))
    try:
        start_stack(
            own,
            log_dir=tmp_path / "logs",
            services=("mlflow", "prefect"),
            ports=ports,
            root=str(tmp_path / "unused"),
            ends_with_caller=True,
            announce=print,
        )
        theirs = stack_environment(own)
        prefect, mlflow = theirs["PREFECT_API_URL"], theirs["MLFLOW_TRACKING_URI"]
        logins = {
            n: theirs[n] for n in ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        }
        (tmp_path / "vitline.toml").write_text(
            f'project = "beside"\nprefect_api_url = "{prefect}"\nmlflow_tracking_uri = "{mlflow}"\n'
        )
        code, out, err = run("stack", "up", "--json", **logins)
        assert code == 0, err
        report = json.loads(out)
        assert {service["name"] for service in report["services"]} == {*ALL} - {"prefect", "mlflow"}
        assert [(each["name"], each["address"], each["ok"]) for each in report["yours"]] == [
            ("prefect", prefect, True),
            ("mlflow", mlflow, True),
        ]
        code, out, err = run(
            "flows", "trigger", "prepare-corpus/beside-default", "--set", "preset=digits", "--wait", "--json", **logins
        )
        assert (code, json.loads(out)["state"]) == (0, "Completed"), err
        assert json.loads(out)["page"].startswith(prefect.removesuffix("/api"))
        assert "digits" in run("data", "ls", **logins)[1]

        def experiments():
            return json.loads(run("stack", "status", "--json", **logins)[1])["experiments"].values()

        eventually(lambda: any(page.startswith(mlflow) for page in experiments()), awaited="what the sender sends")
        stop_stack(own)
        code, out, _ = run("stack", "status", **logins)
        assert code == 1
        assert re.search(
            rf"mlflow: yours, at {mlflow}, cannot be used: .* Start it, or correct MLFLOW_TRACKING_URI\.", out
        )
    finally:
        code, out, _ = run("stack", "down")
        stop_stack(own)
    assert (code, f"prefect: yours, at {prefect}, runs on" in out) == (0, True)
    code, _, err = run("stack", "up", **logins)
    assert code == 1
    assert re.search(rf"prefect: yours, at {prefect}, cannot be used: .* Start it, or correct PREFECT_API_URL\.\n", err)


@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_what_the_end_of_a_stack_interrupts_is_named_ended_and_continued(run, tmp_path):
    """A training is cut by `stack down`: the next start ends it everywhere, and one command continues it from its checkpoint."""
    overrides = {
        "execution.num_workers": 1,
        "execution.save_every_steps": 20,
        "recipe.total_steps": 100_000,
        "recipe.optim.warmup_steps": 1,
    }
    form = [f"overrides={json.dumps(overrides)}", "corpus=digits", "recipe=digits", "name=cut"]

    def training():
        code, out, err = run("runs", "ls", "--json")
        assert code == 0, err
        return next((row for row in json.loads(out)["runs"] if row["stage"] == "pretrain"), {"state": "", "step": None})

    try:
        assert run("stack", "up", "--json")[0] == 0
        code, _, err = run("flows", "trigger", "prepare-corpus/default", "--set", "preset=digits", "--wait")
        assert code == 0, err
        code, out, err = run(
            "flows", "trigger", "pretrain/default", *(word for each in form for word in ("--set", each))
        )
        assert code == 0, err
        eventually(lambda: (training()["step"] or 0) > 20, timeout_s=600)
        key = training()["run"]

        code, out, err = run("stack", "down", "--json")
        assert (code, json.loads(out)["interrupted"]) == (0, [key]), err
        assert re.search(rf"Interrupts {key}: pretrain, running, [0-9,]+ of 100,000 steps", err)
        assert "`vitline stack up` prints the command that resumes the flow runs" in err

        code, _, err = run("stack", "up", "--json")
        assert code == 0, err
        assert training()["state"] == "preempted"
        command = re.search(r"`vitline (flows resume \S+)` resumes what was", err)[1].split()
        code, out, err = run("ops", "reconcile", "--json")
        assert json.loads(out)["findings"] == [], out
        code, out, err = run(*command, "--json")
        assert code == 0, err
        eventually(lambda: training()["state"] == "running" and training()["attempt"] == 2, timeout_s=600)
        assert "'nobody'" in run("flows", "resume", "nobody")[2]
    finally:
        assert run("stack", "down")[0] == 0
