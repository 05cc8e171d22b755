"""The tasks of VTAB made from official files: what is there, what is missing and where it comes from."""

import csv
import gzip
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from data_prep.config import CorpusConfig, CorpusRecipe, ShardingConfig, Vtab, VtabTaskName
from data_prep.corpora.vtab.vtab_corpus import data_set_of, open_data
from data_prep.find_corpus import corpus_store
from data_prep.shard_format import MANIFEST_KEY, ShardReader, load_manifest
from flows import console
from flows.catalog import find_corpus
from flows.command_line import cell
from flows.engines import engines
from flows.prepare_corpus import prepare_corpora
from infra.settings import Settings
from infra.storage import Store, open_store
from vit.vtab.report import coverage
from vit.vtab.tasks import VTAB_TASKS

TASK_NAMES: tuple[str, ...] = get_args(VtabTaskName)
# Views of 800 rows have a hundred row groups then, which is enough for the lanes of every protocol; with the 256 of other
# corpora the small pictures of large data sets would come three to a row group.
_SHARDING = ShardingConfig(min_row_groups=100)


class TaskState(NamedTuple):
    """What became of one task: `prepared`, `was prepared`, `files missing`, `failed`."""

    task: str
    state: str
    detail: str


def data_folder(source: str, task: str) -> Store:
    """Where the files of a task's data set are: the folder named after it below `source`, in it the newest version that
    TFDS prepared if there is one; else `source` itself."""
    top = open_store(source if "://" in source else str(Path(source).expanduser()))
    own = top.child(data_set_of(task))
    first = next(iter(own.scan()), None)
    if first is None:
        return top
    versions = sorted(key for key in own.list() if key.endswith("/dataset_info.json")) if "/" in first.key else []
    return own.child(versions[-1].rpartition("/")[0]) if versions else own


def task_request(source: str, task: str) -> CorpusConfig:
    """The request for the corpus of a task."""
    name = next(known.corpus_name for known in VTAB_TASKS if known.name == task)
    folder = data_folder(source, task).uri
    recipe = CorpusRecipe(duplicates="keep", sharding=_SHARDING)
    return CorpusConfig(name=name, source=Vtab.model_validate({"task": task, "path": folder}), recipe=recipe)


def official_files(tasks: Sequence[str] = TASK_NAMES) -> list[dict[str, Any]]:
    """Every file of the data sets of these tasks, with size, checksum, home and terms."""
    nowhere = open_store("memory://vtab-files")
    rows = []
    for data_set in dict.fromkeys(map(data_set_of, tasks)):
        task = next(task for task in tasks if data_set_of(task) == data_set)
        official = open_data(task, nowhere, 1).official
        for file in official.files:
            shown = {"file": file.name, "bytes": file.num_bytes or None, "sha256": file.sha256 or None}
            names = {"or": list(file.other_names), "from": official.home, "terms": official.terms}
            rows.append({"folder": data_set, **shown, **names})
    return rows


def show_files(tasks: Sequence[str], *, as_json: bool) -> None:
    """The official files, data set by data set."""
    rows = official_files(tasks)
    if as_json:
        console.emit({"files": rows})
        return
    for folder in dict.fromkeys(row["folder"] for row in rows):
        own = [row for row in rows if row["folder"] == folder]
        body = [[row["file"], cell(row["bytes"]), "  ".join(row["or"])] for row in own]
        console.table(f"{folder}/", ["file", "bytes", "read as well"], body, right=(1,))
        console.tell(f"  {own[0]['from']} ({own[0]['terms']})\n")
    console.tell("A folder may also hold what TensorFlow Datasets has prepared of the data set. Nothing is fetched.")


def prepare_tasks(settings: Settings, source: str, tasks: Sequence[str]) -> list[TaskState]:
    """Prepare every task whose files are there, one after another; a failure ends its own task only."""
    base, states = open_store(settings.root), list[TaskState]()
    for task in tasks:
        try:
            request = task_request(source, task)
            store = corpus_store(base, request)
            if store.exists(MANIFEST_KEY):
                states.append(TaskState(task, "was prepared", store.uri))
                continue
        except ValueError as error:
            states.append(TaskState(task, "files missing", str(error)))
            continue
        console.say(f"{task}: preparing from {request.source.path}")  # type: ignore[union-attr]
        try:
            with engines(settings) as at_hand:
                (corpus,), _, _ = prepare_corpora([request], at_hand)
            states.append(TaskState(task, "prepared", corpus.uri))
        except (ValueError, RuntimeError, OSError) as error:
            states.append(TaskState(task, "failed", str(error)))
    return states


def prepare_and_show(settings: Settings, source: str, tasks: Sequence[str], *, as_json: bool) -> bool:
    """Whether nothing failed; missing files are no failure."""
    unknown = [task for task in tasks if task not in TASK_NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no task of VTAB; they are {', '.join(TASK_NAMES)}.")
    states = prepare_tasks(settings, source, tasks or TASK_NAMES)
    names = [
        task.corpus_name for task in VTAB_TASKS if any(task.name == s.task and "prepared" in s.state for s in states)
    ]
    if as_json:
        console.emit({"tasks": [state._asdict() for state in states], "coverage": coverage(names)})
    else:
        console.table("", list(TaskState._fields), [list(state) for state in states])
        console.tell(coverage(names))
    return all(state.state != "failed" for state in states)


def export_splits(settings: Settings, task: str, out: Path) -> dict[str, Any]:
    """Write which examples a prepared task holds in which split, as a gzipped CSV (split, key, label), and give the digests
    of VTAB-1k's keys: sha256 of the keys of train800 and of val200 in their order, joined by newlines."""
    corpus = find_corpus(settings.root, next((t.corpus_name for t in VTAB_TASKS if t.name == task), task))
    manifest = load_manifest(corpus)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["split", "key", "label"])
    digests = {}
    for split in ("train800", "val200", "train", "val", "test"):
        with ShardReader(corpus, manifest, split) as reader:
            groups = (reader.row_group(i, ["example_id", "label"]) for i in range(reader.split.num_row_groups))
            rows = [
                (row["example_id"].partition("/")[2], row["label"]) for group in groups for row in group.to_pylist()
            ]
        lines.writerows((split, key, label) for key, label in rows)
        digests[split] = hashlib.sha256("\n".join(key for key, _ in rows).encode()).hexdigest()
    out.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    return {"task": task, "corpus": corpus.uri, "file": str(out), "sha256 of keys": digests}
