"""Fills micro-batches: labels at once, pixels by tasks that decode, augment and mix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vitline.vit.input.augmentations.mixing import Mix, mix_lane
from vitline.vit.input.decoding.batch import Batch
from vitline.vit.input.decoding.native_view import TrainingView
from vitline.vit.input.decoding.several_labels import Labels, MultiLabels
from vitline.vit.input.order import Ints
from vitline.vit.input.read_shards import Example

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
    batches: list[Batch],
    at: Ints,
    examples: Sequence[Example],
    views: Sequence[View],
    mixed_in: Sequence[Example] | None = None,
) -> list[Place]:
    """Gives the examples their places, and fills in their labels: a batch whose images may have several is replaced by one with them.

    `at` counts through the examples of all batches, ascending. `mixed_in` are the partners of the examples.
    """
    places: list[Place] = []
    size = len(batches[0].valid)
    bounds = np.searchsorted(at, np.arange(len(batches) + 1) * size).tolist()
    for number, batch in enumerate(batches):
        here = slice(bounds[number], bounds[number + 1])
        indices = at[here] - number * size
        labels, mixed_labels = _filled(batch.labels, indices, examples[here]), batch.mixed_labels
        batch.valid.numpy()[indices] = True
        if mixed_in is not None and mixed_labels is not None and batch.lam is not None:
            mixed_labels = _filled(mixed_labels, indices, mixed_in[here])
            batch.lam.numpy()[indices] = 1
        batch = batches[number] = replace(batch, labels=labels, mixed_labels=mixed_labels)
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


def _filled(labels: Labels, indices: Ints, examples: Sequence[Example]) -> Labels:
    """Labels of class ids are filled in where they are, several labels are new ones."""
    found = [e.split.mapped(e.label) for e in examples]
    if isinstance(labels, MultiLabels):
        return MultiLabels.of(found, len(labels.ids), indices)
    labels.numpy()[indices] = found
    return labels


def _fill(places: Sequence[Place], mask_bad: bool) -> None:
    for place in places:
        if _written_natively(place):
            continue
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


def _written_natively(place: Place) -> bool:
    view, example = place.view, place.example
    if not isinstance(view, TrainingView) or example.encoded is None or not example.split.cache.is_full:
        return False
    return view.write_natively(example.encoded, example.split.policy, place.batch.images[place.index])


def _fill_and_mix(lanes: Sequence[Sequence[Place]], mix: Mix, mask_bad: bool) -> None:
    for places in lanes:
        _fill(places, mask_bad)
        images, usable = [p.batch.images[p.index] for p in places], [bool(p.batch.valid[p.index]) for p in places]
        for place, mixed in zip(places, mix_lane(images, usable, mix), strict=True):
            if mixed and place.batch.lam is not None:
                place.batch.lam[place.index] = mix.share
