"""The Prefect server of the local stack beside many writers."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

RUNS, THREADS = 60, 12


def test_flow_runs_that_are_created_and_changed_at_once_are_never_told_that_the_database_is_locked(flows):
    """Prefect's own server answers 503 to some of these."""
    deployment = flows.api.get("/deployments/name/reconcile/default").raise_for_status().json()["id"]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    scheduled = {"type": "SCHEDULED", "state_details": {"scheduled_time": tomorrow}}

    def create_and_cancel(_):
        created = flows.api.post(f"/deployments/{deployment}/create_flow_run", json={"state": scheduled})
        state = {"type": "CANCELLED", "name": "Cancelled"}
        answer = flows.api.post(f"/flow_runs/{created.json().get('id')}/set_state", json={"state": state})
        return created.json().get("id"), {created.status_code, answer.status_code}, answer.json().get("status")

    with ThreadPoolExecutor(THREADS) as threads:
        answers = list(threads.map(create_and_cancel, range(RUNS)))
    try:
        assert {code for _, codes, _ in answers for code in codes} == {201}
        assert {status for *_, status in answers} == {"ACCEPT"}
    finally:
        for run, *_ in answers:
            if run:
                flows.api.delete(f"/flow_runs/{run}")
