"""What lies below a root: corpora, runs, models, as plain dicts for tables and `--json`. Reads small files only."""

import os
from typing import Any, NamedTuple

from data_prep.corpus_stats import STATS_KEY, CorpusStats
from data_prep.find_corpus import prepared_corpora
from data_prep.shard_format import MANIFEST_KEY, Manifest, load_class_names, load_manifest
from flows.records import PipelineRecord
from infra.journal import read_journal
from infra.run_state import read_state
from infra.storage import Store, open_store

Row = dict[str, Any]


def is_location(name: str) -> bool:
    """Whether a corpus or model is given as a path or URI rather than by its name."""
    return "://" in name or name.startswith(("/", "./", "../", "~"))


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
    known = ", ".join(sorted({manifest.name for _, manifest in every})) or "none yet"
    raise ValueError(f"There is no corpus {name!r} below {root}; there are: {known}. `vitline data prep` makes one.")


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


def told_segment(segment: Row) -> str:
    """A segment of a manifest as people read it: `train/s000, 50 rows in 3 shards`."""
    told = f"{segment['split']}/{segment['name']}, {segment['num_rows']:,} rows in {segment['num_shards']:,} shards"
    if segment["rows_left_out"]:
        told += f", whose last {segment['rows_left_out']:,} rows are left out"
    return told + (f", of version {segment['version']}" if segment["version"] else "")


class FoundStats(NamedTuple):
    """The statistics of a corpus; of a view those of the corpus that it shows a part of, which `of` names."""

    stats: CorpusStats
    of: str


def corpus_stats(corpus: Store) -> FoundStats | None:
    """What stats.json says; None for a corpus of before there was one."""
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
    """Every run, newest first: key, stage, state, step, loss or scores, URI."""
    store = open_store(root)
    rows = []
    for key in store.list("runs/"):
        if key.endswith("/config.json") and key.count("/") == 2:
            rows.append(run_row(store.child(key.removesuffix("/config.json"))))
    return sorted(rows, key=lambda row: row["updated_at"] or 0, reverse=True)


def run_row(run: Store) -> Row:
    config, state = run.read_json("config.json"), read_state(run) or {}
    training = config.get("config")
    return {
        "run": config["run_key"],
        "stage": training["stage"] if training else "prepare" if "requests" in config else "evaluate",
        "state": state.get("state", "not started"),
        "attempt": state.get("attempt"),
        "step": state.get("step"),
        "val_top1": state.get("val_top1"),
        "reason": state.get("reason"),
        "model": state.get("model"),
        "updated_at": state.get("updated_at"),
        "uri": run.uri,
    }


def find_run(root: str, key: str) -> Store:
    """A run by key or by the start of it. Raises ValueError for none and for several."""
    keys = [row["run"] for row in list_runs(root) if row["run"].startswith(key)]
    exact = [k for k in keys if k == key] or keys
    if len(exact) != 1:
        what = f"matches {', '.join(exact)}" if exact else f"is no run below {root}; `vitline runs ls` lists them"
        raise ValueError(f"{key!r} {what}.")
    return open_store(root).child(f"runs/{exact[0]}")


def show_run(run: Store) -> Row:
    """Config, state and the last value of every metric."""
    last: dict[str, float] = {}
    for record in read_journal(run):
        last[record.key] = record.value
    return {**run_row(run), "config": run.read_json("config.json"), "metrics": last}


def list_models(root: str) -> list[Row]:
    """Every published model: name, version, digest, classes, where it came from, URI."""
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
                    "uri": store.uri_of(key.removesuffix("/config.json")),
                }
            )
    return rows


def find_model(root: str, name: str) -> str:
    """URI of the model `NAME`, `NAME/VERSION` or a URI. Raises ValueError that lists the models there are."""
    if is_location(name):
        store = open_store(os.path.expanduser(name))
        if not store.exists("config.json"):
            raise ValueError(f"There is no published model at {store.uri}. `vitline model ls` lists those there are.")
        return store.uri
    found = [row for row in list_models(root) if name in (row["name"], f"{row['name']}/{row['version']}")]
    if len(found) != 1:
        known = ", ".join(f"{row['name']}/{row['version']}" for row in (found or list_models(root))) or "none yet"
        what = "is several models" if found else "is no published model"
        raise ValueError(f"{name!r} {what} below {root}; name one of: {known}.")
    return found[0]["uri"]
