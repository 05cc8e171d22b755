"""What the observer makes of the states that buttons of Prefect's pages set; tests/end_to_end/test_suspend.py presses them."""

from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State, StateDetails, StateType

from vitline.flows.on_prefect import prefect_observer
from vitline.flows.on_prefect.prefect_observer import PrefectObserver
from vitline.flows.runs.services import Suspended

RUN, PART = uuid4(), uuid4()
LIMIT = datetime(2026, 3, 1, 15, 10, tzinfo=UTC)
RUNNING = State(type=StateType.RUNNING)
# What the dialogs of both pages send.
PRESSED = State(
    type=StateType.PAUSED, name="Suspended", state_details=StateDetails(pause_timeout=LIMIT, pause_reschedule=True)
)


class FakePrefect:
    def __init__(self, **states):
        self.states = {RUN: states["run"], PART: states["part"]}

    def read_flow_run(self, id):
        return SimpleNamespace(state=self.states[id])

    def set_flow_run_state(self, id, state, force):
        assert force  # Prefect's rules allow no change from one suspension to another
        self.states[id] = state


@pytest.mark.parametrize("pressed_on", ["run", "part"])
def test_a_suspended_run_has_no_limit_after_which_prefect_would_fail_it(monkeypatch, pressed_on):
    server = FakePrefect(**{"run": RUNNING, "part": RUNNING, pressed_on: PRESSED})
    monkeypatch.setattr(prefect_observer, "client", lambda: server)
    observer = PrefectObserver(RUN)
    observer._part_id = PART
    observer._update_state()
    with pytest.raises(Suspended):
        observer.check()
    state = server.states[RUN]
    assert (state.type, state.name) == (StateType.PAUSED, "Suspended")
    assert (state.state_details.pause_timeout, state.state_details.scheduled_time) == (None, LIMIT)
    assert state.state_details.pause_reschedule  # else Resume would show it as running, without a process
    assert "resumes by itself soon after 2026-03-01 15:10 UTC" in state.message
    observer._update_state()
    assert server.states[RUN] is state
