"""What stopping the local stack interrupts, and how it resumes once the stack is up again."""

import json
from pathlib import Path

from vitline.flows import console
from vitline.flows.catalog.lists import list_runs_and_pipelines, without_parts
from vitline.flows.catalog.run_status import RunRow
from vitline.flows.forms.forms import FORMS, ReconcileRequest
from vitline.flows.on_prefect.prefect_runs import PrefectFlowRuns
from vitline.flows.ops.flow_runs import SeenFlowRun
from vitline.flows.ops.reconcile import Finding, reconcile
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import Skipped
from vitline.infra.runs.liveness import WATCH_S
from vitline.infra.settings import Settings

RECORD = "interrupted.json"
"""In the folder of a stack: the ids of the interrupted flow runs."""


def note_interrupted(settings: Settings, directory: Path) -> list[RunRow]:
    """The active runs and pipelines, before the stack stops. Their flow runs are recorded for `end_interrupted`."""
    (directory / RECORD).write_text(json.dumps([run.id for run in at_work_in_prefect(settings)]))
    return without_parts(list_runs_and_pipelines(settings.root))


def end_interrupted(settings: Settings, directory: Path, began: float) -> list[str]:
    """Ends what was still active when the stack went down, before `began` in Unix seconds. Returns the names of the flow runs that
    `vitline flows resume` resumes."""
    record = directory / RECORD
    noted = json.loads(record.read_text()) if record.exists() else []
    left = [run.id for run in at_work_in_prefect(settings) if run.since < began]
    if noted or left or without_parts(list_runs_and_pipelines(settings.root)):
        console.say(f"  work was interrupted; checking for {WATCH_S:.0f} s that none of it is still running")
        with open_services(settings) as services:
            try:
                found = reconcile(ReconcileRequest(), services, PrefectFlowRuns(settings.project), dead_before=began)
            except Skipped as skipped:
                found = [Finding("what was interrupted", "is ended by another reconcile", str(skipped))]
        for finding in found:
            console.say(f"  {finding.subject} {finding.problem}: {finding.action}")
    ended = PrefectFlowRuns(settings.project).find(sorted({*noted, *left})).values()
    record.unlink(missing_ok=True)
    return sorted(run.name for run in ended if run.state not in ("COMPLETED", "CANCELLED", "PAUSED"))


def write_home_now(settings: Settings) -> None:
    """Writes the home page as `reconcile/default` does."""
    from vitline.flows.on_prefect.flows import send_alerts
    from vitline.flows.on_prefect.home.prefect_home import write_home

    with open_services(settings) as services:
        write_home(settings, send_alerts(ReconcileRequest(), services))


def at_work_in_prefect(settings: Settings) -> list[SeenFlowRun]:
    """The outermost flow runs that have a process: not those that are suspended, and not housekeeping."""
    from vitline.flows.on_prefect.home.prefect_home import HOUSEKEEPING

    unfinished = PrefectFlowRuns(settings.project, FORMS.keys() - {*HOUSEKEEPING}).unfinished()
    return [run for run in unfinished if run.parent is None and run.state != "PAUSED"]
