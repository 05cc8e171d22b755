"""How the corpora of two pipelines differ: examples added, removed and changed; counts, classes, source and recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vitline.data_prep.find_corpus import Corpora, FoundCorpus
from vitline.data_prep.pages.diff_corpora import ChangeKind, diff_examples, rows_apart
from vitline.data_prep.pages.diff_stats import diff_stats
from vitline.data_prep.shard_format import Manifest
from vitline.flows.catalog.lists import say_unreadable
from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.reports.corpus_facts import facts_of
from vitline.infra.html.text import cell
from vitline.infra.storage import Store

MAX_ROWS = 2_000_000
"""Examples of larger differences are not counted here: it would take minutes."""
_WORDS: Mapping[ChangeKind, str] = {
    "added": "added",
    "removed": "removed",
    "relabelled": "with other labels",
    "moved": "in another split",
    "changed_bytes": "with other bytes",
}


CorporaByDigest = Mapping[str, FoundCorpus]


@dataclass(frozen=True)
class CorpusChange:
    """A corpus of one name of which two pipelines have different versions."""

    sentence: str
    rows: Sequence[Sequence[str]]
    """What differs beside the examples: name, first, other."""


def corpora_by_digest(root: Store) -> CorporaByDigest:
    """Every finished corpus below a root."""
    return {each.manifest.digest: each for each in Corpora(root).all(say_unreadable)}


def corpus_changes(known: CorporaByDigest, first: PipelineRecord, other: PipelineRecord) -> Iterator[CorpusChange]:
    """Each corpus that both pipelines have in different versions. One that was deleted since is said to be."""
    for name, digest in other.corpora.items():
        if first.corpora.get(name, digest) == digest:
            continue
        pair = [known.get(record.corpora[name]) for record in (first, other)]
        if pair[0] is None or pair[1] is None:
            yield CorpusChange(f"{name}: another version, but one of both is no longer there to compare.", ())
            continue
        (before, was), (now, manifest) = pair[0], pair[1]
        title = f"{name}, {was.version} and {manifest.version}"
        try:
            yield CorpusChange(f"{title}: {_examples(before, was, now, manifest)}", _rows(before, now))
        except (RuntimeError, OSError) as error:  # a shard or statistics that cannot be read
            yield CorpusChange(f"{title}: they cannot be compared. {error}", ())


def _examples(before: Store, was: Manifest, now: Store, manifest: Manifest) -> str:
    if (num_rows := rows_apart(before, now)) > MAX_ROWS:
        versions = f"{was.name}/{was.version} {manifest.name}/{manifest.version}"
        return f"{num_rows:,} rows are in shards of one of both; `vitline data diff {versions}` compares them."
    found = diff_examples(before, now, num_named=0)
    changed = [f"{changes.count:,} {_WORDS[kind]}" for kind, changes in found.changes.items() if changes.count]
    return f"{found.num_common:,} examples are in both{''.join(f', {text}' for text in changed)}."


def _rows(before: Store, now: Store) -> list[list[str]]:
    facts = [facts_of(corpus)[0] for corpus in (before, now)]
    return [[row.what, cell(row.a), cell(row.b)] for row in diff_stats(*facts) if row.what != "digest"]
