"""Predicts the classes of a corpus, part by part. Knows nothing of Ray: the caller passes in what computes parts."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from vitline.data_prep.parquet_files import open_parquet
from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.infra.runs.progress import ProgressWriter
from vitline.infra.storage import Store, open_store
from vitline.vit.features.extract_features import Extractor, check_finite, for_each_row
from vitline.vit.features.feature_plan import PART_ROWS, FeaturePart
from vitline.vit.features.frozen import ComputeParts, ensure_parts
from vitline.vit.features.prediction_plan import FOLDER, PredictionSource, PredictionSpec, plan_predictions
from vitline.vit.input.batches import Batch
from vitline.vit.input.order import RowGroups
from vitline.vit.published.models import PublishedModel

COUNTS = b"vitline.counts"
"""Metadata of a part: its `Counts` as JSON."""
SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("labels", pa.list_(pa.string()), nullable=False),
        pa.field("class", pa.string(), nullable=False),
        pa.field("score", pa.float32(), nullable=False),
        pa.field("classes", pa.list_(pa.string()), nullable=False),
        pa.field("class_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("scores", pa.list_(pa.float32()), nullable=False),
    ]
)
"""Row in the split; names of its labels in the corpus; the most probable class and its softmax probability; the `top_k` most probable
classes, their ids in the model and their probabilities."""
_READERS = 16


class Counts(NamedTuple):
    """Images of a part, or of a whole run."""

    images: int
    known: int
    """Those with a label that is the name of a class of the model."""
    hits: int
    """Those of them whose most probable class is one of their labels."""


class Best(NamedTuple):
    """The k most probable classes of n images, and their softmax probabilities, in descending order."""

    ids: Int64[np.ndarray, "n k"]
    scores: Float32[np.ndarray, "n k"]


def predict(
    run: Store,
    spec: PredictionSpec,
    compute_parts: ComputeParts,
    check_lease: Callable[[], object] = lambda: None,
) -> Counts | None:
    """Computes the parts that are missing, or returns None if a stop was requested. Finished parts are kept.

    Raises whatever `compute_parts` raises. `check_lease` is called before progress is written.
    """
    parts = plan_predictions(spec, load_manifest(open_store(spec.corpus)))
    progress = partial(ProgressWriter, run, "images", check_lease=check_lease)
    if not ensure_parts(open_store(spec.root), parts, progress, compute_parts):
        return None
    return counts_of(run.child(FOLDER), parts)


def counts_of(folder: Store, parts: Sequence[FeaturePart]) -> Counts:
    """The sum over all parts; reads only their footers."""

    def read(part: FeaturePart) -> Counts:
        with folder.open(part.key) as file, open_parquet(file) as parquet:
            return Counts(**json.loads(parquet.metadata.metadata[COUNTS]))

    with ThreadPoolExecutor(_READERS) as pool:
        each = list(pool.map(read, parts))
    return Counts(*(sum(values) for values in zip(*each, strict=True))) if each else Counts(0, 0, 0)


class Predictor(Extractor):
    """Computes and stores parts of predictions; a worker keeps it, and with it the model."""

    def compute(self, model: PublishedModel, batches: Iterator[Batch], part: FeaturePart) -> Best:
        source = part.source
        assert isinstance(source, PredictionSource)
        best = best_classes(model, batches, len(part.rows), source.top_k, self.device)
        check_finite(best.scores, "probabilities", part)
        return best

    def write(self, model: PublishedModel, folder: Store, part: FeaturePart, computed: Best) -> None:
        folder.create_if_absent(part.key, part_file(model, part, computed))


def best_classes(
    model: PublishedModel, batches: Iterable[Batch], num_rows: int, top_k: int, device: torch.device
) -> Best:
    """The classes of the next `num_rows` images of `batches`."""
    k = min(top_k, len(model.classes))

    def best(batch: Batch, images: Tensor) -> Sequence[Tensor]:
        scores, ids = model.network(images).float().softmax(dim=-1).topk(k)
        return scores, ids

    scores, ids = for_each_row(best, model.contract, batches, num_rows, device)
    return Best(ids.numpy(), scores.numpy())


def part_file(model: PublishedModel, part: FeaturePart, best: Best) -> bytes:
    """The Parquet file of a part: predictions beside ids and labels of the corpus."""
    examples, names = rows_of(part), np.array(model.classes, dtype=object)
    label_names = load_class_names(open_store(part.source.corpus))
    labels = [[label_names[label] for label in of_image] for of_image in examples["labels"].to_pylist()]
    classes, known = names[best.ids], set(model.classes)
    counts = Counts(
        images=len(labels),
        known=sum(not known.isdisjoint(of_image) for of_image in labels),
        hits=sum(best_class in of_image for best_class, of_image in zip(classes[:, 0], labels, strict=True)),
    )
    columns = {
        "example_id": examples["example_id"],
        "split": [part.split] * len(labels),
        "row": np.arange(part.rows.start, part.rows.stop),
        "labels": labels,
        "class": classes[:, 0].tolist(),
        "score": best.scores[:, 0],
        "classes": classes.tolist(),
        "class_ids": best.ids.tolist(),
        "scores": best.scores.tolist(),
    }
    schema, file = SCHEMA.with_metadata({COUNTS: json.dumps(counts._asdict()).encode()}), io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), file, compression="zstd", row_group_size=PART_ROWS)
    return file.getvalue()


def rows_of(part: FeaturePart) -> pa.Table:
    """Ids and labels of the images of a part, which consists of whole row groups."""
    corpus = open_store(part.source.corpus)
    manifest = load_manifest(corpus)
    groups = RowGroups.of(manifest.split(part.split))
    first, last = (int(group) for group in groups.group_of(np.array([part.rows.start, part.rows.stop - 1])))
    with ShardReader(corpus, manifest, part.split) as reader:
        return pa.concat_tables(reader.row_groups(range(first, last + 1), ["labels", "example_id"]))
