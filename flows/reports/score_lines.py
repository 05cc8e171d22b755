"""The score report as tables of text, which the console, HTML and Markdown show."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitline.flows.reports.score_report import Extent, ScoreReport, published_for
from vitline.infra.html.tables import Table
from vitline.infra.html.text import clock, percent
from vitline.vit.evaluation.protocols import seed_statistic
from vitline.vit.evaluation.reference.corruption_errors import SEVERITIES, corruption_means
from vitline.vit.evaluation.reference.published_scores import ROWS, PublishedRow
from vitline.vit.evaluation.reference.report import (
    TRANSFER_CORPORA,
    Cell,
    Mean,
    ModelScores,
    differences,
    group_corpora,
    published_mean,
    vtab_means,
)
from vitline.vit.evaluation.reference.report import (
    Table as TableName,
)
from vitline.vit.evaluation.tasks import GROUPS, ROBUSTNESS

Cells = Callable[[PublishedRow], Sequence[str]]
Kind = Literal["ours", "detail", "heading", "published"]
# Four letters, so that nineteen columns fit, and the names in the paper's Table 9.
VTAB_NAMES = {
    "vtab-caltech101": ("Calt", "Caltech101"),
    "vtab-cifar100": ("C100", "CIFAR-100"),
    "vtab-dtd": ("DTD", "DTD"),
    "vtab-flowers102": ("Flow", "Flowers102"),
    "vtab-pets": ("Pets", "Pets"),
    "vtab-sun397": ("Sun", "Sun397"),
    "vtab-svhn": ("SVHN", "SVHN"),
    "vtab-patch-camelyon": ("Caml", "Camelyon"),
    "vtab-eurosat": ("Euro", "EuroSAT"),
    "vtab-resisc45": ("Resi", "Resisc45"),
    "vtab-diabetic-retinopathy": ("Reti", "Retinopathy"),
    "vtab-clevr-count": ("ClCt", "Clevr-Count"),
    "vtab-clevr-distance": ("ClDi", "Clevr-Dist"),
    "vtab-dmlab": ("DMLb", "DMLab"),
    "vtab-dsprites-location": ("dLoc", "dSpr-Loc"),
    "vtab-dsprites-orientation": ("dOri", "dSpr-Ori"),
    "vtab-kitti-distance": ("KITT", "KITTI-Dist"),
    "vtab-smallnorb-azimuth": ("nAzi", "sNORB-Azim"),
    "vtab-smallnorb-elevation": ("nEle", "sNORB-Elev"),
}
GROUP_NAMES = {"natural": "Natu", "specialized": "Spec", "structured": "Stru", "all": "Mean"}
TRANSFER_NAMES = dict(
    zip(TRANSFER_CORPORA, ("ImageNet", "ReaL", "V2", "CIFAR-10", "CIFAR-100", "Pets", "Flowers"), strict=True)
)
ROBUSTNESS_NAMES = {
    "imagenet": "ImageNet",
    "imagenet-real": "ReaL",
    "imagenet-v2": "V2",
    "imagenet-a": "A",
    "imagenet-r": "R",
    "imagenet-sketch": "Sketch",
    "objectnet": "ObjectNet",
}
PROBE_NAMES = {"linear": "linear", "knn": "kNN", "head": "own head"}
NOISE = "± standard deviation over seeds; for one seed the standard error of the test split."


@dataclass(frozen=True)
class Line:
    """A line of a table: its label and its cells."""

    label: str
    cells: tuple[str, ...]
    kind: Kind


def _table(title: str, columns: Sequence[str], lines: Sequence[Line], **more: Any) -> Table:
    return Table(title, columns, [(line.label, *line.cells) for line in lines], [line.kind for line in lines], **more)


class Footnotes:
    """Sources of published rows, numbered in order of appearance."""

    def __init__(self) -> None:
        self._sources: dict[str, int] = {}

    def label(self, row: PublishedRow) -> str:
        source = row.source + (f"; {row.note}" if row.note else "")
        return f"{row.label} [{self._sources.setdefault(source, len(self._sources) + 1)}]"

    def notes(self) -> tuple[str, ...]:
        return tuple(f"[{number}] {source}" for source, number in self._sources.items())


def text_tables(report: ScoreReport, extent: Extent = "usual") -> list[Table]:
    """The tables that are not empty: those with scores, and those of published rows unless `extent` is `compared`."""
    tables = [vtab_table(report, extent)] if report.tables["vtab"] or extent != "compared" else []
    if report.tables["transfer"] or extent == "every":
        tables.append(transfer_table(report, extent))
    if report.tables["own"]:
        tables.append(own_table(report))
    if report.tables["frozen"]:
        tables.append(frozen_table(report))
    if any(corpus in ROBUSTNESS for _, corpus, _ in _every_cell(report)):
        tables.append(robustness_table(report, extent))
    if any(cell.by_severity for *_, cell in _every_cell(report)):
        tables.append(severity_table(report))
    if any(cell.ece is not None for *_, cell in _every_cell(report)):
        tables.append(calibration_table(report))
    if report.models:
        tables.append(cost_table(report, extent))
    if report.checks():
        tables.append(check_table(report))
    return tables


def vtab_table(report: ScoreReport, extent: Extent = "usual") -> Table:
    """VTAB: nineteen columns with a mean after each group and after all, own scores first, then published rows."""
    columns = [name for group in GROUPS for name in (*group_corpora(group), group)] + ["all"]
    lines, foot = [], Footnotes()
    for row in report.tables["vtab"]:
        lines += _vtab_lines(report, row, columns)
    lines += _published_lines(
        report, "vtab", extent, foot, lambda row: [_published_vtab(row, name) for name in columns]
    )
    marks = (
        "*: standard error of the test split, as there is one seed."
        if any("*" in c for line in lines for c in line.cells)
        else ""
    )
    names = ", ".join(f"{short} {long}" for short, long in VTAB_NAMES.values() if short != long)
    short = (VTAB_NAMES[name][0] if name in VTAB_NAMES else GROUP_NAMES[name] for name in columns)
    return _table(
        "VTAB-1k, top-1 in percent",
        ("model, protocol", *short),
        lines,
        blocks=(*(len(group_corpora(group)) + 1 for group in GROUPS[:-1]), len(group_corpora(GROUPS[-1])) + 2),
        notes=(f"{report.coverage}. {marks}".strip(), *foot.notes()),
        legend=f"{names}; Natu, Spec, Stru: means of the groups.",
        full_names=tuple(VTAB_NAMES[name][1] if name in VTAB_NAMES else f"mean, {name}" for name in columns),
    )


def transfer_table(report: ScoreReport, extent: Extent = "usual") -> Table:
    """Whole data sets, with the rows of the paper's Tables 2, 5 and 6; each cell with its noise."""
    lines, foot = [], Footnotes()
    for row in report.tables["transfer"]:
        cells = [row.cells.get(name) for name in TRANSFER_CORPORA]
        of = f", {seed_statistic(row.protocol)} of {row.num_seeds} seeds" if row.num_seeds > 1 else ""
        texts = (_with_noise(cell.value, cell.noise) if cell else "-" for cell in cells)
        lines.append(Line(f"{_model_label(row)}{of}", tuple(texts), "ours"))
        if reference := report.reference("transfer", row):
            found = differences(row, reference)
            minus = (_with_noise(d.value, d.noise, "+") if (d := found.get(c)) else "-" for c in TRANSFER_CORPORA)
            lines.append(Line(f"  minus {reference.label}", tuple(minus), "detail"))
    lines += _published_lines(report, "transfer", extent, foot, lambda row: _published_cells(row, TRANSFER_CORPORA))
    more = " `--all` shows all published rows." if extent == "usual" else ""
    return _table(
        "Whole data sets, top-1 in percent",
        ("model, protocol", *TRANSFER_NAMES.values()),
        lines,
        notes=(NOISE + more, *foot.notes()),
    )


def own_table(report: ScoreReport) -> Table:
    """Tasks of your own: without published scores, and not part of VTAB's means."""
    rows = [(corpus, row, cell) for row in report.tables["own"] for corpus, cell in row.cells.items()]
    lines = []
    for corpus, row, cell in sorted(rows, key=lambda each: (each[0], each[1].protocol, each[1].model is None)):
        score = (_point(cell.value), _noise(cell), _statistic(cell))
        cells = (row.label, _protocol(row), *score, f"{cell.num_examples:,}", _point(cell.majority_fraction))
        lines.append(Line(corpus, cells, "ours"))
    columns = ("task", "model", "protocol", "top-1", "noise", "of", "test images", "majority class")
    note = "Not part of VTAB's means. Majority class: the score of always predicting the most frequent class."
    return _table("Your tasks, top-1 in percent", columns, lines, notes=(note,))


def frozen_table(report: ScoreReport) -> Table:
    """Probes: a line for every model and task, a column for every probe."""
    protocols = sorted({row.protocol for row in report.tables["frozen"]}, key=_probe_order)
    by_task: dict[tuple[str, str, str], dict[str, Cell]] = {}
    for row in report.tables["frozen"]:
        for corpus, cell in row.cells.items():
            by_task.setdefault((row.label, row.init, corpus), {})[row.protocol] = cell
    lines = []
    for (model, _, corpus), found in sorted(by_task.items(), key=lambda item: item[0]):
        cells = [found.get(protocol) for protocol in protocols]
        texts = (_with_noise(cell.value, cell.noise) if cell else "-" for cell in cells)
        lines.append(Line(model, (corpus, *texts), "ours"))
    columns = ("model", "task", *map(_probe_name, protocols))
    note = f"{NOISE} The network is not trained."
    return _table("Frozen features, top-1 in percent", columns, lines, notes=(note,))


def robustness_table(report: ScoreReport, extent: Extent = "usual") -> Table:
    """The test sets of ImageNet's classes beside each other, scored with the model's own head, with the published row."""
    lines, foot = [], Footnotes()
    for row in report.tables["frozen"]:
        if row.protocol == "head" and not row.cells.keys().isdisjoint(ROBUSTNESS):
            cells = (row.cells.get(corpus) for corpus in ROBUSTNESS_NAMES)
            of_c = corruption_means({corpus: cell.value for corpus, cell in row.cells.items()})
            scores = (_with_noise(cell.value, cell.noise) if cell else "-" for cell in cells)
            means = (_fine(of_c[name]) if of_c else "-" for name in ("top1", "mce"))
            lines.append(Line(row.label, (*scores, *means), "ours"))
            if reference := report.reference("frozen", row):
                found = differences(row, reference)
                minus = (_with_noise(d.value, d.noise, "+") if (d := found.get(c)) else "-" for c in ROBUSTNESS_NAMES)
                lines.append(Line(f"  minus {reference.label}", (*minus, "-", "-"), "detail"))

    def published(row: PublishedRow) -> list[str]:
        return [*_published_cells(row, ROBUSTNESS_NAMES), "-", "-"]

    lines += _published_lines(report, "frozen", extent, foot, published)
    note = (
        f"{NOISE} The model chooses among the classes of the data set. C: mean over 15 corruptions and five severities. mCE: mean "
        "corruption error, for which errors are divided by AlexNet's; less is better (arXiv:1903.12261)."
    )
    return _table(
        "Robustness, top-1 in percent",
        ("model", *ROBUSTNESS_NAMES.values(), "C", "mCE"),
        lines,
        notes=(note, *foot.notes()),
    )


def severity_table(report: ScoreReport) -> Table:
    """The corruptions of ImageNet-C by severity."""
    lines = []
    for row, corpus, cell in _every_cell(report):
        if cell.by_severity:
            values = (cell.by_severity.get(number) for number in SEVERITIES)
            cells = ("-" if value is None else _fine(value) for value in (*values, cell.value))
            lines.append(Line(row.label, (corpus, *cells), "ours"))
    columns = ("model", "task", *(f"severity {number}" for number in SEVERITIES), "all")
    return _table("ImageNet-C by severity, top-1 in percent", columns, lines)


def calibration_table(report: ScoreReport) -> Table:
    """Every score whose predictions have probabilities: how sure the model is, and how far that is from being right."""
    lines = [
        Line(row.label, (corpus, _protocol(row), *map(_point, (cell.value, cell.mean_confidence, cell.ece))), "ours")
        for row, corpus, cell in _every_cell(report)
        if cell.ece is not None and cell.mean_confidence is not None
    ]
    columns = ("model", "task", "protocol", "top-1", "mean confidence", "ECE")
    note = (
        "Confidence: probability of the predicted class. ECE: expected calibration error, the mean gap between confidence and accuracy "
        "over 15 bins of equal width (arXiv:1706.04599)."
    )
    return _table("Calibration, in percent", columns, lines, notes=(note,))


def _every_cell(report: ScoreReport) -> Iterator[tuple[ModelScores, str, Cell]]:
    """Each score with its model and corpus, in the order of the tables."""
    return (
        (row, corpus, cell) for rows in report.models.values() for row in rows for corpus, cell in row.cells.items()
    )


def cost_table(report: ScoreReport, extent: Extent = "usual") -> Table:
    """Cost of training and of evaluations, with the costs that the papers state."""
    lines = []
    for init, rows in report.models.items():
        facts = report.facts[init]
        trainings, wall_s = sum(row.num_trainings for row in rows), sum(row.wall_s for row in rows)
        network = facts.architecture or "-"
        cells = (network, _number(facts.exaflops), _number(facts.device_days), f"{trainings:,}", clock(wall_s))
        lines.append(Line(rows[0].label, cells, "ours"))
    foot = Footnotes()
    scored = {facts.architecture for facts in report.facts.values()} - {None}
    costly = [row for row in ROWS.values() if not row.is_v1 and (row.exaflops or row.tpuv3_core_days)]
    if extent != "every":
        costly = [row for row in costly if row.is_headline or row.architecture in scored]
    lines.append(Line("published", ("",) * 5, "heading"))
    for row in costly:
        days = f"{row.tpuv3_core_days:,.0f} TPUv3" if row.tpuv3_core_days else "-"
        cells = (row.architecture or "-", _number(row.exaflops), days, "-", "-")
        lines.append(Line(foot.label(row), cells, "published"))
    notes = (
        "exaFLOPs: 6 x multiply-adds of a forward pass x images seen, over all trainings that made the weights; the paper's "
        "Table 6 counts pre-training in the same way. Device-days: GPUs (worker processes if there are none) times days of "
        "training; the paper's are TPUv3 cores times days. Evaluation: sum of the wall times of all trials and probes.",
        *foot.notes(),
    )
    columns = ("model", "network", "training exaFLOPs", "device-days", "trainings", "evaluation")
    return _table("Cost", columns, lines, notes=notes)


def check_table(report: ScoreReport) -> Table:
    """Scores of published weights, compared with the scores that were published for them."""
    lines = []
    for row, check in report.checks():
        low, high = check.published
        published = _fine(low) if low == high else f"{_fine(low)} to {_fine(high)}"
        cells = (check.corpus, _protocol(row), _fine(check.ours), published)
        lines.append(Line(row.label, (*cells, f"{100 * check.difference:+.2f}", check.verdict), "ours"))
    columns = ("model", "task", "protocol", "ours", "published", "difference", "result")
    sources = dict.fromkeys(check.source for _, check in report.checks())
    note = "The same weights, measured by others. Preprocessing and arithmetic explain differences of up to 0.2 points."
    return _table("Published checks", columns, lines, notes=(note, *sources))


def _vtab_lines(report: ScoreReport, row: ModelScores, columns: Sequence[str]) -> list[Line]:
    """The scores of a model, their noise, and the difference to its published row. A mean over fewer than 19 tasks has a line
    of its own."""
    means, reference = vtab_means(row), report.reference("vtab", row)
    whole: dict[str, Cell | Mean] = {g: m for g, m in means.items() if m.num_tasks == m.num_wanted} | dict(row.cells)
    shown = [whole.get(name) for name in columns]
    lines = [
        Line(_model_label(row), tuple(_cell_text(n, c) for n, c in zip(columns, shown, strict=True)), "ours"),
        Line(f"  {_what_noise_is(row)}", _noises(columns, shown), "detail"),
    ]
    found = differences(row, reference) if reference else {}
    minus = tuple(_signed(n, found[n].value) if n in found and n in whole else "" for n in columns)
    if reference and any(minus):
        lines.append(Line(f"  minus {reference.label}", minus, "detail"))
    if "all" not in whole:
        mean, blank = means["all"], ("",) * (len(columns) - 1)
        label = f"  mean of {mean.num_tasks} of {mean.num_wanted}, ±{_fine(mean.noise)}"
        lines.append(Line(label, (*blank, _fine(mean.value)), "detail"))
        if reference and "all" in found:
            label = f"  minus {reference.label}, same {mean.num_tasks}"
            lines.append(Line(label, (*blank, _signed("all", found["all"].value)), "detail"))
    return lines


def _noises(columns: Sequence[str], cells: Sequence[Cell | Mean | None]) -> tuple[str, ...]:
    """The noise of each cell. If some come from seeds, a star marks those that come from the test split."""
    mixed = len({cell.noise_of for cell in cells if cell}) > 1
    texts = []
    for name, cell in zip(columns, cells, strict=True):
        star = "*" if mixed and cell and cell.noise_of == "test images" else ""
        texts.append(f"{_fine(cell.noise) if name == 'all' else _noise(cell)}{star}" if cell else "")
    return tuple(texts)


def _what_noise_is(row: ModelScores) -> str:
    """`median of 3 seeds, ± standard deviation`"""
    if row.num_seeds == 1:
        return "± standard error of the test split"
    return f"{seed_statistic(row.protocol)} of {row.num_seeds} seeds, ± standard deviation"


def _cell_text(name: str, cell: Cell | Mean | None) -> str:
    if cell is None:
        return "-"
    return _fine(cell.value) if name == "all" else _point(cell.value)


def _published_lines(
    report: ScoreReport, table: TableName, extent: Extent, foot: Footnotes, cells: Cells
) -> Iterable[Line]:
    rows = published_for(report, table, extent)
    if not rows:
        return
    yield Line("published", ("",) * len(cells(rows[0])), "heading")
    for row in rows:
        yield Line(foot.label(row), tuple(cells(row)), "published")


def _published_vtab(row: PublishedRow, name: str) -> str:
    value = row.scores.get(name) if name in VTAB_NAMES else published_mean(row, name)
    return "" if value is None else _fine(value) if name == "all" else _point(value)


def _published_cells(row: PublishedRow, corpora: Iterable[str]) -> list[str]:
    return [
        "-" if (value := row.scores.get(name)) is None else _with_noise(value, row.deviations.get(name))
        for name in corpora
    ]


def _model_label(row: ModelScores) -> str:
    """`birds/0a1b2c3d4e5f, vit-paper in bfloat16`"""
    return f"{row.label}, {_protocol(row)}"


def _protocol(row: ModelScores) -> str:
    """With the precision, where it is not float32: scores of two precisions differ by more than rounding."""
    return row.protocol if row.precision == "float32" else f"{row.protocol} in {row.precision}"


def _statistic(cell: Cell) -> str:
    return "test split" if cell.noise_of == "test images" else f"{cell.statistic} of {len(cell.by_seed)} seeds"


def _point(value: float) -> str:
    """`87.3`, but `100` without a decimal, so that no cell is wider than four characters."""
    return "100" if value >= 0.9995 else f"{100 * value:.1f}"


def _fine(value: float) -> str:
    return f"{100 * value:.2f}"


def _signed(name: str, value: float) -> str:
    """`+0.3` or `-12`; the cell of a task is never wider than four characters."""
    if name == "all":
        return f"{100 * value:+.2f}"
    return f"{100 * value:+.1f}" if abs(value) < 0.0995 else f"{100 * value:+.0f}"


def _noise(cell: Cell | Mean) -> str:
    return f"{100 * cell.noise:.1f}"


def _with_noise(value: float, noise: float | None, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f}" + (f" ±{100 * noise:.2f}" if noise is not None else "")


def _number(value: float | None) -> str:
    """At least three significant digits: `4,262`, `0.00312`."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _probe_order(protocol: str) -> tuple[bool, int, str]:
    method, _, shots = protocol.partition("-")
    return method != "fewshot", int(shots) if shots.isdigit() else 0, protocol


def _probe_name(protocol: str) -> str:
    method, _, shots = protocol.partition("-")
    return f"{shots} shots" if method == "fewshot" else PROBE_NAMES.get(protocol, protocol)


_FIRST = ("peak_lr", "total_steps", "shots", "neighbours", "strength")


def setting(chosen: Mapping[str, Any]) -> str:
    """A setting with the validation score that chose it: `lr 0.03, 100 steps, val 41.0 %`. Counts of 0 and flags that are
    true are left out."""
    parts = []
    for name in sorted(chosen.keys() - {"val_top1"}, key=lambda name: (name not in _FIRST, name)):
        value, word = chosen[name], name.replace("_", " ")
        if isinstance(value, bool):
            parts += [] if value else [f"not {word}"]
        elif isinstance(value, float):
            parts.append(f"{'lr' if name == 'peak_lr' else word} {value:g}")
        elif isinstance(value, int):
            parts += [f"{value:,} {word.removeprefix('total ').removeprefix('num ')}"] if value else []
        else:
            parts.append(f"{word}: {value}")
    return ", ".join([*parts, f"val {percent(chosen['val_top1'])}"] if "val_top1" in chosen else parts)
