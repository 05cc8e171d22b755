"""Computes feature parts: images are prefetched, and parts are written in the background. Workers of an evaluation run it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import digest_of
from vitline.infra.records import check_digest
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store, open_store
from vitline.vit.features.feature_plan import FeaturePart, FeatureSource
from vitline.vit.features.features import Features, missing_parts, write_part
from vitline.vit.input.batches import Batch, Labels, SeveralLabels, row_batches
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.network import Network
from vitline.vit.published.models import PublishedModel, load_model
from vitline.vit.training.world import World

BATCH_SIZE = 128


class Extractor:
    """Computes and stores parts, and keeps the model of the last call loaded.

    Features are the input of the head (`Network.features`), in float32: the output of the tanh of a pre-logits layer if
    the model has one, else the pooled output of the final norm (the "pre_logits" of big_vision's few-shot evaluation).
    Every task uses the image contract of the model. The authors' few-shot evaluation resizes to 256 and crops the central
    224, so a comparison with their scores needs a model whose contract does the same.
    """

    def __init__(self, root: str, threads: int = 1, batch_size: int = BATCH_SIZE) -> None:
        self._root, self._threads, self._batch_size = root, threads, batch_size
        self.device = World.current().device
        self._model: PublishedModel | None = None

    def ensure(self, parts: Sequence[FeaturePart]) -> Iterator[FeaturePart]:
        """Yields each part once it is stored: of each split first the parts stored before, then the others as computed.

        Raises RuntimeError if model or corpus have changed since the evaluation was planned, and ShardError or ValueError
        naming shard and row if an image cannot be read.
        """
        for (source, split), group in groupby(parts, key=lambda part: (part.source, part.split)):
            wanted = list(group)
            todo = missing_parts(open_store(self._root).child(source.folder), wanted)
            yield from (part for part in wanted if part not in todo)
            if todo:
                yield from self._compute(source, split, todo)

    def _compute(self, source: FeatureSource, split: str, parts: Sequence[FeaturePart]) -> Iterator[FeaturePart]:
        model, corpus = self.model(source), open_store(source.corpus)
        manifest = load_manifest(corpus)
        check_digest(corpus.uri, manifest.digest, source.corpus_digest)
        check_digest(f"the decode policy of {corpus.uri}", digest_of(manifest.decode_policy), source.decode_digest)
        folder = open_store(self._root).child(source.folder)
        view = model.contract.evaluation
        with (
            row_batches(
                corpus,
                manifest,
                split,
                view,
                [part.rows for part in parts],
                batch_size=self._batch_size,
                threads=self._threads,
            ) as batches,
            ThreadPoolExecutor(1, thread_name_prefix="feature-writer") as writer,
        ):
            behind: tuple[FeaturePart, Future[None]] | None = None
            for part in parts:
                computed = self.compute(model, batches, part)
                before, behind = behind, (part, writer.submit(self.write, model, folder, part, computed))
                if before is not None:
                    yield _settled(*before)
            if behind is not None:
                yield _settled(*behind)

    def compute(self, model: PublishedModel, batches: Iterator[Batch], part: FeaturePart) -> Any:
        """What is stored for a part, from the next images of `batches`. Raises ValueError if it is not finite."""
        features = part_features(model.network, model.contract, batches, len(part.rows), self.device)
        check_finite(features, part)
        return features

    def write(self, model: PublishedModel, folder: Store, part: FeaturePart, computed: Any) -> None:
        """Stores what was computed, in another thread, unless it is there already."""
        write_part(folder, part.key, computed)

    def model(self, source: FeatureSource) -> PublishedModel:
        """The model of these features, on the device of this process. Raises RuntimeError if it was replaced."""
        if self._model is None or self._model.digest != source.model_digest:
            self._model = None  # frees the old model first; two large ones may not fit into memory
            model = load_model(source.model)
            check_digest(source.model, model.digest, source.model_digest)
            model.network.to(self.device)
            self._model = model
        return self._model


def _settled(part: FeaturePart, written: Future[None]) -> FeaturePart:
    written.result()
    return part


@torch.inference_mode()
def part_features(
    network: Network, contract: ImageContract, batches: Iterable[Batch], num_rows: int, device: torch.device
) -> Features:
    """Features of the next `num_rows` images of `batches`, with the time that they took. Consumes no later batch."""
    started, cpu_started = time.perf_counter(), time.process_time()
    values, labels, num_labels, left = [], [], [], num_rows
    for batch in batches:
        note_progress()
        values.append(network.features(network_input(batch.images, contract, device)))
        ids, sizes = batch_labels(batch.labels)
        labels.append(ids)
        num_labels.append(sizes)
        left -= batch.num_valid
        if left <= 0:
            break
    assert left == 0, f"{num_rows - left} images came for a part of {num_rows}"
    # This is the only place that waits for the device.
    features = torch.cat(values).float().cpu()
    return Features(
        features,
        torch.cat(labels),
        torch.cat(num_labels),
        time.perf_counter() - started,
        time.process_time() - cpu_started,
    )


def check_finite(features: Features, part: FeaturePart) -> None:
    """Raises ValueError naming the model and the first row with features that are not finite."""
    bad = (~features.values.isfinite().all(dim=1)).nonzero()
    if len(bad):
        raise ValueError(
            f"{part.source.model} gives features that are not finite for row {part.rows[int(bad[0])]} of split "
            f"{part.split!r} of {part.source.corpus}, and for {len(bad) - 1} more. Its training has probably diverged; "
            "use another model."
        )


def batch_labels(labels: Labels) -> tuple[Tensor, Tensor]:
    """The class ids of all images, ascending in each, and how many each image has."""
    if not isinstance(labels, SeveralLabels):
        return labels, torch.ones(len(labels), dtype=torch.int64)
    dense = labels.dense(int(labels.ids.max()) + 1 if labels.ids.numel() else 1)
    return dense.nonzero()[:, 1], (dense > 0).sum(dim=1)


def network_input(images: Tensor, contract: ImageContract, device: torch.device) -> Float[Tensor, "n 3 H W"]:
    """uint8 (n, H, W, 3) -> the network's input on the device, bit for bit equal to `PublishedModel.normalised`."""
    pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2).float()
    return pixels.div_(255 / (contract.high - contract.low)).add_(contract.low)
