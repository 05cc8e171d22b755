"""The first images of a training as the network gets them, as one PNG."""

import io
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from vitline.infra.storage import Store
from vitline.vit.input.batches import Batch


def save_first_inputs(run: Store, batches: Iterator[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
    """Passes `batches` on unchanged, and writes the first images to `inputs.png` of the run."""
    first = next(batches)
    run.write("inputs.png", contact_sheet(first[0]))
    yield first
    yield from batches


def contact_sheet(batch: Batch, columns: int = 12, rows: int = 4) -> bytes:
    """A PNG grid of the first images of a batch."""
    images = batch.images[batch.valid][: columns * rows].numpy()
    side, gap = images.shape[1], 4
    sheet = np.full((rows * (side + gap) + gap, columns * (side + gap) + gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        y, x = (gap + (index // columns) * (side + gap), gap + (index % columns) * (side + gap))
        sheet[y : y + side, x : x + side] = image
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    return buffer.getvalue()
