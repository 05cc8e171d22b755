"""VTAB's groups as bars: the means of pipelines, with published rows beside them."""

from collections.abc import Sequence

from vitline.flows.catalog.records import PipelineRecord
from vitline.infra.html.plots import NUM_COLOURS, Plot, bar_groups
from vitline.infra.storage import Store
from vitline.vit.evaluation.reference.published_checks import architecture_of
from vitline.vit.evaluation.reference.published_scores import ROWS, PublishedRow
from vitline.vit.evaluation.reference.report import published_mean
from vitline.vit.evaluation.tasks import GROUPS
from vitline.vit.models.config import network_config

COLUMNS = (*GROUPS, "all")


def vtab_bars(root: Store, records: Sequence[PipelineRecord]) -> Plot | None:
    """The groups that pipelines have whole; None where there is none. Published rows take the colours that are left."""
    ours = {record.key: [record.metrics.get(f"vtab/{group}/top1") for group in COLUMNS] for record in records}
    ours = {key: values for key, values in ours.items() if any(value is not None for value in values)}
    if not ours:
        return None
    beside = published_beside({architecture(root, record) for record in records})[: NUM_COLOURS - len(ours)]
    published = {row.label: [published_mean(row, group) for group in COLUMNS] for row in beside}
    return bar_groups("Mean accuracy of VTAB's groups", COLUMNS, ours | published)


def published_beside(architectures: set[str | None]) -> list[PublishedRow]:
    """The most quoted rows with means of all groups: those of the same networks first, then the best."""
    rows = [row for row in ROWS.values() if row.is_headline and all(published_mean(row, group) for group in COLUMNS)]
    return sorted(rows, key=lambda row: (row.architecture not in architectures, -(published_mean(row, "all") or 0)))


def architecture(root: Store, record: PipelineRecord) -> str | None:
    """The network of a pipeline as the paper names it; None without one on record."""
    run = record.training(root)
    config = run.read_json_or_none("config.json") if run else None
    try:
        return architecture_of(network_config(config["config"]["recipe"]["model"])) if config else None
    except (KeyError, ValueError):  # of a later version, or of none that is known
        return None
