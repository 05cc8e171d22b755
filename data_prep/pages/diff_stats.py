"""Differences of two corpora in manifests, class maps and statistics, for `vitline data diff`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.plan.corpus_stats import CorpusStats
from vitline.data_prep.shard_format import Manifest
from vitline.infra.config import flatten


@dataclass(frozen=True)
class CorpusFacts:
    """The data of one corpus that is compared."""

    manifest: Manifest
    class_map: ClassMap
    stats: CorpusStats


class StatDifference(NamedTuple):
    """One property that differs, with its value in each corpus; None if the corpus lacks it."""

    what: str
    a: str | int | float | bool | None
    b: str | int | float | bool | None


def diff_stats(a: CorpusFacts, b: CorpusFacts) -> list[StatDifference]:
    """Differences in digest, source, recipe, classes, counts by split, refused examples, duplicates and leakage."""
    ours, theirs = (dict(_facts(each)) for each in (a, b))
    rows = [
        StatDifference(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys(itertools.chain(ours, theirs))
        if ours.get(name) != theirs.get(name)
    ]
    return [*rows, *_class_differences(a, b)]


def _facts(corpus: CorpusFacts) -> Iterator[tuple[str, Any]]:
    manifest, stats = corpus.manifest, corpus.stats
    yield "digest", manifest.digest
    request = manifest.provenance.get("request", {})
    for part in ("source", "recipe"):
        for name, value in flatten(request.get(part, {})).items():
            yield f"{part}: {name}", value if isinstance(value, str | int | float | None) else str(value)
    yield "one label per image", manifest.single_label
    yield "weights", manifest.has_weights
    for name, split in manifest.splits.items():
        yield f"{name}: images", split.num_rows
        if name in stats.splits:
            yield f"{name}: bytes", stats.splits[name].num_bytes
    for kind, count in sorted(stats.kinds.items()):
        yield f"format {kind}", count
    for reason, found in sorted(stats.refused.items()):
        yield f"refused: {reason}", found.count
    for kind, found in sorted(stats.duplicates.items()):
        yield f"duplicates: {kind.replace('_', ' ')}", found.count
    for leak, found in sorted(stats.leakage.items()):
        yield f"leakage: {leak.own_split} in {leak.corpus} {leak.corpus_split}", found.count


_MAX_NAMED = 5


def _class_differences(a: CorpusFacts, b: CorpusFacts) -> list[StatDifference]:
    ids = [{info.source_id: i for i, info in enumerate(each.class_map.classes)} for each in (a, b)]
    common = [source_id for source_id in ids[0] if source_id in ids[1]]
    only = [[source_id for source_id in ids[i] if source_id not in ids[1 - i]] for i in (0, 1)]
    rows = []
    if len(ids[0]) != len(ids[1]):
        rows.append(StatDifference("classes", len(ids[0]), len(ids[1])))
    if only[0] or only[1]:
        rows.append(StatDifference("classes that the other lacks", _named(only[0]), _named(only[1])))
    renumbered = [source_id for source_id in common if ids[0][source_id] != ids[1][source_id]]
    if renumbered:
        numbers = [_named([f"{source_id} = {own[source_id]}" for source_id in renumbered]) for own in ids]
        rows.append(StatDifference("classes with another label id", *numbers))
    names = [{info.source_id: info.name for info in each.class_map.classes} for each in (a, b)]
    renamed = [source_id for source_id in common if names[0][source_id] != names[1][source_id]]
    if renamed:
        rows.append(
            StatDifference(
                "classes with another name", *(_named([own[source_id] for source_id in renamed]) for own in names)
            )
        )
    counts = [each.stats.class_counts for each in (a, b)]
    pairs = np.array([(counts[0][ids[0][key]], counts[1][ids[1][key]]) for key in common], np.int64).reshape(-1, 2)
    moved = np.argsort(-np.abs(pairs[:, 0] - pairs[:, 1]), kind="stable")
    moved = moved[pairs[moved, 0] != pairs[moved, 1]]
    if len(moved):
        numbers_of_images = [_named([f"{common[i]}: {pairs[i, side]:,}" for i in moved.tolist()]) for side in (0, 1)]
        rows.append(StatDifference("classes with another number of images", *numbers_of_images))
    return rows


def _named(values: list[str]) -> str | None:
    """The number of values and the first of them; None if there are none."""
    if not values:
        return None
    more = ", ..." if len(values) > _MAX_NAMED else ""
    return f"{len(values):,} ({', '.join(values[:_MAX_NAMED])}{more})"
