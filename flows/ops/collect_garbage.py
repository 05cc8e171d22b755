"""Deletes garbage: objects that no reader needs, and flow runs of long ago. A dry run, the default, only lists it.

With `notice_days`, as on schedule, garbage is listed first and deleted by a later collection, `notice_days` or more after, where
neither it nor what it belongs to has changed meanwhile. Until then people see it on the page of the flow run and may object.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from vitline.flows.forms.forms import CollectGarbageRequest
from vitline.flows.ops.garbage import FOLDERS, Ages, Garbage, find_garbage
from vitline.flows.ops.reconcile import Finding
from vitline.flows.runs.services import Services
from vitline.infra.config import digest_of
from vitline.infra.html.text import utc
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.storage import PreconditionFailed, Store, json_bytes, open_store

DAY_S = 86_400.0
NOTICES = "ops/garbage.json"
IDLE_DAYS = 2.0
"""Flow runs of `reconcile` and `collect-garbage` that had nothing to do are kept this long."""


DeleteFlowRuns = Callable[[float, float, bool], Iterable[Finding]]
"""Deletes flow runs in Prefect that ended before the first time, or the second one if they had nothing to do; not in a dry run."""


def collect_garbage(
    request: CollectGarbageRequest, services: Services, delete_flow_runs: DeleteFlowRuns | None = None
) -> list[Finding]:
    """The garbage below the root and in Prefect, one finding per item; it is deleted unless `dry_run`, or announced first.

    Raises RuntimeError where another collection announces garbage at the same time.
    """
    root, now = open_store(services.root), time.time()
    findings = list(leftovers(root, request))

    def kept(subject: str, unreadable: UnreadableRecord) -> None:
        findings.append(Finding(subject, str(unreadable), "kept: nothing says that it is garbage"))

    of_models = None if request.kept_models_days is None else now - DAY_S * request.kept_models_days
    ages = Ages(now - DAY_S * request.older_than_days, now - DAY_S * request.unfinished_days, of_models)
    found = list(find_garbage(root, request.keep_checkpoints, ages, kept))
    signs = {item.subject: signed(item) for item in found}
    since: dict[str, float] = {}
    if request.notice_days and not request.dry_run:
        shown = (item.subject for item in found if item.listed_first and not named(item, request.keep))
        since = announce(root, {subject: signs[subject] for subject in shown}, now)
    for item in found:
        services.observer.check()
        due = since[item.subject] + DAY_S * request.notice_days if item.subject in since else now
        findings.append(Finding(item.subject, item.problem, treat(item, request, due, now, signs[item.subject])))
    ended, idle = (now - DAY_S * days for days in (request.flow_runs_days, min(IDLE_DAYS, request.flow_runs_days)))
    for finding in delete_flow_runs(ended, idle, request.dry_run) if delete_flow_runs else ():
        services.observer.check()
        findings.append(finding)
    return findings


def treat(item: Garbage, request: CollectGarbageRequest, due: float, now: float, sign: str) -> str:
    """Deletes or merges an item, if it is due, and says what was done."""
    what, done = f"{len(item.keys)} objects", "merged" if item.merge else "deleted"
    if named(item, request.keep):
        return "kept: `keep` names it"
    if request.dry_run:
        return f"would be: {done}, {what}"
    if due > now:
        return f"listed; deleted after {utc(due)} if it is still garbage, {what}"
    if signed(item) != sign:
        return "kept: it has changed meanwhile"
    try:
        keys = item.merge() if item.merge else item.keys
    except UnreadableRecord as unreadable:
        return f"kept: {unreadable}"
    except PreconditionFailed:
        return "kept: it has changed meanwhile"
    for key in keys:
        item.store.delete(key)
    return f"{done}, {what}"


def named(item: Garbage, names: Iterable[str]) -> bool:
    """Whether one of the names is the key of what an item belongs to, or how it begins."""
    return any(item.subject.split()[-1].startswith(name) for name in names)


def signed(item: Garbage) -> str:
    """Changes with the keys of an item and with what it belongs to. Equal for a record that cannot be read any more."""
    try:
        return digest_of([item.keys, item.sign_of_life()])
    except UnreadableRecord as unreadable:
        return str(unreadable)


def announce(root: Store, signs: Mapping[str, str], now: float) -> dict[str, float]:
    """Since when each item has been listed without a change. Writes it down for the next collections."""
    data, tag = root.read_tagged_or_none(NOTICES)
    before = listed_before(root, data or b"{}")
    # An item that was listed by a clock that was ahead is listed anew.
    since = {subject: min(before.get((subject, sign), now), now) for subject, sign in signs.items()}
    listed = [{"subject": subject, "sign": signs[subject], "since": at} for subject, at in since.items()]
    content = json_bytes({"schema_version": 1, "written_at": now, "listed": listed})
    try:
        root.create_or_swap(NOTICES, content, tag)
    except PreconditionFailed as error:
        raise RuntimeError(
            f"Another collection has written {root.uri_of(NOTICES)} at the same time. Start this one again when that one has ended."
        ) from error
    return since


def listed_before(root: Store, data: bytes) -> dict[tuple[str, str], float]:
    """When each item, by subject and sign, was first listed. Nothing, where the record cannot be read: all is listed anew."""
    with contextlib.suppress(UnreadableRecord), reading(root.uri_of(NOTICES)):
        listed = json.loads(data).get("listed", [])
        return {(item["subject"], item["sign"]): float(item["since"]) for item in listed}
    return {}


def leftovers(root: Store, request: CollectGarbageRequest) -> Iterator[Finding]:
    """Unfinished writes of killed writers, in vitline's folders: a root may be a bucket that others write to as well.

    A write younger than a day may still be active, so it is kept in any case.
    """
    age_s = max(DAY_S, DAY_S * request.older_than_days)
    stores = [root.child(folder) for folder in FOLDERS]
    found = [store.leftovers(age_s) if request.dry_run else store.discard_leftovers(age_s) for store in stores]
    if number := sum(map(len, found)):
        action = f"{'would be: ' * request.dry_run}deleted, {number} unfinished writes"
        yield Finding(root.uri, "unfinished writes of killed writers", action)
