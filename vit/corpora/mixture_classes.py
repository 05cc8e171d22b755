"""The classes of a mixture of corpora: which class of the mixture each class of each corpus is. No torch, no images."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitline.infra.config import digest_of
from vitline.infra.html.text import shortened_list
from vitline.infra.names import did_you_mean, known_names_text
from vitline.vit.corpora.class_table import MIXTURE_CLASS, ClassTable, read_class_table
from vitline.vit.input.mapped_labels import LabelMap

NAMES, PREFIXED = "names", "prefixed"
"""The class maps that need no table: classes of one name are one class; every class of every corpus is one of its own."""
_SHOWN = 5


class CorpusClasses(NamedTuple):
    """The classes of one corpus, in the order of its label ids."""

    title: str
    """NAME of the corpus; NAME/VERSION where the mixture has two of that name."""
    names: Sequence[str]
    source_ids: Sequence[str]


@dataclass(frozen=True)
class MixtureClasses:
    """The classes of a mixture, and for every corpus the class of each of its labels."""

    names: tuple[str, ...]
    label_maps: tuple[LabelMap, ...]

    @property
    def digest(self) -> str:
        return digest_of([self.names, self.label_maps])


def mixture_classes(corpora: Sequence[CorpusClasses], class_map: str) -> MixtureClasses:
    """The classes by `class_map`: NAMES, PREFIXED, or the URI of a table with the columns corpus, class, mixture_class.

    Classes have the order of their first mention. Raises ValueError for a table that leaves a class out, names one twice or
    names what does not exist, and where a name does not say which class is meant.
    """
    if class_map == NAMES:
        return _collected([_unique_names(corpus) for corpus in corpora])
    if class_map == PREFIXED:
        return _collected([[f"{each.title}/{name}" for name in _unique_names(each)] for each in corpora])
    table = read_class_table(class_map)
    return _collected(list(_by_table(corpora, table)), [row.mixture_class for row in table.rows])


def _collected(targets: Sequence[Sequence[str]], order: Sequence[str] = ()) -> MixtureClasses:
    """The classes from the name of the target of every label; an empty one is dropped."""
    named = dict.fromkeys([*order, *(name for of_corpus in targets for name in of_corpus)])
    names = [name for name in named if name]
    at = {name: i for i, name in enumerate(names)}
    return MixtureClasses(tuple(names), tuple(tuple(at.get(name) for name in of_corpus) for of_corpus in targets))


def _unique_names(corpus: CorpusClasses) -> Sequence[str]:
    repeated = [name for name, count in Counter(corpus.names).items() if count > 1]
    if repeated:
        ids = [source for name, source in zip(corpus.names, corpus.source_ids, strict=True) if name == repeated[0]]
        raise ValueError(
            f"{corpus.title} has several classes with the name {repeated[0]!r} (source ids {', '.join(ids[:_SHOWN])}), so names do "
            "not say which class is meant. Give a class table that names these classes by their source ids."
        )
    return corpus.names


def _by_table(corpora: Sequence[CorpusClasses], table: ClassTable) -> Iterator[list[str]]:
    """For every corpus, the name of the target of every label."""
    titles = [corpus.title for corpus in corpora]
    for row in table.rows:
        if row.corpus not in titles:
            raise ValueError(
                f"{row.where}: the mixture has no corpus {row.corpus!r}; {known_names_text(row.corpus, titles)}"
            )
    for corpus in corpora:
        label_of, found = _Labels(corpus), dict[int, str]()
        for row in (row for row in table.rows if row.corpus == corpus.title):
            label = label_of.text(row.corpus_class, row.where)
            if label in found:
                raise ValueError(
                    f"{row.where}: class {row.corpus_class!r} of {corpus.title} has a row already. Remove one of them."
                )
            found[label] = row.mixture_class
        missing = [name for label, name in enumerate(corpus.names) if label not in found]
        if missing:
            shown = shortened_list([*map(repr, missing)], _SHOWN)
            raise ValueError(
                f"{table.uri} has no row for {len(missing):,} of the {len(corpus.names):,} classes of {corpus.title}: {shown}. Give "
                f"each a row; one with an empty {MIXTURE_CLASS} drops the class."
            )
        if not any(found.values()):
            raise ValueError(f"{table.uri} drops every class of {corpus.title}. Keep one, or leave the corpus out.")
        yield [found[label] for label in range(len(corpus.names))]


class _Labels:
    """Finds the label of a class by its name or source id."""

    def __init__(self, corpus: CorpusClasses) -> None:
        self._corpus = corpus
        self._by_name: dict[str, list[int]] = {}
        for label, name in enumerate(corpus.names):
            self._by_name.setdefault(name, []).append(label)
        self._by_id: dict[str, int] = {source: label for label, source in enumerate(corpus.source_ids)}

    def text(self, text: str, where: str) -> int:
        """The label of a name or source id. Raises ValueError for none and for several."""
        labels: set[int] = {*self._by_name.get(text, ()), *([self._by_id[text]] if text in self._by_id else [])}
        if len(labels) == 1:
            return labels.pop()
        if labels:
            ids = ", ".join(self._corpus.source_ids[label] for label in sorted(labels)[:_SHOWN])
            raise ValueError(
                f"{where}: {text!r} names {len(labels)} classes of {self._corpus.title}; give the source id of one: {ids}."
            )
        hint = did_you_mean(text, (*self._by_name, *self._by_id))
        raise ValueError(f"{where}: {self._corpus.title} has no class {text!r} by name or source id.{hint}")
