"""What is garbage below a root: objects that no reader needs, once their own record shows that they are old, and journals to merge.

Never garbage: objects of an attempt that may still be alive, checkpoints that a run could resume from (within `unfinished_days`),
published corpora and models (but those of evaluations, where `kept_models_days` says so), what an unfinished evaluation may still
read, and leases, whose numbers count attempts.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import NamedTuple

from vitline.data_prep.progress import PROGRESS_KEY
from vitline.data_prep.records import WORK
from vitline.data_prep.shard_format import MANIFEST_KEY, load_manifest
from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.flows.catalog.stored_configs import JSON
from vitline.flows.to_mlflow import outbox
from vitline.infra.html.text import utc
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.liveness import FLOW_RUNS, read_heartbeats
from vitline.infra.runs.run_state import NO_STATE
from vitline.infra.runs.segments import merge_journal
from vitline.infra.storage import Keys, Store, open_store
from vitline.vit.checkpoints.names import FOLDER as CHECKPOINTS
from vitline.vit.checkpoints.names import MANIFEST, Retention, find_checkpoints, pin_key
from vitline.vit.evaluation.trials import PROGRESS, TrialProgress, task_of
from vitline.vit.published.model_record import CONFIG, PUBLISHING, WEIGHTS, file_key, published_record

FOLDERS = (
    "champions", "leases", "corpora", "doctor", "features", "flow-runs", "mlflow-artifacts", "models", "nights",
    "ops", "pipelines", "reports", "runs", "scores", "sources", "tracking", "trials",
)  # fmt: skip
"""The folders of vitline below a root (docs/design.md, "Store layout"). Other folders are not vitline's."""
# The folder of one publication of a model (`vit/published/README.md`).
_PUBLICATION = re.compile(r"models/([^/]+/[^/]+)/([0-9a-f]{12})/([^/]+)")
# `vitline ops doctor` names its test objects by Unix time in nanoseconds.
PROBE = re.compile(r"^doctor/(?:.*-)?(\d{19})(?:-.*)?$")
Kept = Callable[[str, UnreadableRecord], None]
"""Is called with what is kept because a record of it cannot be read."""


class Ages(NamedTuple):
    """Garbage is only what is older than this, in Unix seconds."""

    finished_before: float
    unfinished_before: float
    """The last sign of life of runs and preparations that never finished."""
    kept_before: float | None = None
    """The publication of models that evaluations have kept; None keeps them all."""


class Garbage(NamedTuple):
    """Garbage that belongs together."""

    subject: str
    """What it belongs to."""
    problem: str
    """Why it is not needed."""
    store: Store
    keys: Keys
    """In the order of deletion."""
    sign_of_life: Callable[[], object] = lambda: None
    """Changes, before something needs the garbage again: it is compared with that of the listing."""
    listed_first: bool = True
    """Whether it is listed before it is deleted; False for what is of no use to anybody."""
    merge: Callable[[], Keys] | None = None
    """Keeps in another object what the keys hold, and returns those to delete. Raises UnreadableRecord where it cannot."""


def find_garbage(root: Store, keep_checkpoints: int, ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """All garbage of a root but the unfinished writes."""
    with RootSnapshot.read(root, ["run"], leases=True, unconfigured=True) as snapshot:
        runs = [*snapshot.runs.values()]
    for unreadable in snapshot.unreadable:
        kept(f"run {unreadable.key}", unreadable.error)
    yield from checkpoints(runs, keep_checkpoints, ages, kept)
    yield from journals(root, runs, ages)
    yield from trials(root, runs, ages, kept)
    yield from preparations(root, ages, kept)
    yield from features(root, ages, kept)
    yield from publications(root, ages, kept)
    yield from kept_models(root, runs, ages, kept)
    probes = [key for key in root.list("doctor/") if (m := PROBE.match(key)) and int(m[1]) / 1e9 < ages.finished_before]
    if probes:
        yield Garbage("doctor/", "test objects of a doctor that was killed", root, probes, listed_first=False)
    ids = read_heartbeats(root, lambda flow_run, unreadable: kept(f"flow run {flow_run}", unreadable))
    dead = [f"{FLOW_RUNS}{flow_run}.json" for flow_run, heartbeat in ids.items() if heartbeat < ages.finished_before]
    if dead:
        yield Garbage(FLOW_RUNS, "heartbeats of flow processes that were killed", root, dead, listed_first=False)


@contextlib.contextmanager
def keeping(kept: Kept, subject: str) -> Iterator[None]:
    """Keeps what cannot be read."""
    try:
        yield
    except UnreadableRecord as unreadable:
        kept(subject, unreadable)


def by_folder(keys: Iterable[str], depth: int) -> dict[str, Keys]:
    """Keys below the folders at a depth, by folder; keys above are left out."""
    folders: dict[str, Keys] = {}
    for key in keys:
        *folder, inside = key.split("/", depth)
        if len(folder) == depth:
            folders.setdefault("/".join(folder), []).append(inside)
    return folders


def checkpoints(runs: Iterable[StoredRun], keep: int, ages: Ages, kept_as: Kept) -> Iterator[Garbage]:
    """Of finished runs all checkpoints but the newest, and those whose save was interrupted; of runs that never finished and
    have long been silent, all. One that is marked as damaged is kept only where too few others are there, a permanent one always, and
    one that a branch needs while that may still begin."""
    runs = list(runs)
    known = {run.key: run for run in runs}
    for run in runs:
        number, problem = keep, ""
        if run.finished_at is not None and run.last_life < ages.finished_before:
            problem = f"finished {utc(run.finished_at)}"
        elif run.finished_at is None and 0.0 < run.last_life < ages.unfinished_before:
            number, state = 0, (run.state or NO_STATE)["state"]
            problem = f"{state}, without a sign of life since {utc(run.last_life)}: the same request would start anew"
        if not problem:
            continue
        idle = idle_pins(run, known, ages)
        needed = [key for key in run.checkpoints if key not in idle]
        kept, found = Retention(number).kept(needed), find_checkpoints(run.checkpoints)
        unknown, permanent = found.unknown, {name.prefix for name in found.permanent}
        pinned = {name.prefix for names in find_checkpoints(needed).pins.values() for name in names} & kept
        for prefix in unknown:
            why = "has a name that this version of vitline does not give. Use the version that wrote it."
            kept_as(f"run {run.key}", UnreadableRecord(f"{run.store.uri_of(prefix)} {why}"))
        garbage = [key for key in run.checkpoints if key.rpartition("/")[0] not in {*kept, *unknown}]
        if garbage:
            # Manifests are deleted first, so that no reader ever sees half a checkpoint.
            garbage.sort(key=lambda key: (not key.endswith("/manifest.json"), key))
            newest = len(kept - permanent - pinned)
            problem += f"; newest {newest} checkpoints are kept" if run.finished_at is not None else ""
            problem += f"; {len(permanent)} permanent checkpoints are kept" if permanent else ""
            problem += f"; {len(pinned)} checkpoints are kept for branches" if pinned else ""
            yield Garbage(f"run {run.key}", problem, run.store, garbage, partial(_life_and_pins, run))


def _life_and_pins(run: StoredRun) -> object:
    """Changes also when a branch pins a checkpoint."""
    pins = sorted(find_checkpoints(run.store.list("checkpoints/")).pins)
    return [run.life(), pins] if pins else run.life()


def idle_pins(run: StoredRun, runs: Mapping[str, StoredRun], ages: Ages) -> set[str]:
    """The marks of branches that need the checkpoint no longer: they have finished, or showed no life since `unfinished_before`. A
    branch takes its mark away itself once it has checkpoints of its own to resume from and to go back to. A mark that cannot be
    read is none of them."""
    idle = set[str]()
    for key, names in find_checkpoints(run.checkpoints).pins.items():
        branch = runs.get(key)
        for mark in (pin_key(name, key) for name in names):
            try:
                with reading(run.store.uri_of(mark)):
                    pinned_at = float((run.store.read_json_or_none(mark) or {"at": 0.0})["at"])
            except UnreadableRecord:
                continue
            silent = max(pinned_at, branch.last_life if branch else 0.0) < ages.unfinished_before
            if silent or (branch is not None and branch.finished_at is not None):
                idle.add(mark)
    return idle


def journals(root: Store, runs: Iterable[StoredRun], ages: Ages) -> Iterator[Garbage]:
    """The sealed segments of runs that finished before then, or never finished and have long been silent, and of which MLflow
    lacks nothing: they are merged into one object, from which everybody reads the same records. So nobody needs to object."""
    unsent = {entry.key for entry in outbox.listed(root) if entry.kind == "run"}
    for run in runs:
        finished = run.finished_at is not None
        before = ages.finished_before if finished else ages.unfinished_before
        if len(run.journal) > 1 and run.key not in unsent and 0.0 < run.last_life < before:
            problem = (
                f"{'finished' if finished else 'silent since'} {utc(run.last_life)}: its journal becomes one object"
            )
            merge = partial(_merged, run.store)
            yield Garbage(f"journal of {run.key}", problem, run.store, run.journal, run.life, False, merge)


def _merged(run: Store) -> Keys:
    try:
        return merge_journal(run)
    except ValueError as unreadable:
        raise UnreadableRecord(str(unreadable)) from unreadable


def trials(root: Store, runs: Sequence[StoredRun], ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """The trials on validation of evaluations that finished before then: their score records hold what they found. Also
    files beside a final trial that its result does not name, and checkpoints of trials that were given up. Final trials stay, and all
    of tasks that an evaluation is at."""
    there: dict[str, Keys] = {}
    for key in root.list("trials/"):
        there.setdefault(key.split("/")[1].removesuffix(".json"), []).append(key)
    in_use = tasks_in_use(runs, ages, kept) if there else None
    if in_use is None:
        return
    claimed = set[str]()
    for run in runs:
        finished_at, scores = run.finished_at, (run.state or NO_STATE).get("scores", [])
        if finished_at is None or run.last_life >= ages.finished_before:
            continue
        with keeping(kept, f"run {run.key}"):
            with reading(run.store.uri_of("state.json")):
                of_scores = [
                    garbage_of(root, there, score["trials"]) for score in scores if score["task"] not in in_use
                ]
            keys = [key for key in dict.fromkeys(chain(*of_scores)) if key not in claimed]
            claimed |= {*keys}
            if keys:
                problem = f"finished {utc(finished_at)}; its score records hold what its trials on validation found"
                yield Garbage(f"trials of {run.key}", problem, root, keys, run.life)
    yield from given_up_trials(root, there, claimed, in_use, ages, kept)


def given_up_trials(
    root: Store, there: Mapping[str, Keys], claimed: set[str], in_use: set[str], ages: Ages, kept: Kept
) -> Iterator[Garbage]:
    """Checkpoints of trials that have come to no end, of tasks that no evaluation is at."""
    for name, keys in there.items():
        progress = f"trials/{name}/{PROGRESS}"
        if progress not in keys or progress in claimed or task_of(name) in in_use:
            continue
        with keeping(kept, f"trial {name}"):
            noted = TrialProgress.load_or_none(root, progress)
            if noted is not None and 0.0 < noted.saved_at < ages.unfinished_before:
                checkpoints = [key for key in keys if key.startswith(f"trials/{name}/{CHECKPOINTS}")]
                # First what makes a checkpoint visible; last what the next collection sees.
                garbage = [*sorted(checkpoints, key=lambda key: not key.endswith(MANIFEST)), progress]
                problem = f"it came to no end; its last checkpoint is of {utc(noted.saved_at)}"
                yield Garbage(f"trial {name}", problem, root, garbage, partial(root.read_json_or_none, progress))


def garbage_of(root: Store, there: Mapping[str, Keys], names: Sequence[str]) -> Keys:
    """The keys that the trials of one score record leave; the final trial is the last of `names`. `there`: keys by trial."""
    if not names:
        return []
    *others, final = names
    result = root.read_json_or_none(f"trials/{final}.json")
    if result is None:
        return []
    wanted = {f"trials/{final}.json", *(f"trials/{key}" for key in result.get("files", ()))}
    return [key for name in others for key in there.get(name, [])] + [
        key for key in there.get(final, []) if key not in wanted
    ]


def tasks_in_use(runs: Iterable[StoredRun], ages: Ages, kept: Kept) -> set[str] | None:
    """The tasks of evaluations that are not finished and showed life since `unfinished_before`; None if they are not known."""
    return named_in_use(runs, ages, kept, lambda config: (task["name"] for task in config.get("tasks", ())))


def named_in_use(
    runs: Iterable[StoredRun], ages: Ages, kept: Kept, names: Callable[[JSON], Iterable[str]]
) -> set[str] | None:
    """What the configs of runs that are not finished and showed life since `unfinished_before` name; None if it is not known."""
    found = set[str]()
    for run in runs:
        if run.finished_at is not None or 0.0 < run.last_life < ages.unfinished_before:
            continue
        try:
            with reading(run.store.uri_of("config.json")):
                found |= {*names(run.store.read_json_or_none("config.json") or {})}
        except UnreadableRecord as unreadable:
            kept(f"run {run.key}", unreadable)
            return None
    return found


def preparations(root: Store, ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """The work files of corpora that were published before then: no reader of a corpus needs them. And everything, spill and
    shards too, of preparations that never published their corpus and have long been silent."""
    for folder, keys in by_folder(root.list("corpora/"), 3).items():
        corpus, published = root.child(folder), MANIFEST_KEY in keys
        work = [key for key in keys if key.startswith(f"{WORK}/")]
        if not work or not (published or PROGRESS_KEY in work):
            continue
        subject = f"corpus {folder.split('/', 1)[1]}"
        with keeping(kept, subject):
            at = published_at(corpus) if published else stage_began(corpus)
            if published and at < ages.finished_before:
                yield Garbage(subject, f"published {utc(at)}", corpus, work)
            elif not published and 0.0 < at < ages.unfinished_before:
                problem = f"its preparation came to no end; its last stage began {utc(at)}"
                yield Garbage(subject, problem, corpus, sorted(keys, key=_restart_first), partial(_progress, corpus))


def published_at(corpus: Store) -> float:
    with reading(corpus.uri_of(MANIFEST_KEY)):
        return datetime.fromisoformat(load_manifest(corpus).provenance["created_at"]).timestamp()


def stage_began(corpus: Store) -> float:
    """When the last stage of a preparation began; 0 where its progress does not say."""
    with reading(corpus.uri_of(PROGRESS_KEY)):
        return float(corpus.read_json(PROGRESS_KEY).get("started_at", 0.0))


def _progress(corpus: Store) -> object:
    """Changes while a preparation is at work, and once it has published."""
    return corpus.exists(MANIFEST_KEY), corpus.read_json_or_none(PROGRESS_KEY)


def _restart_first(key: str) -> tuple[int, str]:
    """First the keys by which a restart sees finished work; last those by which the next collection sees garbage."""
    name = key.rpartition("/")[2]
    rank = 0 if name == "listing.json" else 1 if name.startswith("records-") else 3 if key == PROGRESS_KEY else 2
    return rank, key


def features(root: Store, ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """Features of models or corpora that were deleted."""
    for name, keys in by_folder(root.list("features/"), 2).items():
        folder, complete = root.child(name), [key for key in keys if "/" not in key and key.endswith(".json")]
        with keeping(kept, name):
            with reading(folder.uri):
                made = [folder.read_json(key) for key in complete]
                if not made or max(split["made_at"] for split in made) >= ages.finished_before:
                    continue
                source = made[0]["source"]
                inputs = ((source["model"], "config.json"), (source["corpus"], MANIFEST_KEY))
            if deleted := next((uri for uri, key in inputs if not open_store(uri).exists(key)), None):
                # The files that mark the features as complete are deleted first.
                garbage = [*complete, *sorted({*keys} - {*complete})]
                yield Garbage(name, f"features of {deleted}, which was deleted", folder, garbage)


def publications(root: Store, ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """Weights of publications that were begun before then and never committed, where their run has been silent since. Of a
    committed one, what its killed writer left beside it. What has no marker stays."""
    models: dict[str, dict[str, Keys]] = {}
    there = dict.fromkeys(root.list("models/"))
    for match in filter(None, map(_PUBLICATION.fullmatch, there)):
        models.setdefault(match[1], {}).setdefault(match[2], []).append(match[3])
    for model, folders in models.items():
        marked = any(PUBLISHING in names for names in folders.values())
        if len(folders) == 1 and not marked and f"models/{model}/{CONFIG}" in there:
            continue  # what nearly every model is: no record needs to be read
        for folder, names in folders.items():
            with keeping(kept, f"model {model}/{folder}"):
                if (item := publication(root, model, folder, names, ages)) is not None:
                    yield item


def publication(root: Store, model: str, folder: str, names: Sequence[str], ages: Ages) -> Garbage | None:
    """What is garbage in one folder of a model. Raises UnreadableRecord where that cannot be known."""
    place, subject = root.child(f"models/{model}"), f"model {model}/{folder}"
    committed = named_weights(place) == f"{folder}/{WEIGHTS}"
    if PUBLISHING not in names:
        if committed:
            return None
        why = "are named by no config.json, and no publishing.json says since when. Delete the folder if no other vitline writes it."
        raise UnreadableRecord(f"The weights in {place.uri_of(folder)} {why}")
    with reading(place.uri_of(f"{folder}/{PUBLISHING}")):
        mark = place.read_json(f"{folder}/{PUBLISHING}")
        begun, run_key = float(mark["at"]), mark.get("run_key")
        lease = read_lease(root.child(f"runs/{run_key}")) if run_key else None
    if max(begun, lease.heartbeat if lease else 0.0) >= ages.finished_before:
        return None
    problem = f"its publication was begun {utc(begun)} and never committed"
    # The marker goes last: by it the next collection knows that the rest is garbage.
    garbage = [f"{folder}/{name}" for name in [*(name for name in names if name != PUBLISHING), PUBLISHING]]
    if committed:
        problem, garbage = "its writer was killed right after the commit", garbage[-1:]
    return Garbage(subject, problem, place, garbage, partial(publication_life, root, place, folder, run_key))


def kept_models(root: Store, runs: Iterable[StoredRun], ages: Ages, kept: Kept) -> Iterator[Garbage]:
    """Models that final trials of evaluations published before `kept_before`, and that no unfinished run reads."""
    if ages.kept_before is None:
        return
    in_use = named_in_use(runs, ages, kept, models_named)
    if in_use is None:
        return
    for folder, keys in by_folder(root.list("models/"), 3).items():
        model, subject = root.child(folder), folder.replace("models/", "model ")
        if CONFIG not in keys or model.uri in in_use:
            continue
        with keeping(kept, subject):
            with reading(model.uri_of(CONFIG)):
                record = model.read_json(CONFIG)
                trial, published = record["provenance"].get("trial"), float(record["created_at"])
            if trial is not None and published < ages.kept_before:
                # Its record goes last: by it the next collection knows that the rest is garbage.
                garbage = [*(key for key in keys if key != CONFIG), CONFIG]
                yield Garbage(subject, f"the network of trial {trial}, published {utc(published)}", model, garbage)


def models_named(config: JSON) -> Iterator[str]:
    """URIs of the models that a run with this config reads."""
    training = config.get("config", {})
    named = (*config.get("models", ()), config.get("model"), training.get("init_model"))
    return (uri.rstrip("/") for uri in named if uri)


def named_weights(model: Store) -> str | None:
    """Key of the weights that the `config.json` of a model names; None if there is none."""
    with reading(model.uri_of(CONFIG)):
        return file_key(published_record(model), WEIGHTS) if model.exists(CONFIG) else None


def publication_life(root: Store, model: Store, folder: str, run_key: str | None) -> object:
    """Changes when a publication begins anew or is committed, and while its run lives."""
    lease = read_lease(root.child(f"runs/{run_key}")) if run_key else None
    mark = model.read_json_or_none(f"{folder}/{PUBLISHING}")
    return named_weights(model), mark, lease and [lease.attempt, lease.counter]
