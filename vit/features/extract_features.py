"""Computes feature parts: images are prefetched, and parts are written in the background. Workers of an evaluation run it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import digest_of
from vitline.infra.records import check_digest
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store, open_store
from vitline.vit.features.feature_plan import FeaturePart, FeatureSource
from vitline.vit.features.features import Features, missing_parts, write_part
from vitline.vit.input.batches import Batch, Labels, MultiLabels, row_batches
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.network import Network, normalised
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
        self._model: PublishedModel | None = None

    @cached_property
    def device(self) -> torch.device:
        """That of the process that computes, which is not the one that makes the extractor."""
        return World.current().device

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
        check_finite(features.values.numpy(), "features", part)
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
def for_each_row(
    compute: Callable[[Batch, Tensor], Sequence[Tensor]],
    contract: ImageContract,
    batches: Iterable[Batch],
    num_rows: int,
    device: torch.device,
) -> list[Tensor]:
    """What `compute` gives for the next `num_rows` images of `batches`, on the CPU. Consumes no later batch.

    `compute` gets a batch and its images as a network takes them, and returns tensors of the same kinds for each batch.
    """
    computed, left = [], num_rows
    for batch in batches:
        note_progress()
        images = normalised(batch.images.to(device, non_blocking=True), contract.low, contract.high)
        computed.append(compute(batch, images))
        left -= batch.num_valid
        if left <= 0:
            break
    assert left == 0, f"{num_rows - left} images came for a part of {num_rows}"
    # This is the only place that waits for the device.
    return [torch.cat(column).cpu() for column in zip(*computed, strict=True)]


def part_features(
    network: Network, contract: ImageContract, batches: Iterable[Batch], num_rows: int, device: torch.device
) -> Features:
    """Features of the next `num_rows` images of `batches`, with the time that they took."""
    started, cpu_started = time.perf_counter(), time.process_time()

    def features(batch: Batch, images: Tensor) -> Sequence[Tensor]:
        return network.features(images).float(), *batch_labels(batch.labels)

    values, labels, num_labels = for_each_row(features, contract, batches, num_rows, device)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return Features(values, labels, num_labels, wall_s, cpu_s)


def check_finite(values: np.ndarray, what: str, part: FeaturePart) -> None:
    """Raises ValueError naming the model and the first row with values (n, k) that are not finite."""
    if (bad := ~np.isfinite(values).all(axis=1)).any():
        raise ValueError(
            f"{part.source.model} gives {what} that are not finite for row {part.rows[int(bad.argmax())]} of split "
            f"{part.split!r} of {part.source.corpus}, and for {bad.sum() - 1} more. Its training has probably diverged; "
            "use another model."
        )


def batch_labels(labels: Labels) -> tuple[Tensor, Tensor]:
    """The class ids of all images, ascending in each, and how many each image has."""
    if not isinstance(labels, MultiLabels):
        return labels, torch.ones(len(labels), dtype=torch.int64)
    dense = labels.dense(int(labels.ids.max()) + 1 if labels.ids.numel() else 1)
    return dense.nonzero()[:, 1], (dense > 0).sum(dim=1)
