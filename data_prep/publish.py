"""The last step: class map, refused examples, shard list, report, and then the manifest that makes the corpus exist."""

import importlib.metadata
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.config import CorpusConfig
from data_prep.plan_shards import CorpusPlan, Selection
from data_prep.progress import Progress
from data_prep.records import SourcePlan, write_table
from data_prep.report import ReportData, render_report
from data_prep.shard_format import (
    CLASSES_KEY,
    MANIFEST_KEY,
    REJECTS_KEY,
    REPORT_KEY,
    SHARDS_KEY,
    Counts,
    Manifest,
)
from data_prep.write_shards import ShardInfo
from infra.storage import Store

_SHARDS_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("content_digest", pa.string(), nullable=False),
    ]
)
_LIBRARIES = ("pyarrow", "pillow", "simplejpeg", "numpy")


def publish(
    corpus: Store,
    config: CorpusConfig,
    source: SourcePlan,
    selection: Selection,
    plan: CorpusPlan,
    shards: Mapping[str, ShardInfo],
    seconds: Mapping[str, float],
) -> Manifest:
    """Write everything beside the shards, the manifest last. Writing it again gives the same corpus."""
    progress = Progress(corpus, "publish", 1, "corpus", refused=selection.rejects.num_rows)
    lines = [shards[shard.key].model_dump() for shard in plan.shards]
    write_table(corpus, SHARDS_KEY, pa.Table.from_pylist(lines, schema=_SHARDS_SCHEMA))
    write_table(corpus, REJECTS_KEY, selection.rejects)
    corpus.write_json(CLASSES_KEY, selection.class_map.as_file())
    manifest = _manifest(corpus, config, source, selection, plan, seconds)
    report = render_report(ReportData(manifest, selection.class_map, selection.accepted, selection.rejects))
    corpus.write(REPORT_KEY, report.encode())
    corpus.write_json(MANIFEST_KEY, manifest.model_dump(mode="json"))
    progress.add(1)
    return manifest


def _manifest(
    corpus: Store,
    config: CorpusConfig,
    source: SourcePlan,
    selection: Selection,
    plan: CorpusPlan,
    seconds: Mapping[str, float],
) -> Manifest:
    accepted, rejects = selection.accepted, selection.rejects
    provenance: dict[str, Any] = {
        "request": config.model_dump(mode="json"),
        "origin": source.origin,
        "credit": source.credit,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return Manifest(
        name=config.name,
        version=corpus.uri.rpartition("/")[2],
        digest=plan.digest,
        class_map_digest=selection.class_map.digest,
        num_classes=len(selection.class_map.classes),
        single_label=selection.single_label,
        has_weights=selection.has_weights,
        order_seed=config.recipe.order_seed,
        splits=plan.splits,
        decode_policy=config.recipe.decode,
        counts=Counts(
            num_found=source.num_examples,
            num_accepted=accepted.num_rows,
            num_refused=rejects.num_rows,
            num_bytes=pc.sum(accepted["num_bytes"]).as_py(),
            refused=dict(sorted(Counter(rejects["reason"].to_pylist()).items())),
        ),
        provenance=provenance,
    )
