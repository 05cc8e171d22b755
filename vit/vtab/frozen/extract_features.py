"""Computes the parts of a feature cache: decode ahead, forward, write behind. What workers of an evaluation run."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from data_prep.shard_format import load_manifest
from infra.config import digest_of
from infra.storage import open_store
from vit.input.batches import Batch, row_batches
from vit.input.image_contract import ImageContract
from vit.models.network import Network
from vit.published import PublishedModel, load_model
from vit.training.world import World
from vit.vtab.frozen.feature_plan import FeaturePart, FeatureSource
from vit.vtab.frozen.features import Features, missing_parts, write_part

BATCH_SIZE = 128


class Extractor:
    """Computes and keeps parts; holds on to the model of the last call.

    Features are what the head reads (`Network.features`): after the tanh of a pre-logits layer where the model has one, else
    the pooled output of the final norm (the "pre_logits" of big_vision's few-shot evaluation). float32 arithmetic.
    Pictures go through the model's image contract, whatever the task; the authors' few-shot evaluation resizes all to 256
    and crops 224 from the centre, so a model is compared with theirs under a contract that says so.
    """

    def __init__(self, root: str, threads: int = 1, batch_size: int = BATCH_SIZE) -> None:
        self._root, self._threads, self._batch_size = root, threads, batch_size
        self._device = World.current().device
        self._model: PublishedModel | None = None

    def ensure(self, parts: Sequence[FeaturePart]) -> Iterator[FeaturePart]:
        """Yields each part once it is kept: those that are kept already first, the others as they are computed.

        Raises RuntimeError where model or corpus are not those that were planned on, ShardError or ValueError naming
        shard and row where an image cannot be read.
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
        found = (manifest.digest, digest_of(manifest.decode_policy))
        if found != (source.corpus_digest, source.decode_digest):
            raise RuntimeError(
                f"{corpus.uri} has digest {manifest.digest[:12]} by now (decode policy {found[1][:12]}); the evaluation was "
                f"planned on {source.corpus_digest[:12]} ({source.decode_digest[:12]}). Evaluate again."
            )
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
                features = part_features(model.network, model.contract, batches, len(part.rows), self._device)
                check_finite(features, part)
                before, behind = behind, (part, writer.submit(write_part, folder, part.key, features))
                if before is not None:
                    yield _settled(*before)
            if behind is not None:
                yield _settled(*behind)

    def model(self, source: FeatureSource) -> PublishedModel:
        """The model of these features, its network on this process's device. Raises RuntimeError if it was replaced."""
        if self._model is None or self._model.digest != source.model_digest:
            self._model = None  # two large models need not fit at once
            model = load_model(source.model)
            if model.digest != source.model_digest:
                raise RuntimeError(
                    f"{source.model} has digest {model.digest[:12]} by now; the evaluation was planned on "
                    f"{source.model_digest[:12]}. Evaluate again."
                )
            model.network.to(self._device)
            self._model = model
        return self._model


def _settled(part: FeaturePart, written: Future[None]) -> FeaturePart:
    written.result()
    return part


@torch.inference_mode()
def part_features(
    network: Network, contract: ImageContract, batches: Iterable[Batch], num_rows: int, device: torch.device
) -> Features:
    """Features of the next `num_rows` images, with what they took. `batches` are taken up to that row and no further."""
    started, cpu_started = time.perf_counter(), time.process_time()
    values, labels, num_labels, left = [], [], [], num_rows
    for batch in batches:
        values.append(network.features(network_input(batch.images, contract, device)))
        several = batch.labels.ndim == 2
        labels.append(batch.labels.nonzero()[:, 1] if several else batch.labels)
        num_labels.append(
            (batch.labels > 0).sum(dim=1) if several else torch.ones(len(batch.labels), dtype=torch.int64)
        )
        left -= batch.num_valid
        if left <= 0:
            break
    assert left == 0, f"{num_rows - left} images came for a part of {num_rows}"
    # Only here does the device have to be waited for.
    features = torch.cat(values).float().cpu()
    return Features(
        features,
        torch.cat(labels),
        torch.cat(num_labels),
        time.perf_counter() - started,
        time.process_time() - cpu_started,
    )


def check_finite(features: Features, part: FeaturePart) -> None:
    """Raises ValueError naming the model and the first row whose features are not finite."""
    bad = (~features.values.isfinite().all(dim=1)).nonzero()
    if len(bad):
        raise ValueError(
            f"{part.source.model} gives features that are not finite for row {part.rows[int(bad[0])]} of split "
            f"{part.split!r} of {part.source.corpus}, and {len(bad) - 1} more. Its training diverged: take an earlier checkpoint."
        )


def network_input(images: Tensor, contract: ImageContract, device: torch.device) -> Float[Tensor, "n 3 H W"]:
    """uint8 (n, H, W, 3) -> what the network takes, on the device; bit for bit as `PublishedModel.normalised`."""
    pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2).float()
    return pixels.div_(255 / (contract.high - contract.low)).add_(contract.low)
