"""Every stored score below a root, with the published rows that it is compared with, cost, and published checks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vitline.flows.catalog.lists import list_corpora, say_unreadable
from vitline.flows.reports.scored_models import ModelFacts, model_facts
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.reference.published_checks import PublishedCheck, check_score, matching_row, targets_of
from vitline.vit.evaluation.reference.published_scores import GROUP_COLUMNS, ROWS, PublishedRow, published_named
from vitline.vit.evaluation.reference.report import (
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
from vitline.vit.evaluation.tasks import ROBUSTNESS

Extent = Literal["compared", "usual", "every"]
TABLES: tuple[Table, ...] = ("vtab", "transfer", "own", "frozen")
COMPARED: dict[Table, tuple[str, ...]] = {
    "vtab": (*VTAB_CORPORA, *GROUP_COLUMNS),
    "transfer": TRANSFER_CORPORA,
    "frozen": ROBUSTNESS,
}
"""Columns of the tables that have published rows."""


@dataclass(frozen=True)
class ScoreReport:
    """The numbers of all score tables."""

    tables: Mapping[Table, Sequence[ModelScores]]
    asked_row: PublishedRow | None
    """The published row that was requested for the differences; None compares each model with the row that matches it."""
    facts: Mapping[str, ModelFacts]
    """Facts about each model by init."""
    coverage: str
    num_left_out: int
    """Number of records that a newer one of the same model, protocol, task and seed replaces."""

    def reference(self, table: Table, row: ModelScores) -> PublishedRow | None:
        """The published row that a model is compared with in a table: the requested one, or the one that matches. Of frozen features only
        scores of the model's own head are published."""
        if table not in COMPARED or (table == "frozen" and row.protocol != "head"):
            return None
        found = self.asked_row or matching_row(
            self.facts[row.init].architecture, self.facts[row.init].data, row.protocol, COMPARED[table]
        )
        return found if found and not {*COMPARED[table]}.isdisjoint({*found.scores, *found.printed_means}) else None

    @property
    def models(self) -> dict[str, list[ModelScores]]:
        """The rows of all tables by init, in the order of the tables."""
        rows: dict[str, list[ModelScores]] = {}
        for table in TABLES:
            for row in self.tables[table]:
                rows.setdefault(row.init, []).append(row)
        return rows

    def checks(self) -> list[tuple[ModelScores, PublishedCheck]]:
        """Published checks: scores of published weights, compared with the scores that were published for them."""
        return [
            (row, check_score(target, corpus, cell.value, cell.num_examples, self.facts[row.init].image_size_px))
            for rows in self.models.values()
            for row in rows
            for target in targets_of(self.facts[row.init].weights or "")
            for corpus, cell in row.cells.items()
            if row.protocol == target.protocol and corpus in target.scores
        ]


def read_report(root: str, compare_with: str | None = None, of: Collection[Score] | None = None) -> ScoreReport:
    """The report of all scores below a root; with `of` only those of the models of these scores, and these scores.

    Raises ValueError if `compare_with` names no published row.
    """
    requested = published_named(compare_with) if compare_with else None
    corpora = list_corpora(root)
    records, left_out = latest_records(
        read_records(open_store(root), say_unreadable), {corpus["digest"] for corpus in corpora}
    )
    if of is not None:
        models = {score.model for score in of} - {None}
        records = [record for record in records if record.score.model in models or record.score in of]
    tables = {
        table: sorted(
            scores_by_model(r for r in records if table_of(r.score.protocol, r.score.task) == table),
            key=lambda row: (row.protocol, row.model is None, row.label, row.init),
        )
        for table in TABLES
    }
    inits = {row.init: row.model for rows in tables.values() for row in rows}
    facts = {init: model_facts(root, model) for init, model in inits.items()}
    return ScoreReport(tables, requested, facts, coverage(corpus["name"] for corpus in corpora), left_out)


def published_for(report: ScoreReport, table: Table, extent: Extent) -> list[PublishedRow]:
    """The published rows of a table, in the order of the papers.

    `compared`: those that models are compared with, or the headlines if there are none. `usual`: also all of VTAB and of robustness
    except version 1, and in the transfer table those of the networks that were scored. `every`: also version 1 and other networks.
    """
    compared = [reference for row in report.tables[table] if (reference := report.reference(table, row))]
    scored = {report.facts[row.init].architecture for row in report.tables[table]} - {None}
    rows = [row for row in ROWS.values() if not {*COMPARED[table]}.isdisjoint({*row.scores, *row.printed_means})]
    if extent == "every":
        return rows
    if extent == "compared":
        return [row for row in rows if row in compared or (row.is_headline and not compared)]
    likely = [row for row in rows if not row.is_v1 and (table != "transfer" or row.architecture in scored)]
    return [row for row in rows if row in (*compared, *likely) or row.is_headline]


def as_data(report: ScoreReport) -> dict[str, Any]:
    """The report as the JSON object of `--json`: scores as fractions, and every published row."""
    return {
        "coverage": report.coverage,
        "records_left_out": report.num_left_out,
        "tables": {table: [_row_data(report, table, row) for row in rows] for table, rows in report.tables.items()},
        "models": {
            init: {"label": rows[0].label, "model": rows[0].model} | asdict(report.facts[init])
            for init, rows in report.models.items()
        },
        "self_check": [{"model": row.label, "protocol": row.protocol, **asdict(c)} for row, c in report.checks()],
        "published": {label: _published_data(row) for label, row in ROWS.items()},
    }


def _row_data(report: ScoreReport, table: Table, row: ModelScores) -> dict[str, Any]:
    reference = report.reference(table, row)
    return {
        "model": row.label,
        "init": row.init,
        "protocol": row.protocol,
        "scores": {corpus: asdict(cell) for corpus, cell in row.cells.items()},
        "means": {group: asdict(mean) for group, mean in vtab_means(row).items()} if table == "vtab" else {},
        "reference": reference.label if reference else None,
        "differences": {name: asdict(d) for name, d in differences(row, reference).items()} if reference else {},
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
