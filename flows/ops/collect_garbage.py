"""Deletes objects that no reader needs, once their own record shows that they are old. A dry run, the default, only lists them.

Never deleted: objects of an attempt that may still be alive, checkpoints that a run could resume from, and claims, whose
numbers count attempts.
"""

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from data_prep.records import WORK
from data_prep.shard_format import MANIFEST_KEY, load_manifest
from flows.console import utc
from flows.ops.reconcile import Inconsistency
from flows.requests.forms import CollectGarbageRequest
from flows.stages.engines import Engines
from flows.stages.heartbeat import PREFIX, beats
from infra.records import UnreadableRecord, reading
from infra.runs.claims import read_claim
from infra.runs.run_state import read_state
from infra.storage import Keys, Store, open_store
from vit.training.checkpoint_names import find_checkpoints, kept_checkpoints

DAY_S = 86_400.0
FOLDERS = (
    "claims", "corpora", "doctor", "features", "flow-runs", "mlflow-artifacts", "models", "ops", "pipelines", "reports", "runs",
    "scores", "sources", "tracking", "trials",
)  # fmt: skip
"""The folders of vitline below a root (docs/design.md, "Store layout"). What lies beside them belongs to others."""
# `vitline ops doctor` names its test objects by Unix time in nanoseconds.
PROBE = re.compile(r"^doctor/(?:.*-)?(\d{19})(?:-.*)?$")


def collect_garbage(request: CollectGarbageRequest, engines: Engines) -> list[Inconsistency]:
    """The garbage below the root, one finding per heap; it is deleted unless `dry_run`."""
    root, before = open_store(engines.root), time.time() - DAY_S * request.older_than_days
    findings = list(leftovers(root, request))

    def kept(subject: str, odd: UnreadableRecord) -> None:
        findings.append(Inconsistency(subject, str(odd), "kept: nothing says that it is garbage"))

    for subject, problem, store, keys in heaps(root, request.keep_checkpoints, before, kept):
        what = f"{len(keys)} objects"
        if not request.dry_run:
            for key in keys:
                store.delete(key)
        findings.append(Inconsistency(subject, problem, f"{'would be: ' * request.dry_run}deleted, {what}"))
    return findings


Heap = tuple[str, str, Store, Keys]
"""What the garbage belongs to, why it is not needed, its store, and its keys in the order of deletion."""


def leftovers(root: Store, request: CollectGarbageRequest) -> Iterator[Inconsistency]:
    """Unfinished writes of killed writers, in vitline's folders: a root may be a bucket that others write to as well.

    A write younger than a day may still be active, so it is kept in any case.
    """
    age_s = max(DAY_S, DAY_S * request.older_than_days)
    stores = [root.child(folder) for folder in FOLDERS]
    found = [store.leftovers(age_s) if request.dry_run else store.discard_leftovers(age_s) for store in stores]
    if number := sum(map(len, found)):
        action = f"{'would be: ' * request.dry_run}deleted, {number} unfinished writes"
        yield Inconsistency(root.uri, "unfinished writes of killed writers", action)


Kept = Callable[[str, UnreadableRecord], None]
"""Is called with what is kept because a record of it cannot be read."""


def heaps(root: Store, keep_checkpoints: int, before: float, kept: Kept) -> Iterator[Heap]:
    yield from checkpoints(root, keep_checkpoints, before, kept)
    yield from preparations(root, before, kept)
    yield from features(root, before, kept)
    probes = [key for key in root.list("doctor/") if (m := PROBE.match(key)) and int(m[1]) / 1e9 < before]
    if probes:
        yield "doctor/", "test objects of a doctor that was killed", root, probes
    ids = beats(root, lambda flow_run, odd: kept(f"flow run {flow_run}", odd))
    dead = [f"{PREFIX}{flow_run}.json" for flow_run, heartbeat in ids.items() if heartbeat < before]
    if dead:
        yield PREFIX, "heartbeats of flow processes that were killed", root, dead


def checkpoints(root: Store, keep: int, before: float, kept_as: Kept) -> Iterator[Heap]:
    """Checkpoints of runs that finished before then: all but the newest, and those whose save was interrupted. One that is
    marked as damaged is kept only where too few others are there."""
    found: dict[str, Keys] = {}
    for key in root.list("runs/"):
        parts = key.split("/")
        if len(parts) > 4 and parts[2] == "checkpoints":
            found.setdefault(parts[1], []).append("/".join(parts[2:]))
    for run_key, keys in found.items():
        run = root.child(f"runs/{run_key}")
        try:
            finished_at = finished_before(run, before)
        except UnreadableRecord as odd:
            kept_as(f"run {run_key}", odd)
            continue
        if finished_at is None:
            continue
        kept, unknown = kept_checkpoints(keys, keep), find_checkpoints(keys).unknown
        for prefix in unknown:
            why = "has a name that this version of vitline does not give. Use the version that wrote it."
            kept_as(f"run {run_key}", UnreadableRecord(f"{run.uri_of(prefix)} {why}"))
        garbage = [key for key in keys if key.rpartition("/")[0] not in {*kept, *unknown}]
        if garbage:
            # Manifests are deleted first, so that no reader ever sees half a checkpoint.
            garbage.sort(key=lambda key: (not key.endswith("/manifest.json"), key))
            problem = f"finished {utc(finished_at)}; newest {len(kept)} checkpoints are kept"
            yield f"run {run_key}", problem, run, garbage


def finished_before(run: Store, before: float) -> float | None:
    """When the run finished, if that was before then and its claim has had no heartbeat since; else None."""
    state, claim = read_state(run), read_claim(run)
    if state is None or claim is None or state["state"] != "finished" or state["attempt"] != claim.attempt:
        return None
    return state["updated_at"] if max(state["updated_at"], claim.heartbeat) < before else None


def preparations(root: Store, before: float, kept: Kept) -> Iterator[Heap]:
    """The work files of corpora that were published before then. No reader of a corpus needs them."""
    keys = root.list("corpora/")
    published = [key for key in keys if key.endswith(f"/{MANIFEST_KEY}") and key.count("/") == 3]
    for manifest in published:
        folder = manifest.removesuffix(MANIFEST_KEY)
        work = [key.removeprefix(folder) for key in keys if key.startswith(f"{folder}{WORK}/")]
        corpus = root.child(folder)
        if not work:
            continue
        subject = f"corpus {folder.split('/', 1)[1].rstrip('/')}"
        try:
            with reading(root.uri_of(manifest)):
                made_at = datetime.fromisoformat(load_manifest(corpus).provenance["created_at"]).timestamp()
        except UnreadableRecord as odd:
            kept(subject, odd)
            continue
        if made_at < before:
            yield subject, f"published {utc(made_at)}", corpus, work


def features(root: Store, before: float, kept: Kept) -> Iterator[Heap]:
    """Features of models or corpora that were deleted."""
    folders: dict[str, Keys] = {}
    for key in root.list("features/"):
        name, _, inside = key.removeprefix("features/").partition("/")
        folders.setdefault(f"features/{name}", []).append(inside)
    for name, keys in folders.items():
        folder, complete = root.child(name), [key for key in keys if "/" not in key and key.endswith(".json")]
        try:
            with reading(folder.uri):
                made = [folder.read_json(key) for key in complete]
                if not made or max(split["made_at"] for split in made) >= before:
                    continue
                source = made[0]["source"]
                inputs = ((source["model"], "config.json"), (source["corpus"], MANIFEST_KEY))
        except UnreadableRecord as odd:
            kept(name, odd)
            continue
        deleted = next((uri for uri, key in inputs if not open_store(uri).exists(key)), None)
        if deleted:
            # The files that mark the features as complete are deleted first.
            yield name, f"features of {deleted}, which was deleted", folder, [*complete, *sorted({*keys} - {*complete})]
