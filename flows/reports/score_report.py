"""Every stored score below a root with what it is compared with: rows by table, published rows, cost, self-check."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flows.catalog import list_corpora
from flows.reports.scored_models import ModelFacts, model_facts
from infra.storage import open_store
from vit.vtab.evaluate import Score
from vit.vtab.published.published_checks import PublishedCheck, check_score, matching_row, targets_of
from vit.vtab.published.published_scores import GROUP_COLUMNS, ROWS, PublishedRow, published_named
from vit.vtab.published.report import (
    TRANSFER_CORPORA,
    VTAB_CORPORA,
    ModelScores,
    Table,
    coverage,
    differences,
    latest_records,
    published_mean,
    read_records,
    scores_by_model,
    table_of,
    vtab_means,
)

Extent = Literal["compared", "usual", "every"]
TABLES: tuple[Table, ...] = ("vtab", "transfer", "own", "frozen")
COMPARED: dict[Table, tuple[str, ...]] = {
    "vtab": (*VTAB_CORPORA, *GROUP_COLUMNS),
    "transfer": TRANSFER_CORPORA,
}
"""Columns of the tables that published rows stand in."""


@dataclass(frozen=True)
class ScoreReport:
    """What the tables show, as numbers."""

    tables: Mapping[Table, Sequence[ModelScores]]
    asked_row: PublishedRow | None
    """The row that the differences are to; None takes the one that matches each model."""
    facts: Mapping[str, ModelFacts]
    """By arm: what a model is."""
    coverage: str
    num_left_out: int
    """Records that a newer one of the same model, protocol, task and seed stands for."""

    def beside(self, table: Table, row: ModelScores) -> PublishedRow | None:
        """The published row that a model is compared with in a table: the one asked for, or the one that matches."""
        if table not in COMPARED:
            return None
        found = self.asked_row or matching_row(
            self.facts[row.arm].architecture, self.facts[row.arm].data, row.protocol, COMPARED[table]
        )
        return found if found and not {*COMPARED[table]}.isdisjoint({*found.scores, *found.printed_means}) else None

    @property
    def models(self) -> dict[str, list[ModelScores]]:
        """Everything of a model by its arm, in the order of the tables."""
        rows: dict[str, list[ModelScores]] = {}
        for table in TABLES:
            for row in self.tables[table]:
                rows.setdefault(row.arm, []).append(row)
        return rows

    def checks(self) -> list[tuple[ModelScores, PublishedCheck]]:
        """Scores on weights that others have published and measured: the self-check of the ruler."""
        return [
            (row, check_score(target, corpus, cell.value, cell.num_examples, self.facts[row.arm].image_size_px))
            for rows in self.models.values()
            for row in rows
            for target in targets_of(self.facts[row.arm].weights or "")
            for corpus, cell in row.cells.items()
            if row.protocol == target.protocol and corpus in target.scores
        ]


def read_report(root: str, beside: str | None = None, of: Collection[Score] | None = None) -> ScoreReport:
    """The report of what is stored below a root; of some scores, all of their models and their own controls.

    Raises ValueError for a `beside` that is no published row.
    """
    asked = published_named(beside) if beside else None
    corpora = list_corpora(root)
    records, left_out = latest_records(read_records(open_store(root)), {corpus["digest"] for corpus in corpora})
    if of is not None:
        models = {score.model for score in of} - {None}
        records = [record for record in records if record.score.model in models or record.score in of]
    tables = {
        table: sorted(
            scores_by_model(r for r in records if table_of(r.score.protocol, r.score.task) == table),
            key=lambda row: (row.protocol, row.model is None, row.label, row.arm),
        )
        for table in TABLES
    }
    arms = {row.arm: row.model for rows in tables.values() for row in rows}
    facts = {arm: model_facts(root, model) for arm, model in arms.items()}
    return ScoreReport(tables, asked, facts, coverage(corpus["name"] for corpus in corpora), left_out)


def published_for(report: ScoreReport, table: Table, extent: Extent) -> list[PublishedRow]:
    """The published rows of a table, in the order of the papers.

    `compared`: those that differences are to, else the headlines; `usual`: these, all of VTAB's, and of the transfer
    table the networks that were scored; `every`: version 1 and other networks as well.
    """
    compared = [beside for row in report.tables[table] if (beside := report.beside(table, row))]
    scored = {report.facts[row.arm].architecture for row in report.tables[table]} - {None}
    rows = [row for row in ROWS.values() if not {*COMPARED[table]}.isdisjoint({*row.scores, *row.printed_means})]
    if extent == "every":
        return rows
    if extent == "compared":
        return [row for row in rows if row in compared or (row.is_headline and not compared)]
    likely = [row for row in rows if not row.is_v1 and (table == "vtab" or row.architecture in scored)]
    return [row for row in rows if row in (*compared, *likely) or row.is_headline]


def as_data(report: ScoreReport) -> dict[str, Any]:
    """The whole report for `--json`: fractions, and every published row."""
    return {
        "coverage": report.coverage,
        "records_left_out": report.num_left_out,
        "tables": {table: [_row_data(report, table, row) for row in rows] for table, rows in report.tables.items()},
        "models": {
            arm: {"label": rows[0].label, "model": rows[0].model} | asdict(report.facts[arm])
            for arm, rows in report.models.items()
        },
        "self_check": [{"model": row.label, "protocol": row.protocol, **asdict(c)} for row, c in report.checks()],
        "published": {label: _published_data(row) for label, row in ROWS.items()},
    }


def _row_data(report: ScoreReport, table: Table, row: ModelScores) -> dict[str, Any]:
    beside = report.beside(table, row)
    return {
        "model": row.label,
        "arm": row.arm,
        "protocol": row.protocol,
        "scores": {corpus: asdict(cell) for corpus, cell in row.cells.items()},
        "means": {group: asdict(mean) for group, mean in vtab_means(row).items()} if table == "vtab" else {},
        "beside": beside.label if beside else None,
        "differences": {name: asdict(d) for name, d in differences(row, beside).items()} if beside else {},
        "wall_s": row.wall_s,
        "trainings": row.num_trainings,
    }


def _published_data(row: PublishedRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "pretrained_on": row.data,
        "source": row.source,
        "version": "v1" if row.is_v1 else None,
        "scores": dict(row.scores),
        "means": {group: mean for group in GROUP_COLUMNS if (mean := published_mean(row, group)) is not None},
        "deviations": dict(row.deviations),
        "tpuv3_core_days": row.tpuv3_core_days,
        "exaflops": row.exaflops,
        "note": row.note,
    }
