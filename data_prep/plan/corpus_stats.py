"""Statistics of a corpus: counts, histograms and the locations of sample images. Computed in pieces, merged, stored as stats.json.

The size of the statistics does not depend on the number of rows. Bins are fixed and samples are chosen by hash, so merging is
exact and the result does not depend on how the rows were partitioned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter, ValidationError

from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA
from vitline.data_prep.sources.splits import order_key

STATS_KEY = "stats.json"

PAIRS_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("split", pa.string()),
        *LOCATOR_SCHEMA,
        pa.field("kind", pa.string(), nullable=False),  # same_file, same_pixels or near
        pa.field("detail", pa.string()),
        pa.field("left_out", pa.bool_()),  # whether the example is refused because of this pair
        pa.field("labels_differ", pa.bool_()),
        pa.field("other_corpus", pa.string()),  # NAME/VERSION of an evaluation corpus; null: this corpus
        pa.field("other_split", pa.string()),
        pa.field("other_id", pa.string(), nullable=False),
        *(field.with_name(f"other_{field.name}") for field in LOCATOR_SCHEMA),
    ]
)
"""Pairs of similar images: an example and the one that it repeats."""
_NO_PAIRS = PAIRS_SCHEMA.empty_table()

_MAX_DETAIL = 300
_MANY_LABELS = 32


@dataclass(frozen=True)
class LogScale:
    """Bins of equal ratio from 2**first to 2**last; values outside are counted in the outermost bins."""

    first: int
    last: int
    bins_per_octave: int
    centred: bool = False
    """Whether powers of two are in the middle of a bin rather than between two bins."""

    @property
    def edges(self) -> np.ndarray:
        """The edges, one more than there are bins."""
        steps = np.arange(self.first * self.bins_per_octave, self.last * self.bins_per_octave + 1 + self.centred)
        return np.exp2((steps - self.centred / 2) / self.bins_per_octave)

    def count(self, values: np.ndarray) -> np.ndarray:
        """Number of values in each bin, int64."""
        edges = self.edges
        inner = np.searchsorted(edges[1:-1], values, side="right")
        return np.bincount(inner, minlength=len(edges) - 1)

    def quantile(self, counts: np.ndarray, q: float) -> float:
        """Approximate value below which the share `q` of the counted values is; NaN if nothing was counted."""
        total = int(counts.sum())
        if not total:
            return float("nan")
        bin_of = int(np.searchsorted(np.cumsum(counts), q * total))
        low, high = self.edges[bin_of], self.edges[bin_of + 1]
        return float(np.sqrt(low * high))


SIDE_PX = LogScale(0, 15, 6)
"""Bins for the square root of width x height."""
ASPECT_RATIO = LogScale(-7, 7, 8, centred=True)
"""Bins for width over height."""
FILE_BYTES = LogScale(0, 32, 4)
"""Bins for the size of a file in bytes."""


@dataclass(frozen=True)
class SampleRule:
    """Which examples are remembered with their location: those with the smallest order keys."""

    num_classes: int = 24
    """Largest number of classes on the sample sheet, spread evenly over the label ids."""
    per_class: int = 6
    per_finding: int = 8
    """Examples per reason of refusal, per kind of duplicate and per leak."""

    def labels(self, num_classes: int) -> np.ndarray:
        """Label ids of the sample sheet, ascending."""
        return np.unique(np.linspace(0, num_classes - 1, min(num_classes, self.num_classes)).astype(np.int64))


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Location of one image: bytes [offset, offset + length) of `key` in the store `base`; without length, to the end."""

    example_id: str
    order_key: int
    base: str
    """Empty: the location is unknown."""
    key: str
    offset: int
    length: int | None


@dataclass(frozen=True, slots=True)
class Finding:
    """An image, a detail about it, and the image that it repeats, if any."""

    image: SampleRow
    detail: str = ""
    other: SampleRow | None = None


@dataclass(frozen=True)
class Findings:
    """Number of images, how many of them are left out of the corpus, and the first ones by order key."""

    count: int = 0
    num_left_out: int = 0
    first: tuple[Finding, ...] = ()


_FINDINGS = TypeAdapter(dict[str, Findings])


class Leak(NamedTuple):
    """A split of this corpus whose images were found in a split of another corpus."""

    corpus: str
    corpus_split: str
    own_split: str


@dataclass(frozen=True)
class SplitStats:
    """Rows, image bytes and images per class (int64, by label id) of one split."""

    num_rows: int
    num_bytes: int
    class_counts: np.ndarray


@dataclass(frozen=True, eq=False)
class CorpusStats:
    """Statistics of some or all rows of a corpus. Compare them by `to_json`."""

    num_classes: int
    rule: SampleRule
    splits: Mapping[str, SplitStats]
    """Train, val and test; splits that join others are not counted again."""
    labels_per_image: np.ndarray
    """Images with 0, 1, 2, ... labels; the last entry includes those with more."""
    side_px: np.ndarray
    """Counts per bin of SIDE_PX; the next two likewise for their scales."""
    aspect_ratio: np.ndarray
    file_bytes: np.ndarray
    kinds: Mapping[str, int]
    """Images per "format mode", such as "JPEG L"."""
    refused: Mapping[str, Findings]
    """Findings by reason."""
    sheet: Mapping[int, tuple[SampleRow, ...]]
    """Sample rows by label id."""
    duplicates: Mapping[str, Findings]
    """Findings by kind (same_file, same_pixels, near), and again under conflicting_labels and across_splits where they apply."""
    leakage: Mapping[Leak, Findings]
    compared: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """Evaluation corpora (NAME/VERSION) and splits that were searched for leaks."""
    older_versions: frozenset[str] = field(default_factory=frozenset)
    """Evaluation corpora (NAME/VERSION) that were not searched because a newer version was."""

    @classmethod
    def of(
        cls,
        accepted: pa.Table,
        rejects: pa.Table,
        num_classes: int,
        sample: SampleRule,
        pairs: pa.Table = _NO_PAIRS,
        compared: Iterable[tuple[str, str]] = (),
    ) -> "CorpusStats":
        """Statistics of some rows.

        `accepted` has example_id, labels (ids), split, base, key, offset, length, order_key, num_bytes, width_px,
        height_px, format and mode; `rejects` has example_id, reason, detail and the location. `pairs` has PAIRS_SCHEMA, with
        all rows of one example in one call; without it the statistics have no duplicates. Further columns are ignored.
        Raises ValueError if a label is not below `num_classes`.
        """
        labels = accepted["labels"].combine_chunks()
        flat, owner = pc.list_flatten(labels).to_numpy(), pc.list_parent_indices(labels).to_numpy()
        if len(flat) and not 0 <= flat.min() <= flat.max() < num_classes:
            raise ValueError(
                f"label ids go from {flat.min()} to {flat.max()}, but the class map has {num_classes:,} classes: labels "
                "and class map come from different plans. Prepare the corpus again."
            )
        width, height = (accepted[name].to_numpy().astype(np.float64) for name in ("width_px", "height_px"))
        kinds = accepted.group_by(["format", "mode"]).aggregate([([], "count_all")]).to_pylist()
        duplicates, leakage = _alike(pairs, sample)
        return cls(
            num_classes=num_classes,
            rule=sample,
            splits=dict(_split_stats(accepted, flat, owner, num_classes)),
            labels_per_image=_label_numbers(labels),
            side_px=SIDE_PX.count(np.sqrt(width * height)),
            aspect_ratio=ASPECT_RATIO.count(width / height),
            file_bytes=FILE_BYTES.count(accepted["num_bytes"].to_numpy()),
            kinds={f"{kind['format']} {kind['mode']}": kind["count_all"] for kind in kinds},
            refused=_refused(rejects, sample),
            sheet=_sheet(accepted, flat, owner, sample.labels(num_classes), sample.per_class),
            duplicates=duplicates,
            leakage=leakage,
            compared=frozenset((corpus, split) for corpus, split in compared),
        )

    @property
    def num_rows(self) -> int:
        return sum(split.num_rows for split in self.splits.values())

    @property
    def num_bytes(self) -> int:
        return sum(split.num_bytes for split in self.splits.values())

    @property
    def num_refused(self) -> int:
        return sum(found.count for found in self.refused.values())

    @property
    def class_counts(self) -> np.ndarray:
        """Images per class over all splits, int64, by label id."""
        return sum((split.class_counts for split in self.splits.values()), np.zeros(self.num_classes, np.int64))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, equal for equal statistics; `from_json` reads it."""
        return {
            "num_classes": self.num_classes,
            "rule": asdict(self.rule),
            "splits": {
                name: {**vars(split), "class_counts": split.class_counts.tolist()}
                for name, split in sorted(self.splits.items())
            },
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
            "kinds": dict(sorted(self.kinds.items())),
            "refused": {name: asdict(found) for name, found in sorted(self.refused.items())},
            "sheet": {str(label): [asdict(row) for row in rows] for label, rows in sorted(self.sheet.items())},
            "duplicates": {name: asdict(found) for name, found in sorted(self.duplicates.items())},
            "leakage": {" ".join(leak): asdict(found) for leak, found in sorted(self.leakage.items())},
            "compared": [list(pair) for pair in sorted(self.compared)],
            "older_versions": sorted(self.older_versions),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CorpusStats":
        """Read the result of `to_json`. Raises ValueError for anything else."""
        try:
            return cls(
                num_classes=value["num_classes"],
                rule=SampleRule(**value["rule"]),
                splits={
                    name: SplitStats(**{**split, "class_counts": np.array(split["class_counts"], np.int64)})
                    for name, split in value["splits"].items()
                },
                **{name: np.array(value[name], np.int64) for name in _ARRAYS},
                kinds=dict(value["kinds"]),
                refused=_FINDINGS.validate_python(value["refused"]),
                sheet={int(label): tuple(SampleRow(**row) for row in rows) for label, rows in value["sheet"].items()},
                duplicates=_FINDINGS.validate_python(value["duplicates"]),
                leakage={Leak(*k.split(" ")): v for k, v in _FINDINGS.validate_python(value["leakage"]).items()},
                compared=frozenset((corpus, split) for corpus, split in value["compared"]),
                older_versions=frozenset(value["older_versions"]),
            )
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(
                f"this is not the {STATS_KEY} of a corpus: {type(error).__name__} {error}. Another program or version wrote "
                "it. Prepare the corpus again."
            ) from error


_ARRAYS = ("labels_per_image", "side_px", "aspect_ratio", "file_bytes")


def merged(a: CorpusStats, b: CorpusStats) -> CorpusStats:
    """Statistics of the rows of both. Associative and commutative. Raises ValueError if classes or sample rules differ."""
    if (a.num_classes, a.rule) != (b.num_classes, b.rule):
        raise ValueError(
            f"cannot merge statistics of {a.num_classes:,} classes and {a.rule} with those of {b.num_classes:,} classes and "
            f"{b.rule}. Compute both with one class map and one rule."
        )

    def joined(x: Findings, y: Findings) -> Findings:
        first = _first((*x.first, *y.first), _finding_order, a.rule.per_finding)
        return Findings(x.count + y.count, x.num_left_out + y.num_left_out, first)

    compared = a.compared | b.compared
    return CorpusStats(
        num_classes=a.num_classes,
        rule=a.rule,
        splits=_united(
            a.splits,
            b.splits,
            lambda x, y: SplitStats(
                x.num_rows + y.num_rows, x.num_bytes + y.num_bytes, x.class_counts + y.class_counts
            ),
        ),
        **{name: getattr(a, name) + getattr(b, name) for name in _ARRAYS},
        kinds=_united(a.kinds, b.kinds, lambda x, y: x + y),
        refused=_united(a.refused, b.refused, joined),
        sheet=_united(a.sheet, b.sheet, lambda x, y: _first((*x, *y), _row_order, a.rule.per_class)),
        duplicates=_united(a.duplicates, b.duplicates, joined),
        leakage=_united(a.leakage, b.leakage, joined),
        compared=compared,
        older_versions=(a.older_versions | b.older_versions) - {corpus for corpus, _ in compared},
    )


K = TypeVar("K")
V = TypeVar("V")


def _united(a: Mapping[K, V], b: Mapping[K, V], join: Callable[[V, V], V]) -> dict[K, V]:
    return {**a, **b, **{key: join(a[key], b[key]) for key in a.keys() & b.keys()}}


def _row_order(row: SampleRow) -> tuple[int, str]:
    return row.order_key, row.example_id


def _finding_order(found: Finding) -> tuple[int, str, str]:
    return (*_row_order(found.image), found.other.example_id if found.other else "")


def _first(values: Iterable[V], order: Callable[[V], Any], number: int) -> tuple[V, ...]:
    return tuple(sorted(values, key=order)[:number])


def _split_stats(
    accepted: pa.Table, flat: np.ndarray, owner: np.ndarray, num_classes: int
) -> Iterator[tuple[str, SplitStats]]:
    for name in pc.unique(accepted["split"]).to_pylist():
        own = pc.equal(accepted["split"], name).to_numpy()
        num_bytes = int(accepted["num_bytes"].to_numpy()[own].sum(dtype=np.int64))
        yield name, SplitStats(int(own.sum()), num_bytes, np.bincount(flat[own[owner]], minlength=num_classes))


def _label_numbers(labels: pa.ListArray) -> np.ndarray:
    numbers = np.minimum(pc.list_value_length(labels).to_numpy(), _MANY_LABELS)
    return np.bincount(numbers, minlength=_MANY_LABELS + 1)


def _sheet(
    accepted: pa.Table, flat: np.ndarray, owner: np.ndarray, chosen: np.ndarray, per_class: int
) -> dict[int, tuple[SampleRow, ...]]:
    shown = np.isin(flat, chosen)
    columns = ["example_id", "order_key", *LOCATOR_SCHEMA.names]
    rows = accepted.select(columns).take(pa.array(owner[shown])).append_column("label", pa.array(flat[shown]))
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in ("label", "order_key", "example_id")])
    rows = rows.take(order)
    sorted_labels = rows["label"].to_numpy()
    rank = np.arange(len(sorted_labels)) - np.searchsorted(sorted_labels, sorted_labels)
    sheet: dict[int, tuple[SampleRow, ...]] = {}
    for row in rows.filter(pa.array(rank < per_class)).to_pylist():
        label = row.pop("label")
        sheet[label] = (*sheet.get(label, ()), SampleRow(**row))
    return sheet


def _refused(rejects: pa.Table, rule: SampleRule) -> dict[str, Findings]:
    found = {}
    for reason in pc.unique(rejects["reason"]).to_pylist():
        rows = rejects.filter(pc.equal(rejects["reason"], reason))
        first = _first_rows(rows, rule.per_finding)
        listed = tuple(Finding(_sample_row(row), (row["detail"] or "")[:_MAX_DETAIL]) for row in first)
        found[reason] = Findings(rows.num_rows, rows.num_rows, listed)
    return found


def _alike(pairs: pa.Table, rule: SampleRule) -> tuple[dict[str, Findings], dict[Leak, Findings]]:
    """Duplicates and leakage from a table of pairs."""
    here = pc.is_null(pairs["other_corpus"])
    own, foreign = pairs.filter(here), pairs.filter(pc.invert(here))
    for name in ("split", "other_split"):
        known = pc.fill_null(foreign[name], "unknown")
        foreign = foreign.set_column(foreign.column_names.index(name), name, known)
    duplicates = {
        **{kind: own.filter(pc.equal(own["kind"], kind)) for kind in pc.unique(own["kind"]).to_pylist()},
        "conflicting_labels": own.filter(pc.fill_null(own["labels_differ"], False)),
        "across_splits": own.filter(pc.fill_null(pc.not_equal(own["split"], own["other_split"]), False)),
    }
    leakage = {}
    keys = ["other_corpus", "other_split", "split"]
    for values in foreign.group_by(keys).aggregate([]).to_pylist():
        same = [pc.equal(foreign[name], values[name]) for name in keys]
        leakage[Leak(*values.values())] = foreign.filter(pc.and_(pc.and_(same[0], same[1]), same[2]))
    return (
        {kind: _pair_findings(rows, rule) for kind, rows in duplicates.items() if rows.num_rows},
        {leak: _pair_findings(rows, rule) for leak, rows in leakage.items()},
    )


def _pair_findings(pairs: pa.Table, rule: SampleRule) -> Findings:
    left_out = pairs.filter(pc.fill_null(pairs["left_out"], False))
    first = tuple(
        Finding(_sample_row(row), (row["detail"] or row["kind"])[:_MAX_DETAIL], _sample_row(row, "other_"))
        for row in _first_rows(pairs, rule.per_finding)
    )
    count, num_left_out = (len(pc.unique(table["example_id"])) for table in (pairs, left_out))
    return Findings(count, num_left_out, first)


def _first_rows(rows: pa.Table, number: int) -> list[dict[str, Any]]:
    """The rows with the smallest order keys. The seed is fixed, because these rows have no position in the order of a corpus."""
    keys = np.array([order_key(0, example_id) for example_id in rows["example_id"].to_pylist()], np.uint64)
    near = np.flatnonzero(keys <= np.partition(keys, number - 1)[number - 1]) if len(keys) > number else ...
    picked = rows if near is ... else rows.take(pa.array(near))
    ordered = sorted(
        picked.to_pylist(),
        key=lambda row: (order_key(0, row["example_id"]), row["example_id"], row.get("other_id", "")),
    )
    return ordered[:number]


def _sample_row(row: Mapping[str, Any], prefix: str = "") -> SampleRow:
    example_id = row["other_id" if prefix else "example_id"]
    base, key = row[f"{prefix}base"] or "", row[f"{prefix}key"] or ""
    offset, length = row[f"{prefix}offset"] or 0, row[f"{prefix}length"]
    return SampleRow(example_id, order_key(0, example_id), base, key, offset, length)
