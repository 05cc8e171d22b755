"""Notes in the store of nights that were not run: missed, late, skipped, refused. None is ever compared."""

from collections.abc import Callable, Sequence
from datetime import date

from vitline.flows.nights.judge import not_whole
from vitline.flows.nights.night_record import NightRecord, night_dates, note_night
from vitline.flows.records import Origin
from vitline.infra.redact import cleaned
from vitline.infra.storage import Store


def note_missed(root: Store, name: str, night: date, due_between: Callable[[date], Sequence[date]]) -> list[date]:
    """Notes the nights between the last one on record and this one on which a run was due and nothing started. `due_between`
    gives the dates after a date on which the schedule had one due. A series without a record has missed nothing."""
    known = [day for day in night_dates(root, name) if day < night]
    missed = list(due_between(known[-1])) if known else []
    for day in missed:
        note_night(root, NightRecord(name=name, night=day, outcome="missed", reason="It was due, but nothing started."))
    return missed


def note_not_run(root: Store, name: str, night: date, origin: Origin, error: Exception, *, late: bool) -> None:
    """Notes why a night was not run: `error` is a refusal (ValueError), or says that it was skipped, because it was late or another
    night was still running. A night with a pipeline of its own has a record already, or gets one at its end."""
    reason = cleaned(str(error))[:2000]
    if isinstance(error, ValueError):
        record = NightRecord(
            name=name, night=night, outcome="failed", reason=reason, origin=origin, verdict=not_whole("failed", reason)
        )
    else:
        record = NightRecord(
            name=name, night=night, outcome="late" if late else "skipped", reason=reason, origin=origin
        )
    note_night(root, record)
