"""Batches of one corpus."""

from typing import Any

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import Store
from vitline.vit.input.batches import Source, source_batches
from vitline.vit.input.config import InputConfig
from vitline.vit.input.decoding.batch import Batch
from vitline.vit.input.prefetch import Prefetcher


def train_batches(
    corpus: Store, manifest: Manifest, split: str, config: InputConfig, **given: Any
) -> Prefetcher[list[Batch]]:
    """`source_batches` of a split of one corpus."""
    return source_batches([Source(corpus, manifest, split)], config, **given)
