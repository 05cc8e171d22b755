"""The first images of a training as the network gets them, as one PNG."""

from collections.abc import Iterator, Sequence

import numpy as np

from vitline.infra.html.pictures import contact_sheet, image_file
from vitline.infra.storage import Store
from vitline.vit.input.batches import Batch

_GAP_PX = 4


def save_first_inputs(run: Store, batches: Iterator[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
    """Passes `batches` on unchanged, and writes the first images to `inputs.png` of the run."""
    first = next(batches)
    run.write("inputs.png", first_images(first[0]))
    yield first
    yield from batches


def first_images(batch: Batch, columns: int = 12, rows: int = 4) -> bytes:
    """A PNG grid of the first images of a batch."""
    images = batch.images[batch.valid][: columns * rows].numpy()
    white = np.full(batch.images.shape[1:], 255, np.uint8)
    tiles = [*images, *[white] * (columns * rows - len(images))]
    sheet = contact_sheet(tiles, columns, _GAP_PX)
    return image_file(np.pad(sheet, ((_GAP_PX,), (_GAP_PX,), (0,)), constant_values=255))
