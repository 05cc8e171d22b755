"""Checks that stop a corpus from being published or reused: losses of unknown size, too many refused images, nothing left.

The limits are in `execution`, so they also apply to corpora that are prepared already.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vitline.data_prep.config import CorpusConfig, PredictedClasses
from vitline.data_prep.find_corpus import prepared_corpus
from vitline.data_prep.labels.class_maps import load_class_map
from vitline.data_prep.labels.label_texts import distinguishable
from vitline.data_prep.plan.corpus_stats import Findings
from vitline.data_prep.records import DENIED, NOT_COUNTED, PLAN, UNCOUNTED
from vitline.data_prep.shard_format import REJECTS_KEY, Manifest, load_manifest
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import ImageSource
from vitline.infra.storage import Store

_EXAMPLES_NAMED = 5
SHOWN = 3
"""Number of examples with the same id that an error shows."""


def check_refused(config: CorpusConfig, corpus: Store, refused: Mapping[str, Findings], num_accepted: int) -> None:
    """Check the refused examples by reason. Raises ValueError that names reasons, examples and the next step."""
    _check_losses(config, refused)
    _check_denied(config, refused, num_accepted)
    counted = {reason: found for reason, found in refused.items() if reason not in NOT_COUNTED}
    problem = too_many(config, {reason: found.count for reason, found in counted.items()}, num_accepted)
    if problem:
        first = {reason: found.first[0] for reason, found in counted.items()}
        named = "; ".join(f"{each.image.example_id}: {reason} ({each.detail})" for reason, each in first.items())
        raise ValueError(
            f"{config.name}: {problem}, so nothing is published. The first of each reason: {named}. All are listed in "
            f"{corpus.uri}/{PLAN}/rejects/*.parquet. {_next_step(config, counted, num_accepted)}"
        )


def check_reused(config: CorpusConfig, corpus: Store, root: Store) -> None:
    """Check a corpus that is prepared already against the limits of this request. Raises ValueError if it exceeds them."""
    manifest = load_manifest(corpus)
    refused, num_accepted = dict(manifest.counts.refused), manifest.counts.num_accepted
    if config.add_to:  # the base corpus was checked when it was prepared
        base = prepared_corpus(root, config.add_to).manifest.counts
        refused = {reason: count - base.refused.get(reason, 0) for reason, count in refused.items()}
        num_accepted -= base.num_accepted
    here = f"{manifest.name}/{manifest.version} is prepared already"
    if refused.get(UNCOUNTED) and config.execution.uncounted_losses == "refuse":
        raise ValueError(
            f"{here}, but {refused[UNCOUNTED]:,} source files could not be read to their end, so the number of missing images "
            f"is unknown. They are listed in {corpus.uri_of(REJECTS_KEY)}. Copy them again and prepare; or accept the corpus "
            "as it is with --set execution.uncounted_losses=accept."
        )
    counted = {reason: count for reason, count in refused.items() if count and reason not in NOT_COUNTED}
    if problem := too_many(config, counted, num_accepted):
        raise ValueError(
            f"{here}, but {problem}. They are listed in {corpus.uri_of(REJECTS_KEY)}. Repair the source and prepare "
            f"again; or accept the corpus as it is with {_raised_limit(counted, num_accepted)}."
        )


class NothingNew(ValueError):
    """A source, given again, has no image that the corpus to which it is added does not have."""

    def __init__(self, config: CorpusConfig) -> None:
        super().__init__(f"{open_source(config).origin} has no image whose id is not in {config.add_to} already.")


def check_left(
    config: CorpusConfig,
    rows: Mapping[str, int],
    refused: Mapping[str, Findings],
    label_counts: Mapping[str, int],
    num_labelled: int,
) -> None:
    """Check what is left: `rows` by split. `label_counts`: images of every label before classes are left out.
    `num_labelled`: images before duplicates are left out. Raises ValueError with the cause if train has no images."""
    source = open_source(config)
    num_found = sum(rows.values()) + sum(found.count for found in refused.values())
    if not num_found and config.add_to and config.recipe.known_ids == "skip":
        raise NothingNew(config)
    counts = {reason: found.count for reason, found in refused.items()}
    if not num_labelled and isinstance(config.source, PredictedClasses):
        raise ValueError(
            f"{source.origin}: none of the {num_found:,} images is left ({_by_reason(counts) or 'none refused'}). Lower "
            "source.min_score, or predict other images, or use a better model."
        )
    if not num_labelled:
        raise ValueError(
            f"no labelled image among the {num_found:,} files of {source.origin}. A source must hold labelled images; for "
            "class folders, one folder per class, such as cats/1.jpg and dogs/1.jpg."
        )
    for split, expected in source.benchmark_rows.items():
        if (there := rows.get(split, 0)) != expected:
            raise ValueError(
                f"{source.origin}: found {there:,} examples of {split}, but the benchmark has {expected:,}. Its files are "
                "incomplete or of another release. Copy them again."
            )
    if rows.get("train") or config.add_to or source.is_test_set:
        return
    why = why_none_is_left(config, sum(rows.values()), counts, label_counts)
    raise ValueError(
        f"{source.origin}: no image is left for train. Of {num_found:,} files {sum(counts.values()):,} were refused or "
        f"left out ({_by_reason(counts) or 'none'}). {why}"
    )


def why_none_is_left(
    config: CorpusConfig, num_elsewhere: int, counts: Mapping[str, int], label_counts: Mapping[str, int]
) -> str:
    """Why train has no image, and what to do. `num_elsewhere`: images of val and test; `counts`: those left out, by reason."""
    recipe, labels = config.recipe, Counter(label_counts).most_common()
    if num_elsewhere and counts.get("duplicate", 0) > num_elsewhere:
        return (
            f"All {num_elsewhere:,} different images are in val and test; {counts['duplicate']:,} were left out as copies of "
            "these or of each other. Add other images: copies add nothing to train."
        )
    if num_elsewhere:
        return f"All {num_elsewhere:,} remaining images are in val and test. Add images, or lower val_fraction and test_fraction."
    most = max(counts, key=lambda reason: counts[reason])
    if most == "small_class":
        return (
            f"recipe.min_images_per_class is {recipe.min_images_per_class:,}, but the largest class, {labels[0][0]!r}, has "
            f"{labels[0][1]:,} images. Lower the limit, or add images."
        )
    if most == "unknown_class":
        wanted = ", ".join(map(repr, load_class_map(recipe.class_map).source_ids[:_EXAMPLES_NAMED]))
        there = ", ".join(repr(label) for label, _ in labels[:_EXAMPLES_NAMED])
        return (
            f"recipe.class_map {recipe.class_map} contains none of their labels: its source ids are {wanted} ..., the labels "
            f"of the source are {there} .... Give a map whose source ids are labels of the source."
        )
    if most == "leakage":
        return (
            f"They match evaluation images of the corpora in recipe.decontaminate: "
            f"{', '.join(recipe.decontaminate)}. Change recipe.decontaminate, or add other images."
        )
    return "Add images."


def repeated_ids_error(
    source: ImageSource, rows: Sequence[Mapping[str, Any]], num_rows: int, num_ids: int, at_least: str = ""
) -> ValueError:
    """Error for different examples with one id: shows the first `rows` of `num_rows`, for one of `num_ids` such ids."""
    files = distinguishable([f"{row['base']}/{row['key']}" for row in rows[:SHOWN]])
    where = "; ".join(f"{file}, labelled {', '.join(row['labels'])}" for file, row in zip(files, rows, strict=False))
    return ValueError(
        f"{'two' if num_rows == 2 else f'{num_rows:,}'} examples have the id {rows[0]['example_id']!r}: {where}"
        f"{'; ...' if num_rows > SHOWN else ''}. {at_least}{num_ids:,} ids of {source.origin} repeat. "
        f"{source.when_ids_repeat}"
    )


def ids_there_error(first: str, num_ids: int) -> ValueError:
    """Error for new examples whose ids are in the corpus that they are added to."""
    return ValueError(
        f"{first!r}{' and others are' if num_ids > 1 else ' is'} in the corpus already, but a segment may only add new "
        "ids. Give a source of new images."
    )


def loss_text(manifest: Manifest) -> str:
    """A sentence on losses of unknown size in a corpus; empty if there are none."""
    num = manifest.counts.refused.get(UNCOUNTED, 0)
    if not num:
        return ""
    return (
        f"{num:,} file{'s' if num > 1 else ''} could not be read to {'their' if num > 1 else 'its'} end: an unknown number "
        f"of images, and possibly whole classes, are missing. See {UNCOUNTED} in {REJECTS_KEY}."
    )


def _check_losses(config: CorpusConfig, refused: Mapping[str, Findings]) -> None:
    lost = refused.get(UNCOUNTED)
    if lost is None or config.execution.uncounted_losses == "accept" or _is_benchmark(config):
        return
    named = "; ".join(f"{each.image.example_id}: {each.detail}" for each in lost.first[:_EXAMPLES_NAMED])
    more = f"; and {lost.count - _EXAMPLES_NAMED:,} more" if lost.count > _EXAMPLES_NAMED else ""
    raise ValueError(
        f"{config.name}: an unknown number of images is missing, so nothing is published: {lost.count:,} "
        f"file{' was' if lost.count == 1 else 's were'} not read to the end. {named}{more}. Copy "
        f"{'it' if lost.count == 1 else 'them'} again; or publish what was read with "
        "--set execution.uncounted_losses=accept."
    )


def _check_denied(config: CorpusConfig, refused: Mapping[str, Findings], num_accepted: int) -> None:
    denied = refused.get("unreadable")
    if num_accepted or denied is None or not denied.first[0].detail.startswith(DENIED):
        return
    raise ValueError(
        f"{config.name}: no image could be read; {denied.count:,} are unreadable. The first: "
        f"{denied.first[0].detail}. Set credentials ($AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, or $AWS_PROFILE) that "
        "may read it, or correct the bucket, and run the same command again."
    )


def too_many(config: CorpusConfig, counted: Mapping[str, int], num_accepted: int) -> str:
    """Describes the excess of refused images; empty if their share is within the limit."""
    total = sum(counted.values())
    benchmark = _is_benchmark(config)
    limit = 0.0 if benchmark else config.execution.max_refused_fraction
    num_images = num_accepted + total
    if total <= limit * num_images:
        return ""
    return (
        f"{total:,} of {num_images:,} images are refused ({_by_reason(counted)}), "
        f"more than the share {limit:g} that {'a benchmark' if benchmark else 'execution.max_refused_fraction'} allows"
    )


def _by_reason(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered)


def _is_benchmark(config: CorpusConfig) -> bool:
    return bool(open_source(config).benchmark_rows)


def _next_step(config: CorpusConfig, counted: Mapping[str, Findings], num_accepted: int) -> str:
    if _is_benchmark(config):
        return "Copy its files again."
    counts = {reason: found.count for reason, found in counted.items()}
    limit = _raised_limit(counts, num_accepted)
    outside = counted.get("unsafe_path")
    if outside and 2 * outside.count >= sum(counts.values()) and "allowed_roots" in outside.first[0].detail:
        return (
            "Most are outside of the places that the source may read. If you trust it, name the folders or buckets that hold "
            f"them in source.allowed_roots; or leave them out with {limit}."
        )
    if 2 * counts.get("no_label", 0) < sum(counts.values()):
        return f"Repair or remove them, or allow them with {limit}."
    given = config.source.model_dump(mode="json")
    fields = ", ".join(f"source.{name} ({value!r})" for name, value in given.items() if "label" in name)
    if not fields:
        fields = "the source: every image must be in the folder of its class"
    return f"Most have no label. Correct {fields}; or leave them out with {limit}."


def _raised_limit(counted: Mapping[str, int], num_accepted: int) -> str:
    total = sum(counted.values())
    return f"--set execution.max_refused_fraction={min(1.0, math.ceil(100 * total / (num_accepted + total)) / 100):g}"
