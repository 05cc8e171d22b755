"""raw corpora -> manifests of verified shards: several corpora in one Ray Data job."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.parquet_files import open_parquet
from vitline.data_prep.plan.check_refused import NothingNew, check_reused, loss_text
from vitline.data_prep.plan.corpus_stats import CorpusStats, Findings, Leak
from vitline.data_prep.plan.leakage import own_splits_text
from vitline.data_prep.prepare.job import PrepareSpec
from vitline.data_prep.prepare.small_work import fits_here
from vitline.data_prep.progress import preparation_progress
from vitline.data_prep.shard_format import MANIFEST_KEY, REJECTS_KEY, REPORT_KEY, Manifest, load_manifest
from vitline.data_prep.sources.open_source import open_source
from vitline.flows.catalog.lists import corpus_stats
from vitline.flows.forms.forms import PrepareRequest
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.runs.services import LocalProcesses, Services
from vitline.flows.runs.stage import StageResult, run_stage
from vitline.infra.config import digest_of
from vitline.infra.html.text import shortened_list
from vitline.infra.keys import run_key
from vitline.infra.storage import Store, open_store

MERGED = "exact repetitions of other rows, or images that were there already"


@dataclass(frozen=True)
class PreparedCorpus:
    """A finished corpus and whether it had been finished before."""

    uri: str
    manifest: Manifest
    reused: bool


def source_request(root: str, source: str, name: str | None, **fields: Any) -> CorpusConfig:
    """The request for a corpus made from `source`; `fields` are other fields of the form. Raises ValueError for an invalid
    name or source."""
    try:
        return resolve_prepare(root, PrepareRequest.model_validate({"source": source, "name": name, **fields}))
    except ValidationError as error:
        if any(problem["loc"] == ("name",) for problem in error.errors()):
            raise ValueError(
                f"--name {name!r} is not a valid corpus name; use up to 80 lower-case letters, digits, '-', '_' and '.', "
                "as in 'birds-2026'."
            ) from error
        raise


def prepare_corpora(
    requests: Sequence[CorpusConfig], services: Services
) -> tuple[list[PreparedCorpus], str | None, StageResult | None]:
    """The corpora of the requests, in order, with key and result of the run that prepared the missing ones, if any were.

    Finished corpora are found without a cluster. Raises ValueError if one breaks the rules of the request's `execution`,
    FetchUnavailable if a source cannot be downloaded here, StageFailed with the reason for every other failure.
    """
    base = open_store(services.root)
    stores = [corpus_store(base, request) for request in requests]
    missing = [r for r, store in zip(requests, stores, strict=True) if not store.exists(MANIFEST_KEY)]
    for request, store in zip(requests, stores, strict=True):
        if request not in missing:
            check_reused(request, store, base)
    key, result = None, None
    if missing:
        fetch_sources(missing, base, services.observer.say)
        key, result = run_preparation(missing, [s for s in stores if not s.exists(MANIFEST_KEY)], services)
        for request, store in zip(requests, stores, strict=True):
            if request.recipe.known_ids == "skip" and not store.exists(MANIFEST_KEY):
                raise NothingNew(request)
    prepared = [
        PreparedCorpus(store.uri, load_manifest(store), request not in missing)
        for request, store in zip(requests, stores, strict=True)
    ]
    for corpus in prepared:
        if lost := loss_text(corpus.manifest):
            services.observer.say(f"warning: {corpus.manifest.name}: {lost}")
        for leak in leak_lines(corpus_stats(open_store(corpus.uri)).stats):
            services.observer.say(f"warning: {corpus.manifest.name}: {leak}")
    return prepared, key, result


def fetch_sources(requests: Sequence[CorpusConfig], root: Store, say: Callable[[str], None]) -> None:
    """Downloads what the sources need into the store, in this process, before a job is submitted.

    Raises FetchUnavailable if it cannot be downloaded.
    """
    for request in requests:
        open_source(request).fetch(root, say)


def run_preparation(
    requests: Sequence[CorpusConfig], corpora: Sequence[Store], services: Services
) -> tuple[str, StageResult]:
    """Runs one job for all corpora that are not finished. Its run key follows from their versions.

    If no cluster is configured and the work is small, the job is a child of this process and no Ray is started. A configured
    cluster gets the job even if it is small, so that it is listed, followed and stopped like every other job.
    """
    key = preparation_key([request.name for request in requests], corpora, services.root)
    own_ray = services.settings.ray_address is None
    here = own_ray and fits_here(requests, open_store(services.root), one_machine=True)
    with contextlib.ExitStack() as stack:
        if here:
            cluster = stack.enter_context(LocalProcesses(services.settings, services.cluster.log_dir))
            services = replace(services, cluster=cluster)
        result = run_stage(
            services,
            PrepareSpec(run_key=key, root=services.root, requests=tuple(requests), small=here if own_ray else None),
            "vitline.data_prep.prepare.job",
            title=f"prepare {', '.join(request.name for request in requests)}",
            progress=lambda: preparation_progress(corpora),
            # Without corpora there was nothing new.
            output=lambda state: not state.get("corpora") or all(corpus.exists(MANIFEST_KEY) for corpus in corpora),
            grace_s=5,
        )
    return key, result


def preparation_key(names: Sequence[str], corpora: Sequence[Store], root: str) -> str:
    """The key of the run that prepares these corpora together."""
    prefix = "-".join(names)[:40].rstrip("-._")
    versions = {corpus.uri.removeprefix(open_store(root).uri): "" for corpus in corpora}
    return run_key(f"prepare-{prefix}", "prepare", digest_of(list(names)), versions)


def corpus_links(corpus: PreparedCorpus, services: Services) -> dict[str, str]:
    """Links to a corpus and its report; if it was prepared alone and MLflow has the run, also to that and to the report there."""
    links = {"corpus": f"`{corpus.uri}`", "report": f"`{corpus.uri}/{REPORT_KEY}`"}
    key = preparation_key([corpus.manifest.name], [open_store(corpus.uri)], services.root)
    if url := services.sender.run_url(key):
        links |= {
            "report page": f"[in MLflow]({url.partition('?')[0]}/artifacts/{REPORT_KEY})",
            "MLflow": f"[the preparation]({url})",
        }
    return links


def refusals(corpus: PreparedCorpus, limit: int) -> list[str]:
    """The first refused examples as lines `id: reason (detail)`."""
    with open_store(corpus.uri).open(REJECTS_KEY) as file:
        parquet = open_parquet(file)
        rows: list[dict[str, Any]] = next(
            (batch.to_pylist() for batch in parquet.iter_batches(limit, use_threads=False)), []
        )
        more = parquet.metadata.num_rows - limit
    lines = [f"{row['example_id']}: {row['reason']} ({row['detail']})" for row in rows]
    return lines if more <= 0 else [*lines, f"... and {more:,} more in {corpus.uri}/{REJECTS_KEY}"]


def corpus_rows(corpus: PreparedCorpus) -> list[list[str]]:
    """A corpus as rows of a table: place, counts, splits, refused examples, leakage."""
    counts = corpus.manifest.counts
    splits = ", ".join(f"{name} {split.num_rows:,}" for name, split in corpus.manifest.splits.items())
    left = corpus.manifest.provenance.get("leak_pairs_not_compared", 0)
    found, own = corpus_stats(open_store(corpus.uri)), own_splits_text(corpus.manifest)
    return [
        ["corpus", f"{corpus.uri}{' (reused)' if corpus.reused else ''}"],
        ["images", f"{counts.num_accepted:,} of {counts.num_found:,} in {corpus.manifest.num_classes:,} classes"],
        ["splits", splits],
        *([["merged rows", f"{counts.num_merged:,} {MERGED}"]] if counts.num_merged else []),
        ["refused", ", ".join(f"{reason} {n:,}" for reason, n in counts.refused.items()) or "none"],
        ["leakage", leakage_text(found.stats, left)],
        *([["own splits", own]] if own else []),
        ["digest", corpus.manifest.digest],
        ["report", f"{corpus.uri}/{REPORT_KEY}"],
    ]


def leakage_text(stats: CorpusStats, num_left: int = 0) -> str:
    """Leakage of a corpus in one line; `num_left` pairs were too many to compare."""
    if not stats.compared:
        return (
            "not checked: no evaluation set to compare with (a corpus with a test split, or with a val split that its "
            "source names)"
        )
    parts = [
        "; ".join(leak_lines(stats)) or "none",
        f"compared with {shortened_list(sorted(f'{name} ({s})' for name, s in stats.compared), _MOST_NAMES)}",
    ]
    if stats.older_versions:
        parts.append(f"older versions not compared: {shortened_list(sorted(stats.older_versions), _MOST_NAMES)}")
    if num_left:
        parts.append(f"{num_left:,} pairs with similar hashes were too many to compare")
    return "; ".join(parts)


_ADJECTIVE = {"train": "training", "val": "validation"}
_MAX_LEAKS = 3
_MOST_NAMES = 6


def _by_severity(item: tuple[Leak, Findings]) -> tuple[bool, int, Leak]:
    """Leakage into test invalidates a score, leakage into val only a choice of settings."""
    leak, found = item
    return leak.corpus_split != "test", -found.count, leak


def leak_lines(stats: CorpusStats) -> list[str]:
    """Sentences such as "214 training images match the test split of pets; leave them out with --decontaminate pets
    (before training)". Test splits come first, those with more images before others. From the fourth on, matches are summed
    up in one line. Images that were left out of the corpus are not counted."""
    lines, names = [], []
    for leak, found in sorted(stats.leakage.items(), key=_by_severity):
        if (number := found.count - found.num_left_out) > 0:
            name = leak.corpus.partition("/")[0]
            names.append(name)
            images = f"{_ADJECTIVE.get(leak.own_split, leak.own_split)} image{'s match' if number > 1 else ' matches'}"
            lines.append(
                f"{number:,} {images} the {leak.corpus_split} split of {name}; leave {'them' if number > 1 else 'it'} out "
                f"with --decontaminate {name} (before training)"
            )
    if len(lines) <= _MAX_LEAKS + 1:
        return lines
    others = shortened_list(sorted(set(names[_MAX_LEAKS:])), _MOST_NAMES)
    return [
        *lines[:_MAX_LEAKS],
        f"{len(lines) - _MAX_LEAKS:,} more such matches, with splits of {others}; `vitline data show --json` lists all",
    ]
