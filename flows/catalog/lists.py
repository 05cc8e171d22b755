"""Lists corpora, runs and models below a root, as plain dicts for tables and `--json`. Reads small files only."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.shard_format import (
    Manifest,
    SegmentInfo,
    load_class_names,
    load_manifest,
)
from vitline.flows import console
from vitline.flows.catalog.records import PipelineRecord, list_run_keys
from vitline.flows.catalog.run_status import AT_WORK, PROGRESS, RunRow, WorkDetail, run_status_of
from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.flows.catalog.stored_configs import stage_of
from vitline.infra.names import matching
from vitline.infra.records import UnreadableRecord, read_each, readable, reading
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import NO_STATE
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, is_location, open_store
from vitline.vit.checkpoints.best import best_checkpoint
from vitline.vit.checkpoints.names import checkpoint_steps
from vitline.vit.published.model_names import find_published
from vitline.vit.published.model_record import ModelRecord
from vitline.vit.run.branch import branches_of

if TYPE_CHECKING:
    from vitline.data_prep.plan.corpus_stats import CorpusStats


def say_unreadable(unreadable: UnreadableRecord) -> None:
    """Lists say what they leave out."""
    console.say(f"Left out: {unreadable}")


def list_corpora(root: str, report: Callable[[UnreadableRecord], None] = say_unreadable) -> list[dict[str, Any]]:
    """Every finished corpus: name, version, digest, images, classes, rows of each split, bytes, URI; for a subset also its origin."""

    def row(corpus: Store, manifest: Manifest) -> dict[str, Any]:
        return {
            "name": manifest.name,
            "version": manifest.version,
            "digest": manifest.digest,
            "images": manifest.counts.num_accepted,
            "refused": manifest.counts.num_refused,
            "classes": manifest.num_classes,
            "bytes": manifest.counts.num_bytes,
            "splits": {name: split.num_rows for name, split in manifest.splits.items()},
            "segments": num_segments(manifest),
            "view_of": manifest.view_of,
            "made_of": made_of(manifest),
            "uri": corpus.uri,
        }

    return [row(*found) for found in Corpora(open_store(root)).all(report)]


def num_segments(manifest: Manifest) -> int:
    """How often images were written to the corpus: once, and once for every addition."""
    return len({segment.name for split in manifest.splits.values() for segment in split.segments})


def made_of(manifest: Manifest) -> str:
    """What a subset or an extended corpus was made of; empty for any other corpus."""
    if origin := manifest.view_of:
        return f"first {origin['take']:,} of {origin['split']} of {origin['version']}"
    if added := manifest.added_to:
        return f"{added['version']} and segment {num_segments(manifest)}"
    return ""


def manifest_fields(corpus: Store, manifest: Manifest) -> dict[str, Any]:
    """The manifest of a corpus with its class names."""
    return {
        "uri": corpus.uri,
        **manifest.model_dump(mode="json"),
        "made_of": made_of(manifest),
        "segments": num_segments(manifest),
        "classes": load_class_names(corpus),
    }


def segment_text(segment: SegmentInfo) -> str:
    """A segment of a manifest as text: `train/s000, 50 rows in 3 shards`."""
    text = f"{segment.split}/{segment.name}, {segment.num_rows:,} rows in {segment.num_shards:,} shards"
    if segment.rows_left_out:
        text += f", whose last {segment.rows_left_out:,} rows are left out"
    return text + (f", of version {segment.version}" if segment.version else "")


class FoundStats(NamedTuple):
    """The statistics of a corpus, and the corpus that they describe: for a subset the one it was taken from."""

    stats: "CorpusStats"
    of: str


def corpus_stats(corpus: Store) -> FoundStats:
    """The content of stats.json. Raises RuntimeError if it is missing."""
    from vitline.data_prep.plan.corpus_stats import (  # a heavy import, which most callers do not need
        STATS_KEY,
        CorpusStats,
    )

    manifest = load_manifest(corpus)
    while origin := manifest.view_of:
        corpus = open_store(f"{corpus.uri.rpartition('/')[0]}/{origin['version']}")
        manifest = load_manifest(corpus)
    try:
        stats = CorpusStats.from_json(corpus.read_json(STATS_KEY))
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{corpus.uri} has no {STATS_KEY}. Delete its manifest.json and run `vitline data prepare` again, which writes only what is "
            "missing."
        ) from error
    return FoundStats(stats, f"{manifest.name}/{manifest.version}")


def list_pipelines(root: str) -> list[PipelineRecord]:
    """Every pipeline, newest first."""
    with RootSnapshot.read(open_store(root), ["pipeline"]) as snapshot:
        return pipelines_of(snapshot)


def pipelines_of(snapshot: RootSnapshot) -> list[PipelineRecord]:
    """The pipelines of a snapshot, newest first; it says which it leaves out."""
    for unreadable in snapshot.unreadable:
        if unreadable.kind == "pipeline":
            say_unreadable(unreadable.error)
    records = (pipeline.record for pipeline in snapshot.pipelines.values())
    return sorted(records, key=lambda record: record.started_at, reverse=True)


def list_runs_and_pipelines(root: str) -> list[RunRow]:
    """Every run and pipeline, active ones first, then newest first: key, stage, state, progress, score, URI. The progress of a
    pipeline is that of its active run. A run of which a record cannot be read has the state `unreadable`, and why as its reason."""
    with RootSnapshot.read(open_store(root)) as snapshot:
        runs = run_rows(snapshot)
        rows = list(runs)
        for record in pipelines_of(snapshot):
            row = pipeline_row(snapshot.root, record)
            active = [run for run in runs if run.get("pipeline") == record.key and run["state"] in AT_WORK]
            if row["state"] == "running" and active:
                progress = {name: value for name, value in active[0].items() if name in PROGRESS}
                row = cast(RunRow, {**row, **progress, "part": active[0]["stage"], "at_work": active[0]["run"]})
            rows.append(row)
    return sorted(rows, key=active_then_newest)


def run_rows(snapshot: RootSnapshot) -> list[RunRow]:
    """The runs of a snapshot, active ones first, then newest first."""
    rows = read_each(snapshot.runs.values(), lambda run: run_row_or_why(snapshot.root, run))
    rows += [
        unreadable_row(snapshot.root, unreadable.key, unreadable.error)
        for unreadable in snapshot.unreadable
        if unreadable.kind == "run"
    ]
    return sorted(rows, key=active_then_newest)


def without_parts(rows: Iterable[RunRow]) -> list[RunRow]:
    """Those at work, without the runs of pipelines, whose progress their pipeline has."""
    return [row for row in rows if row["state"] in AT_WORK and not (row.get("pipeline") and row["stage"] != "pipeline")]


def active_then_newest(row: RunRow) -> tuple[bool, float]:
    return row["state"] not in AT_WORK, -(row["updated_at"] or 0)


def pipeline_row(root: Store, record: PipelineRecord) -> RunRow:
    return {
        "run": record.key,
        "stage": "pipeline",
        "state": record.state,
        "val_top1": record.metrics.get("val/top1"),
        "reason": record.reason,
        "model": record.model,
        "started_at": record.started_at,
        "updated_at": record.updated_at,
        "uri": root.uri_of(f"pipelines/{record.key}.json"),
    }


def run_row_or_why(root: Store, run: StoredRun) -> RunRow:
    try:
        with reading(run.store.uri):
            return run_row(root, run)
    except UnreadableRecord as unreadable:
        return unreadable_row(root, run.key, unreadable)


def unreadable_row(root: Store, key: str, unreadable: UnreadableRecord) -> RunRow:
    unknown = dict.fromkeys(("step", "val_top1", "model", "updated_at"))
    known = {"run": key, "stage": "unknown", "state": "unreadable", "reason": str(unreadable)}
    return cast(RunRow, {**unknown, **known, "uri": root.uri_of(f"runs/{key}")})


def run_row(root: Store, run: StoredRun) -> RunRow:
    config, state = run.config(), run.state
    written = state or NO_STATE
    now = run_status_of(root, run, config)
    written_at = state["updated_at"] if state and state["attempt"] >= run.attempts else None
    # Only the pipeline of an active run is needed.
    active = now["state"] in AT_WORK and run.attempts
    submitted = run.records.read_json(f"attempts/a{run.attempts}.json") if active else {}
    row = {
        "run": config["run_key"],
        "stage": stage_of(config),
        "step": None,
        **now,
        "val_top1": written.get("val_top1"),
        "reason": written.get("reason"),
        "model": written.get("model"),
        "updated_at": submitted.get("started_at") if written_at is None else written_at,
        "pipeline": submitted.get("origin", {}).get("pipeline"),
        "uri": run.store.uri,
    }
    return cast(RunRow, row)


def find_run(root: str, key: str) -> Store:
    """The run whose key is, or begins with, `key`. Raises ValueError if there is none or several."""
    found = matching(list_run_keys(open_store(root)), key)
    if not found:
        raise ValueError(f"There is no run {key!r} below {root}; `vitline runs ls` lists them.")
    if len(found) > 1:
        raise ValueError(f"{key!r} matches {', '.join(found)}. Give more characters of the key.")
    return open_store(root).child(f"runs/{found[0]}")


def show_run(root: str, run: Store) -> WorkDetail:
    """State, config and the last value of every metric of a run."""
    last: dict[str, float] = {}
    for record in read_journal(run):
        last[record.key] = record.value
    stored = StoredRun.read(run, run, run.list("attempts/"))
    row, config = run_row(open_store(root), stored), stored.config()
    shown = cast(WorkDetail, {**row, "config": config, "metrics": last})
    if "config" in config:
        shown["checkpoints"] = checkpoint_steps(run)
        if (best := best_checkpoint(run)) is not None:
            shown["best_checkpoint"] = best
        shown["branches"] = [f"{key} at step {step}" for key, step in branches_of(run).items()]
        if "parent" in config["inputs"]:
            shown["branch_of"] = config["inputs"]["parent"]
    return shown


def show_work(root: str, key: str) -> WorkDetail:
    """The run or pipeline whose key is, or begins with, `key`. Raises ValueError if there is none or several."""
    pipelines = {record.key: record for record in list_pipelines(root)}
    found = matching(pipelines, key)
    if len(found) != 1 or key in list_run_keys(open_store(root)):
        return show_run(root, find_run(root, key))
    record = pipelines[found[0]]
    row = next(row for row in list_runs_and_pipelines(root) if row["run"] == record.key and row["stage"] == "pipeline")
    return cast(WorkDetail, {**row, **record.model_dump(mode="json", exclude={"schema_version", "key"})})


def list_models(root: str, report: Callable[[UnreadableRecord], None] = say_unreadable) -> list[dict[str, Any]]:
    """Every published model, the versions of each name from old to new: name, version, digest, classes, key of the training or the
    final trial that made it (None for a converted model), time in Unix seconds, URI."""
    store = open_store(root)

    def row(key: str) -> dict[str, Any]:
        _, name, version, _ = key.split("/")
        with reading(store.uri_of(key)):
            config: ModelRecord = store.read_json(key)
            created_at, made_from = config.get("created_at"), config["provenance"]
            return {
                "name": name,
                "version": version,
                "digest": config["digest"],
                "classes": config["num_classes"],
                "image_size_px": config["model"]["image_size_px"],
                "run": made_from.get("run_key") or made_from.get("trial"),
                "created_at": None if created_at is None else float(created_at),
                "uri": store.uri_of(key.removesuffix("/config.json")),
            }

    keys = [key for key in store.list("models/") if key.endswith("/config.json") and key.count("/") == 3]
    rows = list(readable(keys, row, report))
    return sorted(rows, key=lambda row: (row["name"], row["created_at"] or 0.0, row["version"]))


def find_model(root: str, name: str, say: Callable[[str], None] = console.say) -> str:
    """URI of the model of a `NAME`, `NAME/VERSION`, URI, or `NAME@ALIAS` of MLflow's registry. A `NAME` with several versions
    means the newest; `say` gets a line about that. Raises ValueError that lists the models."""
    if is_location(name):
        store = open_store(name)
        if not store.exists("config.json"):
            raise ValueError(
                f"There is no published model at {store.uri}. `vitline model ls` lists the published models."
            )
        return store.uri
    if "@" in name:
        return aliased_model(root, name, say)
    uri = find_published(root, name)
    taken = "/".join(uri.split("/")[-2:])
    others = [f"{name}/{row['version']}" for row in list_models(root) if row["name"] == name]
    others = [other for other in others if other != taken]
    if others and name != taken:
        say(f"{name} is {taken}, the newest of {len(others) + 1} versions; also: {', '.join(others)}")
    return uri


def aliased_model(root: str, name: str, say: Callable[[str], None]) -> str:
    """URI of the model that has an alias in MLflow's registry, such as `birds@candidate`. Raises ValueError if there is no such
    alias or no MLflow server."""
    model, _, alias = name.partition("@")
    uri = Settings().mlflow_tracking_uri
    if uri is None:
        raise ValueError(f"{name!r} is an alias of MLflow's registry, but MLFLOW_TRACKING_URI is not set. Set it.")
    from vitline.infra.mlflow.tracking import Tracking  # imported here because it imports MLflow

    found = Tracking(uri).aliased(Settings().named(model), alias)
    if found is None:
        known = ", ".join(f"{row['name']}/{row['version']}" for row in list_models(root)) or "none yet"
        raise ValueError(f"MLflow's registry at {uri} has no {name!r}; the models published below {root} are: {known}.")
    say(f"{name} is {'/'.join(found.rstrip('/').split('/')[-2:])}")
    return find_model(root, found)
