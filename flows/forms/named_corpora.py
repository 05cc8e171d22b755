"""The corpora that a form names: tasks and groups of them, presets that may have to be prepared, and prepared corpora."""

from collections.abc import Sequence
from typing import NamedTuple

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import Corpora, corpus_version
from vitline.flows.catalog.lists import say_unreadable
from vitline.infra.names import known_names_text
from vitline.infra.storage import is_location, open_store
from vitline.vit.evaluation.tasks import TASK_GROUPS

CorpusChoice = CorpusConfig | str
"""A corpus to prepare, or the URI of a prepared one."""


class NamedTasks(NamedTuple):
    """The task corpora that a form names."""

    names: tuple[str, ...]
    note: str | None
    """Sentences about the tasks of requested groups that are not prepared; None if all are, or if no group is requested."""


def named_tasks(root: str, corpora: Corpora, tasks: Sequence[str]) -> NamedTasks:
    """Each requested task once; `vtab` and `robustness` stand for their tasks that are prepared.

    Raises ValueError if none of a group is prepared."""
    groups = [task for task in dict.fromkeys(tasks) if task in TASK_GROUPS]
    if not groups:
        return NamedTasks(tuple(dict.fromkeys(tasks)), None)
    prepared = {each.manifest.name for each in corpora.all(say_unreadable) if each.manifest.view_of is None}
    there, notes = dict[str, list[str]](), []
    for group in groups:
        there[group] = [task for task in TASK_GROUPS[group] if task in prepared]
        if not there[group]:
            raise ValueError(
                f"No task of {group} is prepared below {root}; `vitline vtab prepare --task {group}` prepares them."
            )
        if missing := [task for task in TASK_GROUPS[group] if task not in prepared]:
            notes.append(
                f"{group} means {len(there[group])} of its {len(TASK_GROUPS[group])} tasks here; not prepared: {', '.join(missing)}. "
                f"`vitline vtab prepare --task {group}` prepares them."
            )
    names = dict.fromkeys(name for task in tasks for name in there.get(task, [task]))
    return NamedTasks(tuple(names), " ".join(notes) or None)


def choose_corpus(root: str, corpora: Corpora, name: str) -> CorpusChoice:
    """The preset of this name, else the prepared corpus."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return corpora.named(name).store.uri
    except ValueError as error:
        if is_location(name):
            raise
        known = known_names_text(name, {*PRESETS, *(each.manifest.name for each in corpora.all(say_unreadable))})
        raise ValueError(
            f"There is no corpus {name!r} below {root}; {known} `vitline data prepare` prepares one."
        ) from error


def corpus_identity(root: str, corpora: Corpora, choice: CorpusChoice) -> str:
    """What identifies a corpus in a pipeline's key: the version that will be made, or the digest of a prepared one."""
    if isinstance(choice, CorpusConfig):
        return f"{choice.name}/{corpus_version(open_store(root), choice)}"
    return corpora.at(choice).manifest.digest
