"""What a person does in Prefect stays, also at the moment at which a flow process replaces the limit of *Suspend*; on a real server."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from vitline.flows.on_prefect.prefect_observer import PrefectObserver
from vitline.flows.runs.services import StopRequested, Suspended

pytestmark = pytest.mark.servers


@pytest.fixture
def suspended(prefect):
    """A flow run that somebody has suspended with a limit."""
    run = prefect.post("pretrain/default", {}, state={"type": "RUNNING", "name": "Running"}).json()["id"]
    until = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    set_state(prefect, run, type="PAUSED", name="Suspended", state_details=details)
    yield run
    prefect.api.delete(f"/flow_runs/{run}").raise_for_status()


def set_state(prefect, run, **state):
    request = {"state": state, "force": True}
    answer = prefect.api.post(f"/flow_runs/{run}/set_state", json=request).raise_for_status().json()
    assert answer["status"] == "ACCEPT", answer


def resume(prefect, run):
    answer = prefect.api.post(f"/flow_runs/{run}/resume", json={}).raise_for_status().json()
    assert answer["status"] == "ACCEPT", answer


def cancel(prefect, run):
    """Prefect cancels a suspended run at once."""
    prefect.cancel(run)


def nothing(prefect, run):
    pass


@pytest.mark.parametrize(("meanwhile", "stays"), [(resume, "Resuming"), (cancel, "Cancelled"), (nothing, "Suspended")])
def test_what_a_person_does_while_the_limit_is_replaced_stays(prefect, suspended, monkeypatch, meanwhile, stays):
    observer = PrefectObserver(UUID(suspended))
    real, told = observer._client.set_flow_run_state, []

    def late(*args, **more):
        if not told:
            told.append(True)
            meanwhile(prefect, suspended)
        return real(*args, **more)

    with observer._client:
        monkeypatch.setattr(observer._client, "set_flow_run_state", late)
        observer._update_state()
        found = prefect.find(suspended)["state"]
        assert (told, found["name"]) == ([True], stays)
        assert found["state_details"].get("pause_timeout") is None, "Prefect's server would fail it then"
        with pytest.raises(StopRequested) as stop:
            observer.check()
        assert isinstance(stop.value, Suspended) == (meanwhile is not cancel)
