"""Published scores as data: the rows of the papers that our scores are compared with, with their sources.

`published_scores.csv` holds a line per model, with scores in percent as they are printed, deviations behind `±`. Sources: ViT,
arXiv:2010.11929 (version 2 unless a row says v1); BiT, arXiv:1912.11370, and the re-runs in the README of its repository;
VTAB, google-research/task_adaptation, docs/data/results.csv; "Better plain ViT", arXiv:2205.01580.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from types import MappingProxyType

VIT = "arXiv:2010.11929"
SHORT_NAMES = {"JFT-300M": "JFT", "ImageNet-21k": "I21k", "ImageNet": "ImageNet"}
"""Names of pre-training data in labels."""
GROUP_COLUMNS = ("natural", "specialized", "structured", "all")
"""Columns that are printed means; every other column is the corpus of a task."""


@dataclass(frozen=True)
class PublishedRow:
    """The printed scores of a model."""

    model: str
    """Name in the table, such as ViT-L/16."""
    data: str | None
    """Pre-training data; None for none."""
    source: str
    """Paper, version and table."""
    setting: str = ""
    """Distinguishes rows of the same model and data."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Fractions by corpus name; tasks that are not printed are absent."""
    deviations: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation over the authors' runs by corpus or group, if printed."""
    printed_means: Mapping[str, float] = field(default_factory=dict)
    """Means over VTAB's groups and over `all` 19 tasks, if printed."""
    tpuv3_core_days: float | None = None
    exaflops: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """`ViT-L/16 (I21k), 384 px`: unique among the rows."""
        data = f" ({SHORT_NAMES[self.data]})" if self.data else ""
        return f"{self.model}{data}{f', {self.setting}' if self.setting else ''}"

    @property
    def architecture(self) -> str | None:
        """The network as `vitline.vit.models.variants.spelled` names it; None for networks that vitline does not have."""
        if re.fullmatch(r"(R50x1\+)?ViT-./\d+", self.model):
            return self.model.replace("R50x1+", "R50+")
        resnet = re.fullmatch(r"(?:ResNet|BiT-[SML] R)(\d+x\d)", self.model)
        return f"BiT-R{resnet[1]}" if resnet else None

    @property
    def is_headline(self) -> bool:
        """True for the most quoted rows: those of the paper's Tables 2 and 9, and BiT's re-runs."""
        table_2 = self.source.startswith(f"{VIT}v2, Table") and not self.setting
        return table_2 or self.setting == "re-run"

    @property
    def is_v1(self) -> bool:
        return "v1" in self.source


def _cell(text: str) -> tuple[float, float | None]:
    """`88.55±0.04` -> (88.55, 0.04)."""
    value, _, deviation = text.partition("±")
    return float(value), (float(deviation) if deviation else None)


def _fraction(percent: float) -> float:
    """Percent with at most two decimals -> fraction, rounded to remove the rounding error of the division."""
    return round(percent / 100, 6)


def _row(
    model: str, data: str | None, source: str, cells: Mapping[str, str], setting: str = "", note: str = ""
) -> PublishedRow:
    """A row from its printed cells, by column: a corpus, a group or a cost."""
    read = {column: _cell(text) for column, text in cells.items()}
    values = {column: value for column, (value, _) in read.items()}
    days, exaflops = values.pop("tpuv3_core_days", None), values.pop("exaflops", None)
    means = {name: _fraction(values.pop(name)) for name in GROUP_COLUMNS if name in values}
    return PublishedRow(
        model=model,
        data=data,
        source=source,
        setting=setting,
        scores=MappingProxyType({name: _fraction(value) for name, value in values.items()}),
        deviations=MappingProxyType({name: _fraction(d) for name, (_, d) in read.items() if d is not None}),
        printed_means=MappingProxyType(means),
        tpuv3_core_days=days,
        exaflops=exaflops,
        note=note,
    )


def _rows() -> Iterator[PublishedRow]:
    with (resources.files("vitline.vit.evaluation.reference") / "published_scores.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            known = {name: line.pop(name) for name in ("model", "data", "source", "setting", "note")}
            cells = {column: text for column, text in line.items() if text}
            yield _row(known["model"], known["data"] or None, known["source"], cells, known["setting"], known["note"])


ROWS: Mapping[str, PublishedRow] = MappingProxyType({row.label: row for row in _rows()})
"""All rows by label, in the order of the file."""


def published_named(label: str) -> PublishedRow:
    """The row with this label. Raises ValueError naming similar labels."""
    if label in ROWS:
        return ROWS[label]
    near = get_close_matches(label, ROWS, n=4, cutoff=0.3) or list(ROWS)[:5]
    raise ValueError(
        f"There is no published row {label!r}; similar labels: {'; '.join(near)}. `vitline evaluate report --json` lists all "
        f"{len(ROWS)}."
    )
