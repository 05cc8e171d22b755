"""Deletes what no reader can see or wants, once it is old by its own record. A dry run, the default, only lists it.

Kept in any case: whatever an attempt that may live still owns, checkpoints that a run could resume from, and claims, whose
numbers count attempts.
"""

import re
import time
from collections.abc import Iterator
from datetime import datetime

from data_prep.records import WORK
from data_prep.shard_format import MANIFEST_KEY, load_manifest
from flows.ops.reconcile import Inconsistency, utc
from flows.requests.forms import CollectGarbageRequest
from flows.stages.engines import Engines
from flows.stages.heartbeat import PREFIX, beats
from infra.runs.claims import read_claim
from infra.runs.run_state import read_state
from infra.storage import Keys, Store, open_store

DAY_S = 86_400.0
# `vitline ops doctor` names its probes by the time of day, in nanoseconds.
COMMITTED = re.compile(r"^(checkpoints/step-(\d+)-a(\d+))/manifest\.json$")
PROBE = re.compile(r"^doctor/(?:.*-)?(\d{19})(?:-.*)?$")


def collect_garbage(request: CollectGarbageRequest, engines: Engines) -> list[Inconsistency]:
    """What is garbage below the root, a finding for each heap; deleted unless `dry_run`."""
    root, before = open_store(engines.root), time.time() - DAY_S * request.older_than_days
    findings = list(leftovers(root, request))
    for subject, problem, store, keys in heaps(root, request.keep_checkpoints, before):
        what = f"{len(keys)} objects"
        if not request.dry_run:
            for key in keys:
                store.delete(key)
        findings.append(Inconsistency(subject, problem, f"{'would be: ' * request.dry_run}deleted, {what}"))
    return findings


Heap = tuple[str, str, Store, Keys]
"""What it belongs to, why nobody wants it, and the keys, in the order in which they are to go."""


def leftovers(root: Store, request: CollectGarbageRequest) -> Iterator[Inconsistency]:
    """Unfinished writes of killed writers. One that is younger than a day may be at work, whatever was asked for."""
    age_s = max(DAY_S, DAY_S * request.older_than_days)
    found = root.leftovers(age_s) if request.dry_run else root.discard_leftovers(age_s)
    if found:
        action = f"{'would be: ' * request.dry_run}deleted, {len(found)} unfinished writes"
        yield Inconsistency(root.uri, "killed writers have left what no reader sees", action)


def heaps(root: Store, keep_checkpoints: int, before: float) -> Iterator[Heap]:
    yield from checkpoints(root, keep_checkpoints, before)
    yield from preparations(root, before)
    yield from features(root, before)
    probes = [key for key in root.list("doctor/") if (m := PROBE.match(key)) and int(m[1]) / 1e9 < before]
    if probes:
        yield "doctor/", "probes of a doctor that was killed", root, probes
    dead = [f"{PREFIX}{flow_run}.json" for flow_run, heartbeat in beats(root).items() if heartbeat < before]
    if dead:
        yield PREFIX, "signs of life of flow processes that were killed", root, dead


def checkpoints(root: Store, keep: int, before: float) -> Iterator[Heap]:
    """Of runs that finished before then: all but the newest, and what saves that were cut off left."""
    found: dict[str, Keys] = {}
    for key in root.list("runs/"):
        parts = key.split("/")
        if len(parts) > 4 and parts[2] == "checkpoints":
            found.setdefault(parts[1], []).append("/".join(parts[2:]))
    for run_key, keys in found.items():
        run = root.child(f"runs/{run_key}")
        finished_at = rests(run, before)
        if finished_at is None:
            continue
        kept = newest(keys, keep)
        going = [key for key in keys if key.rpartition("/")[0] not in kept]
        if going:
            # Manifests go first, so that no checkpoint is ever half there.
            going.sort(key=lambda key: (not key.endswith("/manifest.json"), key))
            yield f"run {run_key}", f"finished {utc(finished_at)}; newest {len(kept)} checkpoints are kept", run, going


def rests(run: Store, before: float) -> float | None:
    """When the run finished, if that was before then and no attempt has shown life since; else None."""
    state, claim = read_state(run), read_claim(run)
    if state is None or claim is None or state["state"] != "finished" or state["attempt"] != claim.attempt:
        return None
    return state["updated_at"] if max(state["updated_at"], claim.heartbeat) < before else None


def newest(keys: Keys, keep: int) -> set[str]:
    """Prefixes of the newest committed checkpoints, by step, then attempt."""
    found = {m[1]: (int(m[2]), int(m[3])) for key in keys if (m := COMMITTED.match(key))}
    return set(sorted(found, key=found.__getitem__, reverse=True)[:keep])


def preparations(root: Store, before: float) -> Iterator[Heap]:
    """The working files of corpora that were published before then. No reader of a corpus looks at them."""
    keys = root.list("corpora/")
    published = [key for key in keys if key.endswith(f"/{MANIFEST_KEY}") and key.count("/") == 3]
    for manifest in published:
        folder = manifest.removesuffix(MANIFEST_KEY)
        work = [key.removeprefix(folder) for key in keys if key.startswith(f"{folder}{WORK}/")]
        corpus = root.child(folder)
        if not work:
            continue
        made_at = datetime.fromisoformat(load_manifest(corpus).provenance["created_at"]).timestamp()
        if made_at < before:
            yield f"corpus {folder.split('/', 1)[1].rstrip('/')}", f"published {utc(made_at)}", corpus, work


def features(root: Store, before: float) -> Iterator[Heap]:
    """Features of models or corpora that are gone."""
    folders: dict[str, Keys] = {}
    for key in root.list("features/"):
        name, _, inside = key.removeprefix("features/").partition("/")
        folders.setdefault(f"features/{name}", []).append(inside)
    for name, keys in folders.items():
        folder, wholes = root.child(name), [key for key in keys if "/" not in key and key.endswith(".json")]
        made = [folder.read_json(key) for key in wholes]
        if not made or max(split["made_at"] for split in made) >= before:
            continue
        source = made[0]["source"]
        wanted = ((source["model"], "config.json"), (source["corpus"], MANIFEST_KEY))
        gone = next((uri for uri, key in wanted if not open_store(uri).exists(key)), None)
        if gone:
            # What says that they are whole goes first.
            yield name, f"of {gone}, which is gone", folder, [*wholes, *sorted({*keys} - {*wholes})]
