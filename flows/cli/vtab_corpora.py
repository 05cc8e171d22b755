"""Prepares the tasks of VTAB, the paper's other data sets and those of robustness from official files, and lists these files. A task has
the name of its corpus: `vtab-pets` is VTAB's, `pets` the paper's own."""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vitline.data_prep.benchmarks import registry
from vitline.data_prep.config import CorpusConfig, CorpusRecipe, ShardingConfig, Transfer, TransferTaskName, Vtab
from vitline.data_prep.find_corpus import Corpora, corpus_store
from vitline.data_prep.shard_format import MANIFEST_KEY, ShardReader
from vitline.flows import console
from vitline.flows.cli.tables import show_table
from vitline.infra.html.text import cell
from vitline.infra.plain_text import csv_text
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.reference.report import coverage
from vitline.vit.evaluation.tasks import TASK_GROUPS, VTAB_TASKS

_VTAB_NAMES = {task.corpus_name: task.name for task in VTAB_TASKS}
TASK_NAMES: tuple[str, ...] = (*_VTAB_NAMES, *get_args(TransferTaskName))
# Splits of 800 rows then have a hundred row groups, which is enough for the lanes of every protocol. With 256, as in other
# corpora, a row group of these splits would hold three small images.
_SHARDING = ShardingConfig(min_row_groups=100)
_SPLITS = ("train800", "val200", "train", "val", "test")


class TaskState(NamedTuple):
    """The outcome for one task: `prepared`, `was prepared`, `files missing`, `failed`."""

    task: str
    state: str
    detail: str


def known_tasks(names: Sequence[str]) -> Sequence[str]:
    """The named tasks and those of named groups, or all if no name is given. Raises ValueError for an unknown name."""
    named = [task for name in names for task in TASK_GROUPS.get(name, (name,))]
    for name in named:
        if name not in TASK_NAMES:
            hint = f" Did you mean vtab-{name.replace('_', '-')}?" if name in _VTAB_NAMES.values() else ""
            raise ValueError(
                f"{name!r} is not a task that can be prepared from official files.{hint} The available tasks are "
                f"{', '.join(TASK_NAMES)}."
            )
    return named or TASK_NAMES


def data_set_of(task: str) -> str:
    """The data set of a task, which is also the name of its folder."""
    return registry.data_set_of(_VTAB_NAMES.get(task, task))


def data_folder(source: str, task: str) -> Store:
    """The folder with the files of a task's data set: the folder of its name below `source`, or the newest version that TFDS
    prepared in it; if there is no such folder, `source` itself."""
    top = open_store(source)
    own = top.child(data_set_of(task))
    first = next(iter(own.scan()), None)
    if first is None:
        return top
    versions = sorted(key for key in own.list() if key.endswith("/dataset_info.json")) if "/" in first.key else []
    return own.child(versions[-1].rpartition("/")[0]) if versions else own


def task_request(source: str, task: str) -> CorpusConfig:
    """The request for the corpus of a task."""
    path, recipe = data_folder(source, task).uri, CorpusRecipe(duplicates="keep", sharding=_SHARDING)
    form, own = (Vtab, _VTAB_NAMES[task]) if task in _VTAB_NAMES else (Transfer, task)
    return CorpusConfig(name=task, source=form.model_validate({"task": own, "path": path}), recipe=recipe)


def official_files(tasks: Sequence[str] = TASK_NAMES) -> list[dict[str, Any]]:
    """Every official file of these tasks: its folder and name, other names, download page, licence terms, and the tasks that need it."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for task in tasks:
        official, folder = registry.official_files_of(_VTAB_NAMES.get(task, task)), data_set_of(task)
        for file in official.files:
            row = {
                "folder": folder,
                "file": file.name,
                "bytes": file.num_bytes or None,
                "sha256": file.sha256 or None,
                "or": list(file.other_names),
                "from": official.home,
                "terms": official.terms,
                "tasks": [],
            }
            rows.setdefault((folder, file.name), row)["tasks"].append(task)
    return list(rows.values())


def show_files(tasks: Sequence[str], *, as_json: bool) -> None:
    """Prints the official files, one table per data set."""
    rows = official_files(known_tasks(tasks))
    if as_json:
        console.emit({"files": rows})
        return
    for folder in dict.fromkeys(row["folder"] for row in rows):
        own = [row for row in rows if row["folder"] == folder]
        body = [[row["file"], cell(row["bytes"]), "  ".join(row["or"])] for row in own]
        show_table(f"{folder}/", ["file", "bytes", "other names"], body)
        homes = dict.fromkeys((row["from"], row["terms"]) for row in own)
        for home, terms in homes:
            files = [row["file"] for row in own if row["from"] == home]
            console.print_result(f"  {', '.join(files) + ': ' if len(homes) > 1 else ''}{home} ({terms})")
        console.print_result("")
    console.print_result(
        "A folder may instead hold the data set as TensorFlow Datasets has prepared it. vitline does not download these files."
    )


def prepare_tasks(settings: Settings, source: str, tasks: Sequence[str]) -> list[TaskState]:
    """Prepares every task whose files exist, one after another; a failure ends only its own task."""
    from vitline.flows.runs.prepare_corpus import prepare_corpora
    from vitline.flows.runs.services import open_services  # imported here because `vtab files` does not need it

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
            with open_services(settings) as services:
                (corpus,), _, _ = prepare_corpora([request], services)
            states.append(TaskState(task, "prepared", corpus.uri))
        except (ValueError, RuntimeError, OSError) as error:
            states.append(TaskState(task, "failed", str(error)))
    return states


def prepare_and_show(settings: Settings, source: str, tasks: Sequence[str], *, as_json: bool) -> bool:
    """Prepares tasks and prints the outcomes. Returns whether none failed; missing files are no failure."""
    states = prepare_tasks(settings, source, known_tasks(tasks))
    names = [each.task for each in states if "prepared" in each.state]
    if as_json:
        console.emit({"tasks": [state._asdict() for state in states], "coverage": coverage(names)})
    else:
        show_table("", list(TaskState._fields), [list(state) for state in states])
        console.print_result(coverage(names))
    return all(state.state != "failed" for state in states)


def export_splits(settings: Settings, task: str, out: Path) -> dict[str, str | dict[str, str]]:
    """Writes the examples of each split of a prepared task as a gzipped CSV: split, key, and label (several labels separated by
    blanks). A key that a spreadsheet would run as a formula has an apostrophe before it. Returns a digest of each split: sha256
    of its keys in order, without such apostrophes, joined by newlines."""
    corpus, manifest = Corpora(open_store(settings.root)).named(task)
    digests, lines = {}, list[tuple[str, str, str]]()
    for split in (name for name in _SPLITS if name in manifest.splits):
        with ShardReader(corpus, manifest, split) as reader:
            groups = (reader.row_group(i, ["example_id", "labels"]) for i in range(reader.split.num_row_groups))
            rows = [
                (row["example_id"].partition("/")[2], row["labels"]) for group in groups for row in group.to_pylist()
            ]
        lines.extend((split, key, " ".join(map(str, labels))) for key, labels in rows)
        digests[split] = hashlib.sha256("\n".join(key for key, _ in rows).encode()).hexdigest()
    out.write_bytes(gzip.compress(csv_text(["split", "key", "label"], lines).encode(), mtime=0))
    return {"task": task, "corpus": corpus.uri, "file": str(out), "sha256 of keys": digests}
