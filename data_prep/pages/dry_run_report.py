"""The result of a dry run as rows of a table, as JSON and as an HTML page. Counts and estimates are marked as such."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.pages.report import size_plots
from vitline.data_prep.pages.report_images import load_images, read_sample
from vitline.data_prep.plan.corpus_stats import CorpusStats
from vitline.infra.html.page import render as render_page
from vitline.infra.html.text import duration, num_bytes

_MAX_CLASSES_SHOWN = 200


@dataclass(frozen=True)
class Cores:
    """Number of cores on which the preparation will run, and their location."""

    number: int
    where: str


@dataclass(frozen=True)
class Estimate:
    """A count, or an estimate from a sample."""

    value: float
    exact: bool

    def __str__(self) -> str:
        return f"{'' if self.exact else 'about '}{self.value:,.0f}"


@dataclass(frozen=True)
class DryRun:
    """What was found and what is expected. Times are seconds of one core unless stated otherwise."""

    name: str
    origin: str
    structure: str
    """How the names of folders and files were understood; empty if nothing had to be."""
    num_parts: int
    found: Estimate
    """Files, including those that are not images."""
    source_bytes: Estimate
    classes: Mapping[str, int]
    """Images by label of the source. If the whole source was examined, only accepted ones; otherwise before decoding, for the
    whole source if `classes_exact` and else for the sample."""
    classes_exact: bool
    class_names: Mapping[str, str]
    refused: Mapping[str, Estimate]
    """Number of files by reason."""
    splits: Mapping[str, int]
    """Expected rows by split."""
    splits_exact: bool
    """Whether the rows by split were counted. A drawn split is known only after its image was decoded."""
    complete: bool
    """Whether the sample is the whole source, so that rows, classes and refused files are counted."""
    train_at_most: int | None
    """Upper limit of the rows of train, if it was counted."""
    bytes_out: float
    rows_per_row_group: Mapping[str, int]
    num_shards: int
    requests: Mapping[str, float]
    """Requests by kind, if source and corpus are in an object store."""
    num_sampled: int
    mean_bytes: float
    mean_pixels: float
    examined_per_s: float
    """Images per second on one core: read, decoded, hashed."""
    written_per_s: float
    """Images per second on one core: read again and written to a shard."""
    cores: Cores
    hours: float
    """Time on all cores, without starting, listing and planning."""
    notes: tuple[str, ...]
    class_map: ClassMap
    stats: CorpusStats
    """Statistics of the sample; the class map is that of the sample as well."""

    def rows(self) -> list[tuple[str, str]]:
        """Rows of a table."""
        accepted = sum(self.splits.values())
        largest = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:5]
        return [
            ("source", f"{self.origin}, in {self.num_parts:,} part{'s' * (self.num_parts != 1)}"),
            *([("read as", self.structure)] if self.structure else []),
            (
                "files found",
                f"{self.found}, {'' if self.source_bytes.exact else 'about '}{num_bytes(self.source_bytes.value)}",
            ),
            (
                "images expected",
                f"{Estimate(accepted, self.complete)}, {num_bytes(accepted * self.mean_bytes)}, before duplicates are dropped",
            ),
            ("splits", ", ".join(f"{name} {Estimate(rows, self.splits_exact)}" for name, rows in self.splits.items())),
            (
                "classes",
                f"{len(self.classes):,}{self._counted_as}: "
                + ", ".join(f"{self.class_names.get(label, label)} {count:,}" for label, count in largest)
                + (", ..." if len(self.classes) > len(largest) else ""),
            ),
            (
                "formats",
                ", ".join(
                    f"{kind} {100 * n / max(1, self.stats.num_rows):.3g} %" for kind, n in _by_count(self.stats.kinds)
                ),
            ),
            (
                "refused",
                ", ".join(
                    f"{reason} {number} ({100 * number.value / max(1, self.found.value):.2g} %)"
                    for reason, number in sorted(self.refused.items(), key=lambda item: -item[1].value)
                )
                or "none in the sample",
            ),
            ("mean image", f"{num_bytes(self.mean_bytes)}, {self.mean_pixels / 1e6:.3g} megapixels"),
            (
                "shards",
                f"about {self.num_shards:,} of {num_bytes(self.bytes_out)} in total; rows per row group: "
                + ", ".join(f"{name} {rows:,}" for name, rows in self.rows_per_row_group.items()),
            ),
            (
                "speed",
                f"examining {self.examined_per_s:,.0f} images/s per core, writing {self.written_per_s:,.0f} images/s per core",
            ),
            (
                "time",
                f"about {duration(3600 * self.hours)} on {self.cores.number:,} cores of {self.cores.where}, without "
                "starting the job, listing and planning",
            ),
            (
                "requests",
                ", ".join(f"{kind} {_round(n)}" for kind, n in self.requests.items()) + ", on an object store",
            ),
            ("sample", f"{self.num_sampled:,} files"),
            *(("note", note) for note in self.notes),
        ]

    @property
    def _counted_as(self) -> str:
        if self.complete:
            return ""
        return ", before unreadable files are refused" if self.classes_exact else " in the sample"

    def to_json(self) -> dict[str, Any]:
        """Everything but images, as plain JSON."""
        return {
            **{name: value for name, value in vars(self).items() if isinstance(value, str | int | float | None)},
            **{name: vars(getattr(self, name)) for name in ("found", "source_bytes", "cores")},
            **{name: dict(getattr(self, name)) for name in ("classes", "splits", "rows_per_row_group", "requests")},
            "refused": {reason: vars(number) for reason, number in self.refused.items()},
            "formats": dict(self.stats.kinds),
            "notes": list(self.notes),
        }


def render(found: DryRun, config: CorpusConfig) -> str:
    """An HTML page with all results and a sample sheet."""
    classes = _by_count(found.classes)
    return render_page(
        "data_prep/pages/dry_run.html.j2",
        title=f"{found.name}: dry run",
        found=found,
        stats=found.stats,
        images=load_images(found.stats, config.recipe.decode, read_sample),
        classes=[(found.class_names.get(label, label), label, f"{n:,}") for label, n in classes[:_MAX_CLASSES_SHOWN]],
        sizes=size_plots(found.stats),
    )


def _by_count(counts: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _round(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"
