"""The output of `vitline data prepare`, `show`, `diff`, `subset` and `verify`."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.executors import Threads
from vitline.data_prep.find_corpus import Corpora, FoundCorpus
from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.pages.diff_corpora import ChangeKind, ExampleDiff, diff_examples
from vitline.data_prep.pages.diff_stats import CorpusFacts, StatDifference, diff_stats
from vitline.data_prep.pages.dry_run import dry_run
from vitline.data_prep.pages.dry_run_report import Cores
from vitline.data_prep.plan.corpus_stats import SIDE_PX, CorpusStats
from vitline.data_prep.plan.leakage import own_splits_text
from vitline.data_prep.plan.plan_shards import Base
from vitline.data_prep.shard_format import Manifest, SegmentInfo
from vitline.data_prep.shards.subsets import take
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.flows import console
from vitline.flows.catalog.lists import manifest_fields, segment_text
from vitline.flows.cli.command_line import show_one
from vitline.flows.cli.tables import show_table
from vitline.flows.reports.corpus_facts import facts_of
from vitline.flows.runs.prepare_corpus import corpus_rows, leakage_text, prepare_corpora, refusals
from vitline.flows.runs.services import open_services
from vitline.infra.html.text import cell, clock, num_bytes
from vitline.infra.local.paths import local_dir
from vitline.infra.plain_text import visible
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

_NAMED = 3
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_CHANGES: dict[ChangeKind, str] = {
    "added": "only in the second",
    "removed": "only in the first",
    "relabelled": "other labels",
    "moved": "another split",
    "changed_bytes": "other bytes",
}


def show_corpus(settings: Settings, name: str, *, as_json: bool) -> None:
    """Prints the manifest and the statistics of a corpus, as tables or as JSON."""
    corpus, manifest = _corpus(settings, name)
    shown, (facts, of) = manifest_fields(corpus, manifest), facts_of(corpus)
    if as_json:
        console.emit({**shown, "statistics_of": of, "statistics": facts.stats.to_json()})
        return
    for split in shown["splits"].values():
        split["segments"] = [segment_text(SegmentInfo.model_validate(segment)) for segment in split["segments"]]
    show_one(shown, as_json=False)
    subset = f", of which {_title(manifest)} is a subset" if of != _title(manifest) else ""
    show_table(f"Statistics of {of}{subset}", ["", ""], [[name, text] for name, text in stats_rows(facts)])


def stats_rows(facts: CorpusFacts) -> Iterator[tuple[str, str]]:
    """Statistics as rows of a table: name and value."""
    stats = facts.stats
    for name in sorted(stats.splits, key=lambda name: ("train", "val", "test").index(name)):
        split = stats.splits[name]
        yield name, f"{split.num_rows:,} images, {num_bytes(split.num_bytes)}"
    yield from _class_rows(stats, facts.class_map)
    numbers = stats.labels_per_image
    if numbers[2:].any():
        yield "labels per image", f"{(numbers @ np.arange(len(numbers))) / max(1, numbers.sum()):.2f} on average"
    sides = (f"{SIDE_PX.quantile(stats.side_px, q):.0f}" for q in (0.05, 0.5, 0.95))
    yield "side", "about {} px at 5 %, {} at the median, {} at 95 % (of √(width x height))".format(*sides)
    yield "formats", _counted(stats.kinds)
    yield "refused", _counted({reason: found.count for reason, found in stats.refused.items()})
    yield "duplicates", _counted({kind.replace("_", " "): found.count for kind, found in stats.duplicates.items()})
    yield "leakage", leakage_text(stats)
    if own := own_splits_text(facts.manifest):
        yield "own splits", own


def _class_rows(stats: CorpusStats, class_map: ClassMap) -> Iterator[tuple[str, str]]:
    counts = stats.class_counts
    order = np.argsort(-counts, kind="stable")

    def named(labels: np.ndarray) -> str:
        return ", ".join(f"{class_map.classes[i].name} {counts[i]:,}" for i in labels.tolist())

    empty = int((counts == 0).sum())
    yield "classes", f"{len(counts):,}{f', {empty:,} of them without an image' if empty else ''}"
    yield "largest", named(order[:_NAMED])
    yield "smallest", named(order[::-1][:_NAMED])
    values = np.quantile(counts, _QUANTILES, method="inverted_cdf").astype(int).tolist()
    yield "images per class", ", ".join(f"{v:,} at {100 * q:.0f} %" for q, v in zip(_QUANTILES, values, strict=True))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda item: -item[1])) or "none"


def show_diff(settings: Settings, first: str, second: str, *, as_json: bool) -> None:
    """Prints the differences of two corpora: their properties, and the examples."""
    a, b = (_corpus(settings, name).store for name in (first, second))
    (facts_a, of_a), (facts_b, of_b) = facts_of(a), facts_of(b)
    titles = [_title(facts.manifest) for facts in (facts_a, facts_b)]
    corpora, examples = diff_stats(facts_a, facts_b), diff_examples(a, b)
    if as_json:
        console.emit(_as_json(titles, [of_a, of_b], corpora, examples))
        return
    for title, of in zip(titles, (of_a, of_b), strict=True):
        if title != of:
            console.say(f"{title} is a subset: formats, refused examples and other statistics are those of {of}")
    if not corpora:
        console.print_result(f"{titles[0]} and {titles[1]} are equal.")
        return
    show_table("Corpora", ["", *titles], [[row.what, cell(row.a), cell(row.b)] for row in corpora])
    rows = [[_CHANGES[kind], f"{changes.count:,}"] for kind, changes in examples.changes.items()]
    show_table("Examples", ["", ""], [["in both", f"{examples.num_common:,}"], *rows])
    for kind, changes in examples.changes.items():
        if changes.count:
            shown = f"the first {len(changes.first)}" if changes.count > len(changes.first) else f"{changes.count}"
            lines = [[each.example_id, cell(each.a), cell(each.b)] for each in changes.first]
            show_table(f"{_CHANGES[kind]}: {shown}", ["example", *titles], lines)


def _corpus(settings: Settings, name: str) -> FoundCorpus:
    return Corpora(open_store(settings.root)).named(name)


def _title(manifest: Manifest) -> str:
    return f"{manifest.name}/{manifest.version}"


def _as_json(titles: list[str], of: list[str], corpora: list[StatDifference], examples: ExampleDiff) -> dict[str, Any]:
    changes = {
        kind: {"count": found.count, "first": [each._asdict() for each in found.first]}
        for kind, found in examples.changes.items()
    }
    return {
        "corpora": titles,
        "statistics_of": of,
        "differences": [row._asdict() for row in corpora],
        "examples": {"in_both": examples.num_common, **changes},
    }


def show_dry_run(settings: Settings, request: CorpusConfig, *, as_json: bool) -> None:
    """Prints what to expect of a request, and writes a sample sheet beside the logs if that folder can be written."""
    base = None
    if request.add_to:
        base = Base(*Corpora(open_store(settings.root)).find(request.add_to))
    with console.progress(f"dry run of {request.name}"):
        found, page = dry_run(request, cores_of(settings), base)
    if not as_json:
        rows = [[name, text] for name, text in found.rows()]
        show_table(f"{request.name}: nothing was written to {settings.root}", ["", ""], rows)
    sheet = local_dir(settings).absolute() / "dry-runs" / f"{request.name}.html"
    problem = _write_sheet(sheet, page)
    if as_json:
        written = {"sample_sheet": None if problem else str(sheet), "sample_sheet_problem": problem}
        console.emit({**found.to_json(), **written})
    else:
        console.print_result(problem or f"sample sheet: {sheet}")


def _write_sheet(sheet: Path, page: str) -> str | None:
    """Writes the page, replacing an earlier one. Returns the error, or None."""
    try:
        sheet.parent.mkdir(parents=True, exist_ok=True)
        sheet.write_text(page, encoding="utf-8")
    except OSError as error:
        return f"no sample sheet was written to {sheet}: {error.strerror}. Set VITLINE_HOME to a writable folder."
    return None


def cores_of(settings: Settings) -> Cores:
    """The CPUs of the Ray cluster, or of this machine if none is configured."""
    if (address := settings.job_server()) is None:
        return Cores(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "this machine"
        )
    return Cores(RayJobs(address).num_cpus(), f"the Ray cluster at {address}")


def prepare_and_show(settings: Settings, request: CorpusConfig, *, as_json: bool) -> None:
    """Prepares a corpus and prints counts, splits and refused examples."""
    started = time.monotonic()
    with open_services(settings) as services:
        (corpus,), _, _ = prepare_corpora([request], services)
    if as_json:
        shown = {"uri": corpus.uri, "reused": corpus.reused, **corpus.manifest.model_dump(mode="json")}
        console.emit({"corpora": [shown]})
        return
    show_table(corpus.manifest.name, ["", ""], [*corpus_rows(corpus), ["time", clock(time.monotonic() - started)]])
    for line in refusals(corpus, limit=20):
        console.print_result(f"  {visible(line)}")


def take_and_show(settings: Settings, name: str, num_rows: int, split: str, *, as_json: bool) -> None:
    """Makes a subset of a corpus, or finds it again, and prints it."""
    corpus = _corpus(settings, name).store
    subset = take(corpus, num_rows, split)
    if as_json:
        console.emit({"uri": f"{corpus.uri.rpartition('/')[0]}/{subset.version}", **subset.model_dump(mode="json")})
    else:
        console.print_result(_subset_text(subset))


def _subset_text(subset: Manifest) -> str:
    of = subset.view_of
    assert of is not None, f"{subset.name}/{subset.version} is no subset"
    rows = subset.splits[of["split"]].num_rows
    without = f" without {', '.join(of['without'])}," if of.get("without") else ""
    return (
        f"{subset.name}/{subset.version}: the first {rows:,} rows of {of['split']} of {subset.name}/{of['version']},{without} "
        f"nothing copied; digest {subset.digest}"
    )


def verify_and_show(settings: Settings, name: str, *, pixels: bool, as_json: bool) -> None:
    """Reads every shard back, with `pixels` decodes every image, and prints the problems. Raises RuntimeError if there are any."""
    corpus = _corpus(settings, name).store
    report = verify_corpus(corpus, Threads(), pixels=pixels)
    if as_json:
        console.emit(report.model_dump(mode="json"))
    else:
        for uri, problem in (report.problems | report.auxiliary).items():
            console.print_result(visible(f"{uri} {problem}"))
            for example_id, wrong in report.images.get(uri, {}).items():
                console.print_result(visible(f"  {example_id} {wrong}"))
    if report.problems.keys() - report.images.keys():
        raise RuntimeError(
            f"{corpus.uri} has {len(report.problems)} files that differ from what was written; do not train on it."
        )
    if report.images:
        raise RuntimeError(
            f"{len(report.images)} shards of {corpus.uri} are as written but hold corrupt images; do not train on it. "
            "Prepare the same source again: preparation now refuses corrupt images, and makes a new version without them."
        )
    if not as_json:
        rows = f"{report.num_rows_read:,} rows"
        if report.num_rows < report.num_rows_read:
            rows += f", of which this subset has {report.num_rows:,},"
        console.print_result(
            f"{corpus.uri}: {report.num_shards:,} shards with {rows} are as written{', and every image is intact' * pixels}."
        )
    if report.auxiliary:
        raise RuntimeError(
            f"{corpus.uri} has {len(report.auxiliary)} auxiliary files that differ from what was written. Its images and labels "
            "are intact and can be trained on. To restore the files, delete manifest.json and prepare the same corpus again."
        )
