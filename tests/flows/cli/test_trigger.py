"""`vitline flows trigger`: starts what the UI would start, and refuses errors before submission."""

import functools
import json
import sys

import pytest

from vitline.flows.cli import main as cli

TINY = "pretrain-then-transfer/tiny"
# Schedules of other deployments may create runs at any time.
OF_THE_DEMO = {"deployments": {"name": {"any_": ["demo"]}}}
DEMO = "pretrain-then-transfer/demo"


@pytest.fixture
def trigger(in_stack, vitline):
    """trigger(*arguments): exit code, stdout and stderr of the command in the stack's environment."""
    return functools.partial(vitline, "flows", "trigger")


def test_a_request_that_the_form_or_the_flow_would_refuse_is_not_submitted(trigger, flows):
    before = flows.api.post("/flow_runs/count", json=OF_THE_DEMO).json()
    for changes, says in [
        (["seed=three"], "seed: must be a whole number, not 'three'"),
        (["seed=-1"], "seed: must be at least 0, not -1"),
        (["recipe=vit-g"], "or 'bit-r152x4-jft', not 'vit-g'"),
        (["sed=1"], "Did you mean 'seed'?"),
        (["tasks=[]"], "tasks: must not be left empty, not []"),
        (["corpus=brids"], "There is no corpus 'brids' below s3://vitline; available: "),
        (['overrides={"recipe.optim.peak_lrr": 1}'], "no field 'recipe.optim.peak_lrr'; available fields: "),
        (["num_workers=1000"], "num_workers=1000 is more than recipe.input.num_lanes"),
        (["seed"], "'seed' does not have the form"),
    ]:
        code, out, err = trigger(DEMO, *(word for change in changes for word in ("--set", change)))
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert says in err
        assert err.count("\n") == 1
    code, _, err = trigger("pretrain-then-transfer/dem")
    assert code == 2
    assert "no deployment 'pretrain-then-transfer/dem'; available: branch/default, collect-garbage/default, " in err
    assert "Did you mean 'pretrain-then-transfer/demo'?" in err
    assert flows.api.post("/flow_runs/count", json=OF_THE_DEMO).json() == before


def test_a_run_is_started_and_followed_and_its_end_sets_the_exit_code(trigger, flows):
    code, out, err = trigger("collect-garbage/default", "--set", "dry_run=true", "--wait", "--json")
    report = json.loads(out)
    assert report["page"].endswith(
        f"/v2/runs/flow-run/{report['flow_run']}"
    )  # the pages that the server shows by default
    found = flows.find(report["flow_run"])
    assert "trigger:manual" in found["tags"]
    assert (code, report["state"]) == (0, "Completed"), err
    assert report["message"] == found["state"]["message"] != ""
    assert "Beginning flow run" in err
    assert "Finished in state Completed" in err


def test_the_error_without_deployment_or_server_names_the_next_step(trigger, flows, monkeypatch):
    from vitline.flows.on_prefect.deployments import Deployment

    monkeypatch.setattr(Deployment, "full_name", property(lambda deployment: f"{deployment.flow}/not-registered"))
    code, _, err = trigger("evaluate/not-registered")
    assert code == 1
    assert "has no deployment 'evaluate/not-registered'; `vitline flows deploy` registers it." in err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["vitline", "flows", "trigger", DEMO])
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
