"""Fills micro-batches: labels at once, pixels by tasks that decode, augment and mix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from vit.input.augmentations.mixing import Mix, mix_lane
from vit.input.decoded_cache import Label
from vit.input.decoding.batch import Batch
from vit.input.order import Ints
from vit.input.read_shards import Example

_EXAMPLES_PER_TASK = 16

View = Callable[..., None]
"""`view(pixels, out=...)` writes the view of a decoded image into an image of a batch."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the view of an example goes."""

    batch: Batch
    index: int
    example: Example
    view: View


def place_examples(
    batches: Sequence[Batch],
    at: Ints,
    examples: Sequence[Example],
    views: Sequence[View],
    mixed_in: Sequence[Example] | None = None,
) -> list[Place]:
    """Gives the examples their places, and fills in their labels.

    `at` counts through the examples of all batches, ascending. `mixed_in` are the partners of the examples.
    """
    places: list[Place] = []
    size = len(batches[0].valid)
    bounds = np.searchsorted(at, np.arange(len(batches) + 1) * size).tolist()
    for number, batch in enumerate(batches):
        here = slice(bounds[number], bounds[number + 1])
        indices = at[here] - number * size
        _set_labels(batch.labels, indices, examples[here])
        batch.valid.numpy()[indices] = True
        if mixed_in is not None and batch.partner_labels is not None and batch.own_share is not None:
            _set_labels(batch.partner_labels, indices, mixed_in[here])
            batch.own_share.numpy()[indices] = 1
        places += map(partial(Place, batch), indices.tolist(), examples[here], views[here])
    return places


def filling_tasks(places: Sequence[Place], *, mask_bad: bool) -> list[Callable[[], None]]:
    """The tasks that fill the images of the places. With `mask_bad`, an example that cannot be decoded is masked instead of raising."""
    chunks = range(0, len(places), _EXAMPLES_PER_TASK)
    return [partial(_fill, places[i : i + _EXAMPLES_PER_TASK], mask_bad) for i in chunks]


def mixing_tasks(places: Sequence[Place], lane: Ints, mix: Mix, *, mask_bad: bool) -> list[Callable[[], None]]:
    """The tasks that fill the images and mix them. A task has whole lanes, so none waits for another."""
    by_lane = np.argsort(lane, kind="stable")
    lanes = np.split(by_lane, np.flatnonzero(np.diff(lane[by_lane])) + 1) if len(lane) else []
    tasks: list[Callable[[], None]] = []
    waiting: list[list[Place]] = []
    for number, of_lane in enumerate(lanes, start=1):
        waiting.append([places[i] for i in of_lane.tolist()])
        if number == len(lanes) or sum(map(len, waiting)) >= _EXAMPLES_PER_TASK:
            tasks.append(partial(_fill_and_mix, waiting, mix, mask_bad))
            waiting = []
    return tasks


def _set_labels(labels: Tensor, indices: Ints, examples: Sequence[Example]) -> None:
    found: list[Label] = [e.split.mapped(e.label) for e in examples]
    if labels.dim() == 1:
        labels.numpy()[indices] = found
        return
    multi_hot = labels.numpy()
    multi_hot[indices] = 0
    classes_of = [([label], None) if isinstance(label, int) else label for label in found]
    row = np.repeat(indices, [len(ids) for ids, _ in classes_of])
    ids = np.array([i for ids, _ in classes_of for i in ids], dtype=np.int64)
    weights = [w for ids, given in classes_of for w in given or [1.0] * len(ids)]
    # The largest, because a class map may name a class twice.
    np.maximum.at(multi_hot, (row, ids), np.array(weights, dtype=np.float32))


def _fill(places: Sequence[Place], mask_bad: bool) -> None:
    for place in places:
        batch, i = place.batch, place.index
        try:
            pixels = place.example.decoded()
        except ValueError as error:
            if not mask_bad:
                raise
            batch.images[i] = 0
            batch.valid[i] = False
            batch.bad.append((i, f"{place.example.split.where(place.example.row)}: {error.__cause__}"))
        else:
            place.view(pixels, out=batch.images[i])


def _fill_and_mix(lanes: Sequence[Sequence[Place]], mix: Mix, mask_bad: bool) -> None:
    for places in lanes:
        _fill(places, mask_bad)
        images, usable = [p.batch.images[p.index] for p in places], [bool(p.batch.valid[p.index]) for p in places]
        for place, mixed in zip(places, mix_lane(images, usable, mix), strict=True):
            if mixed and place.batch.own_share is not None:
                place.batch.own_share[place.index] = mix.share
