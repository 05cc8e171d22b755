"""Steps in parts that are sent over a network: what other machines have decoded for a rank, and its places in the micro-batches.

Other than input processes of the same machine, those who decode cannot write into memory of the training.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitline.vit.input.decoding.batch import Batch
from vitline.vit.input.decoding.several_labels import Arrays, SeveralLabels
from vitline.vit.input.decoding.training import TrainingInput, TrainingRequest
from vitline.vit.input.order import Ints
from vitline.vit.input.prefetch import Effort, Waits, Work
from vitline.vit.input.schedule import Part


class Spent(NamedTuple):
    """What decoding has waited for and cost so far."""

    waits: Waits = Waits()
    effort: Effort = Effort()
    cpu_s: float = 0.0

    def plus(self, other: "Spent") -> "Spent":
        return Spent(self.waits.plus(other.waits), self.effort.plus(other.effort), self.cpu_s + other.cpu_s)


class FilledPart(NamedTuple):
    """The k examples of a step that belong to a part of the lanes of a rank."""

    at: Ints
    """Their places, counted through the micro-batches, ascending."""
    columns: Mapping[str, np.ndarray]
    """Their rows of the tensors of `Batch` by name: images uint8 (k, size, size, 3), valid bool (k,), ..."""
    bad: list[list[tuple[int, str]]]
    """For each micro-batch, like `Batch.bad`."""
    several: list[dict[str, Arrays]]
    """For each micro-batch, like `Batch.several_labels`."""
    spent: Spent


def filled_parts(asked: TrainingRequest, part: Part) -> Iterator[FilledPart]:
    """Decodes a part of the lanes of a rank, step by step. The resources of `asked` are those of the part."""
    inputs = TrainingInput(asked)
    with inputs.prefetched(part) as steps:
        for share, batches in zip(inputs.shares(part), steps, strict=True):
            tensors = [inputs.tensors_of(batch) for batch in batches]
            places = [*_places(share.at, batches)]
            columns = {
                name: np.concatenate(
                    [of_batch[name].numpy()[rows] for (_, rows), of_batch in zip(places, tensors, strict=True)]
                )
                for name in tensors[0]
            }
            several = [{name: found.arrays() for name, found in b.several_labels.items()} for b in batches]
            spent = Spent(steps.waits, steps.effort, time.process_time())
            yield FilledPart(share.at, columns, [batch.bad for batch in batches], several, spent)


def assembled(asked: TrainingRequest, collect: Callable[[], Sequence[FilledPart]]) -> Iterator[Work[list[Batch]]]:
    """The micro-batches of each step, and the task that fills them with the parts that `collect()` waits for."""
    inputs = TrainingInput(asked)

    def fill(batches: list[Batch]) -> None:
        put_together(batches, collect())

    for share in inputs.shares(part=None):
        batches = inputs.batches(share, [inputs.shape.new() for _ in range(share.num_micro_batches)])
        yield [partial(fill, batches)], batches
        del batches


def put_together(batches: list[Batch], parts: Sequence[FilledPart]) -> None:
    """Fills blank micro-batches with the parts of all lanes of the rank, and their padding. A batch whose images may have several
    labels is replaced."""
    for batch in batches:
        batch.pad()
    for part in parts:
        for (of_part, rows), batch in zip(_places(part.at, batches), batches, strict=True):
            for name, column in part.columns.items():
                getattr(batch, name).numpy()[rows] = column[of_part]
    for i, batch in enumerate(batches):
        for part in parts:
            batch.bad.extend(part.bad[i])
        several: dict[str, Any] = {
            name: SeveralLabels.joined([part.several[i][name] for part in parts]) for name in batch.several_labels
        }
        batches[i] = replace(batch, **several)


def _places(at: Ints, batches: Sequence[Batch]) -> Iterator[tuple[slice, Ints]]:
    """For each micro-batch, which of the places `at` lie in it, and its rows there."""
    size = len(batches[0].valid)
    bounds = np.searchsorted(at, np.arange(len(batches) + 1) * size).tolist()
    for number in range(len(batches)):
        here = slice(bounds[number], bounds[number + 1])
        yield here, at[here] - number * size
