"""Notes in the store of nights that were not run: missed, late, skipped, refused. None is ever compared."""

from collections.abc import Callable, Sequence
from datetime import datetime

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.catalog.records import Origin
from vitline.flows.nights.judge import incomplete
from vitline.flows.nights.night_record import NightRecord, nights_on_record, note_night
from vitline.infra.redact import cleaned
from vitline.infra.storage import Store


def note_missed(
    root: Store, name: str, night: datetime, due_between: Callable[[datetime], Sequence[datetime]]
) -> list[datetime]:
    """Notes the nights between the last known one and this one at which a run was due and nothing started. `due_between` gives the
    moments after a night at which the schedule had one due. A series without a night has missed nothing."""
    begun = [(each.name, each.night) for each in list_pipelines(root.uri) if each.night is not None]
    known = [start for of, start in (*nights_on_record(root), *begun) if of == name and start < night]
    missed = list(due_between(max(known))) if known else []
    for start in missed:
        note_night(
            root, NightRecord(name=name, night=start, outcome="missed", reason="It was due, but nothing started.")
        )
    return missed


def note_not_run(root: Store, name: str, night: datetime, origin: Origin, error: Exception, *, late: bool) -> None:
    """Notes why a night was not run: `error` is a refusal (ValueError), or says that it was skipped, because it was late or another
    night was still running. A night with a pipeline of its own has a record already, or gets one at its end."""
    reason = cleaned(str(error))[:2000]
    if isinstance(error, ValueError):
        record = NightRecord(
            name=name, night=night, outcome="failed", reason=reason, origin=origin, verdict=incomplete("failed", reason)
        )
    else:
        record = NightRecord(
            name=name, night=night, outcome="late" if late else "skipped", reason=reason, origin=origin
        )
    note_night(root, record)
