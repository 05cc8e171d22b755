"""`vitline flows resume` on a scripted Prefect; test_stack_commands.py continues a real training."""

from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import SetStateStatus

from vitline.flows.cli import trigger
from vitline.infra.settings import Settings

SETTINGS = Settings(prefect_api_url="http://prefect/api")
ACCEPTED = SimpleNamespace(status=SetStateStatus.ACCEPT, details=None)


class FakeApi:
    def __init__(self, *runs):
        self.runs, self.done = runs, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read_flow_runs(self, flow_run_filter):
        names, ids = flow_run_filter.name, flow_run_filter.id
        return [run for run in self.runs if (names and run.name in names.any_) or (ids and run.id in ids.any_)]

    def resume_flow_run(self, id):
        self.done.append((id, "resumed"))
        return ACCEPTED

    def set_flow_run_state(self, id, state):
        self.done.append((id, f"{state.type.value} {state.name}"))
        return ACCEPTED


def flow_run(name, kind, **more):
    fields = {"id": uuid4(), "parent_task_run_id": None, "deployment_id": uuid4()}
    return SimpleNamespace(name=name, state=State(type=StateType(kind)), **(fields | more))


@pytest.fixture
def resume(monkeypatch):
    def call(runs, *names):
        api = FakeApi(*runs)
        monkeypatch.setattr(trigger, "client", lambda: api)
        trigger.resume(SETTINGS, names)
        return api.done

    return call


def test_an_interrupted_run_starts_again_and_a_suspended_one_is_resumed(resume):
    """The same flow runs: a new one would have no night."""
    cut, suspended = flow_run("cut", "CRASHED"), flow_run("kept", "PAUSED")
    part = flow_run("cut", "CRASHED", parent_task_run_id=uuid4())
    done = resume([cut, part, suspended], "cut", str(suspended.id))
    assert done == [(cut.id, "SCHEDULED AwaitingRetry"), (suspended.id, "resumed")]


@pytest.mark.parametrize(
    ("runs", "error", "says"),
    [
        ([], ValueError, "http://prefect/api has no flow run 'cut'"),
        (
            [flow_run("cut", "FAILED"), flow_run("cut", "CRASHED")],
            ValueError,
            "several flow runs of the name 'cut'; give",
        ),
        ([flow_run("cut", "RUNNING")], RuntimeError, "flow run cut is Running: it is still active"),
        ([flow_run("cut", "COMPLETED")], RuntimeError, "flow run cut is Completed: it has completed"),
        (
            [flow_run("cut", "CRASHED", deployment_id=None)],
            RuntimeError,
            "without a deployment, so it cannot be resumed",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_before_anything_is(resume, runs, error, says):
    with pytest.raises(error, match=says):
        resume([flow_run("other", "CRASHED"), *runs], "other", "cut")
