"""Draws the figures of a trained model and stores them in the folder of its run."""

import logging
from collections.abc import Iterable

import torch

from vitline.infra.storage import Store
from vitline.vit.input.batches import Batch
from vitline.vit.models.network import Network, normalised
from vitline.vit.pages.figures import inspect_network
from vitline.vit.pages.page import write_inspection

log = logging.getLogger(__name__)
FOLDER = "inspection"


def inspect_run(run: Store, network: Network, batches: Iterable[Batch], num_images: int, title: str) -> list[str]:
    """Writes the paper's figures of `network`, with attention on the first `num_images` of `batches`. Returns their keys.

    A figure that cannot be drawn does not fail the training: the error is logged, and no key is returned.
    """
    try:
        images: list[torch.Tensor] = []
        for batch in batches:
            images.append(batch.images[batch.valid])
            if sum(map(len, images)) >= num_images:
                break
        shown = torch.cat(images)[:num_images]
        inspection = inspect_network(network, normalised(shown.to(next(network.parameters()).device)))
        return [f"{FOLDER}/{key}" for key in write_inspection(run.child(FOLDER), inspection, shown.numpy(), title)]
    except Exception:
        log.warning("the figures of %s could not be drawn", title, exc_info=True)
        return []
