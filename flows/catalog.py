"""What lies below a root: corpora, runs, models, as plain dicts for tables and `--json`. Reads small files only."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.find_corpus import prepared_corpora
from data_prep.shard_format import MANIFEST_KEY, Manifest, load_class_names, load_manifest
from flows import console
from flows.records import PipelineRecord, list_run_keys
from flows.run_standing import AT_WORK, PROGRESS, attempts_of, standing
from infra.names import there_are
from infra.runs.journal import read_journal
from infra.runs.run_state import read_state
from infra.settings import Settings
from infra.storage import Store, open_store
from vit.model_names import find_published, is_location

if TYPE_CHECKING:
    from data_prep.corpus_stats import CorpusStats

Row = dict[str, Any]


def list_corpora(root: str) -> list[Row]:
    """Every finished corpus: name, version, digest, images, classes, splits, bytes, URI; of a view what it is of."""
    rows = []
    for corpus, manifest in prepared_corpora(open_store(root)):
        rows.append(
            {
                "name": manifest.name,
                "version": manifest.version,
                "digest": manifest.digest,
                "images": manifest.counts.num_accepted,
                "refused": manifest.counts.num_refused,
                "classes": manifest.num_classes,
                "bytes": manifest.counts.num_bytes,
                "splits": {name: split.num_rows for name, split in manifest.splits.items()},
                "segments": num_segments(manifest),
                "view_of": manifest.provenance.get("view_of"),
                "made_of": made_of(manifest),
                "uri": corpus.uri,
            }
        )
    return rows


def num_segments(manifest: Manifest) -> int:
    """How often images were put into the corpus: once, and for every addition."""
    return len({segment.name for split in manifest.splits.values() for segment in split.segments})


def made_of(manifest: Manifest) -> str:
    """A view or an addition as people read it; nothing of a corpus that stands by itself."""
    if view := manifest.provenance.get("view_of"):
        return f"first {view['take']:,} of {view['split']} of {view['version']}"
    if added := manifest.provenance.get("added_to"):
        return f"{added['version']} and segment {num_segments(manifest)}"
    return ""


def find_corpus(root: str, name: str) -> Store:
    """The corpus `NAME`, `NAME/VERSION` or a URI; of several versions the newest by its own record, views left out:
    those are named by their versions.

    Raises ValueError that lists the corpora there are.
    """
    if is_location(name):
        store = open_store(os.path.expanduser(name))
        if not store.exists(MANIFEST_KEY):
            raise ValueError(
                f"There is no corpus at {store.uri}: {MANIFEST_KEY} is absent. `vitline data prep` makes one."
            )
        return store
    every = prepared_corpora(open_store(root))
    for corpus, manifest in reversed(every):
        of_that_name = name == manifest.name and "view_of" not in manifest.provenance
        if of_that_name or name == f"{manifest.name}/{manifest.version}":
            return corpus
    known = there_are(name, {manifest.name for _, manifest in every})
    raise ValueError(f"There is no corpus {name!r} below {root}; {known} `vitline data prep` makes one.")


def show_corpus(corpus: Store) -> Row:
    """The manifest with class names."""
    manifest = load_manifest(corpus)
    return {
        "uri": corpus.uri,
        **manifest.model_dump(mode="json"),
        "made_of": made_of(manifest),
        "segments": num_segments(manifest),
        "classes": load_class_names(corpus),
    }


def segment_text(segment: Row) -> str:
    """A segment of a manifest as people read it: `train/s000, 50 rows in 3 shards`."""
    told = f"{segment['split']}/{segment['name']}, {segment['num_rows']:,} rows in {segment['num_shards']:,} shards"
    if segment["rows_left_out"]:
        told += f", whose last {segment['rows_left_out']:,} rows are left out"
    return told + (f", of version {segment['version']}" if segment["version"] else "")


class FoundStats(NamedTuple):
    """The statistics of a corpus; of a view those of the corpus that it shows a part of, which `of` names."""

    stats: "CorpusStats"
    of: str


def corpus_stats(corpus: Store) -> FoundStats | None:
    """What stats.json says; None for a corpus of before there was one."""
    from data_prep.corpus_stats import STATS_KEY, CorpusStats  # a heavy room, and most ask for names only

    manifest = load_manifest(corpus)
    while view := manifest.provenance.get("view_of"):
        corpus = open_store(f"{corpus.uri.rpartition('/')[0]}/{view['version']}")
        manifest = load_manifest(corpus)
    try:
        found = corpus.read_json(STATS_KEY)
    except FileNotFoundError:
        return None
    return FoundStats(CorpusStats.from_json(found), f"{manifest.name}/{manifest.version}")


def list_pipelines(root: str) -> list[PipelineRecord]:
    """Every pipeline, newest first."""
    store = open_store(root)
    keys = [key for key in store.list("pipelines/") if key.endswith(".json") and key.count("/") == 1]
    records = [PipelineRecord.model_validate(store.read_json(key)) for key in keys]
    return sorted(records, key=lambda record: record.started_at, reverse=True)


def list_runs(root: str) -> list[Row]:
    """Every run, newest first: key, stage, state, step, what it does now, scores, URI."""
    store = open_store(root)
    keys: dict[str, list[str]] = {}
    for key in store.list("runs/"):
        keys.setdefault(key.split("/")[1], []).append(key)
    rows = [
        run_row(store, store.child(f"runs/{run}"), attempts_of(found))
        for run, found in keys.items()
        if f"runs/{run}/config.json" in found
    ]
    return sorted(rows, key=newest_first)


def list_work(root: str) -> list[Row]:
    """Every run and every pipeline, such as a night: what is at work first, then from new to old. What a pipeline does now
    is what its part does."""
    rows = list_runs(root)
    for record in list_pipelines(root):
        row = pipeline_row(open_store(root), record)
        parts = [part for part in rows if part["pipeline"] == record.key and part["state"] in AT_WORK]
        if row["state"] == "running" and parts:
            row |= {name: parts[0][name] for name in PROGRESS if name in parts[0]}
            row |= {"part": parts[0]["stage"], "at_work": parts[0]["run"]}
        rows.append(row)
    return sorted(rows, key=newest_first)


def newest_first(row: Row) -> tuple[bool, float]:
    return row["state"] not in AT_WORK, -(row["updated_at"] or 0)


def pipeline_row(root: Store, record: PipelineRecord) -> Row:
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


def run_row(root: Store, run: Store, attempts: int) -> Row:
    config, state = run.read_json("config.json"), read_state(run)
    training, said = config.get("config"), state or {}
    now = standing(root, run, config, state, attempts)
    # One that has ended is of no pipeline that is at work.
    submitted = run.read_json(f"attempts/a{attempts}.json") if now["state"] in AT_WORK and attempts else {}
    return {
        "run": config["run_key"],
        "stage": training["stage"] if training else "prepare" if "requests" in config else "evaluate",
        "step": None,
        **now,
        "val_top1": said.get("val_top1"),
        "reason": said.get("reason"),
        "model": said.get("model"),
        "updated_at": submitted.get("started_at") if now["state"] == "waiting" else said.get("updated_at"),
        "pipeline": submitted.get("origin", {}).get("pipeline"),
        "uri": run.uri,
    }


def find_run(root: str, key: str) -> Store:
    """A run by key or by the start of it. Raises ValueError for none and for several."""
    keys = [run for run in list_run_keys(open_store(root)) if run.startswith(key)]
    exact = [k for k in keys if k == key] or keys
    if len(exact) != 1:
        what = f"matches {', '.join(exact)}" if exact else f"is no run below {root}; `vitline runs ls` lists them"
        raise ValueError(f"{key!r} {what}.")
    return open_store(root).child(f"runs/{exact[0]}")


def show_run(root: str, run: Store) -> Row:
    """Config, how it stands and the last value of every metric."""
    last: dict[str, float] = {}
    for record in read_journal(run):
        last[record.key] = record.value
    row = run_row(open_store(root), run, attempts_of(run.list("attempts/")))
    return {**row, "config": run.read_json("config.json"), "metrics": last}


def show_work(root: str, key: str) -> Row:
    """A run or a pipeline, by key or by the start of it. Raises ValueError for none and for several."""
    pipelines = [record for record in list_pipelines(root) if record.key.startswith(key)]
    if len(pipelines) != 1 or key in list_run_keys(open_store(root)):
        return show_run(root, find_run(root, key))
    record = pipelines[0]
    row = next(row for row in list_work(root) if row["run"] == record.key and row["stage"] == "pipeline")
    return {**row, **record.model_dump(mode="json", exclude={"schema_version", "key"})}


def list_models(root: str) -> list[Row]:
    """Every published model, each name's versions from old to new: name, version, digest, classes, where it came from, URI."""
    store = open_store(root)
    rows = []
    for key in store.list("models/"):
        if key.endswith("/config.json") and key.count("/") == 3:
            config, (_, name, version, _) = store.read_json(key), key.split("/")
            rows.append(
                {
                    "name": name,
                    "version": version,
                    "digest": config["digest"],
                    "classes": config["num_classes"],
                    "image_size_px": config["model"]["image_size_px"],
                    "run": config["provenance"].get("run_key"),
                    "created_at": config.get("created_at"),
                    "uri": store.uri_of(key.removesuffix("/config.json")),
                }
            )
    return sorted(rows, key=lambda row: (row["name"], row["created_at"] or 0.0, row["version"]))


def find_model(root: str, name: str, say: Callable[[str], None] = console.say) -> str:
    """URI of the model `NAME`, `NAME/VERSION`, `NAME@ALIAS` of MLflow's registry, or a URI. Of several versions the newest,
    which is said. Raises ValueError that lists the models there are."""
    if is_location(name):
        store = open_store(os.path.expanduser(name))
        if not store.exists("config.json"):
            raise ValueError(f"There is no published model at {store.uri}. `vitline model ls` lists those there are.")
        return store.uri
    if "@" in name:
        return aliased_model(root, name, say)
    uri = find_published(root, name)
    taken = "/".join(uri.split("/")[-2:])
    others = [f"{name}/{row['version']}" for row in list_models(root) if row["name"] == name]
    if len(others) > 1:
        others.remove(taken)
        say(f"{name} is {taken}, the newest of {len(others) + 1} versions; also: {', '.join(others)}")
    return uri


def aliased_model(root: str, name: str, say: Callable[[str], None]) -> str:
    """URI of the model that carries an alias in MLflow's registry, as `birds@candidate`. Raises ValueError for an alias that
    nobody has set, and where there is no MLflow."""
    model, _, alias = name.partition("@")
    uri = Settings().mlflow_tracking_uri
    if uri is None:
        raise ValueError(f"{name!r} names an alias of MLflow's registry, and MLFLOW_TRACKING_URI is not set.")
    from infra.mlflow.tracking import Tracking  # only here: it imports MLflow

    found = Tracking(uri).aliased(model, alias)
    if found is None:
        known = ", ".join(f"{row['name']}/{row['version']}" for row in list_models(root)) or "none yet"
        raise ValueError(f"MLflow's registry at {uri} has no {name!r}; published below {root} are: {known}.")
    say(f"{name} is {'/'.join(found.rstrip('/').split('/')[-2:])}")
    return find_model(root, found)
