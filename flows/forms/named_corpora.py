"""The corpora that a form names: tasks, `vtab` among them, presets that may have to be prepared, and prepared corpora."""

from collections.abc import Sequence
from typing import NamedTuple

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import Corpora, corpus_version
from vitline.flows.catalog.lists import say_unreadable
from vitline.infra.names import known_names_text
from vitline.infra.storage import is_location, open_store
from vitline.vit.evaluation.tasks import VTAB_TASKS

CorpusChoice = CorpusConfig | str
"""A corpus to prepare, or the URI of a prepared one."""
VTAB = "vtab"
"""In a form's list of tasks: all tasks of VTAB that are prepared."""


class NamedTasks(NamedTuple):
    """The task corpora that a form names."""

    names: tuple[str, ...]
    note: str | None
    """A sentence about the tasks of `vtab` that are not prepared; None if all are, or if `vtab` is not requested."""


def named_tasks(root: str, corpora: Corpora, tasks: Sequence[str]) -> NamedTasks:
    """Each requested task once; `vtab` stands for its tasks that are prepared.

    Raises ValueError if none of them is prepared."""
    if VTAB not in tasks:
        return NamedTasks(tuple(dict.fromkeys(tasks)), None)
    prepared = {each.manifest.name for each in corpora.all(say_unreadable) if each.manifest.view_of is None}
    of_vtab = [task.corpus_name for task in VTAB_TASKS if task.corpus_name in prepared]
    if not of_vtab:
        raise ValueError(f"No task of VTAB is prepared below {root}; `vitline vtab prepare` prepares them.")
    missing = [task.corpus_name for task in VTAB_TASKS if task.corpus_name not in prepared]
    note = (
        f"vtab means {len(of_vtab)} of its {len(VTAB_TASKS)} tasks here; not prepared: {', '.join(missing)}. "
        "`vitline vtab prepare` prepares them."
    )
    names = dict.fromkeys(name for task in tasks for name in (of_vtab if task == VTAB else [task]))
    return NamedTasks(tuple(names), note if missing else None)


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
