"""A page that shows what a training sees: originals, evaluation and training views with their draws, and mixed pairs.

Rows, draws and mixes are those of the training: views of epoch e are what its epoch e reads, and the mixed pair of a step is
what that step trains on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import torch

from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.infra.config import tree_of
from vitline.infra.html.page import data_uri, render
from vitline.infra.html.pictures import image_file, thumbnail
from vitline.vit.config import TrainRecipe
from vitline.vit.corpora.training_corpora import TrainingCorpora
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.input.augment import (
    evaluation_pixels,
    inception_crop,
    is_flipped,
    random_crop,
    train_draws,
    train_operations,
    train_pixels,
)
from vitline.vit.input.augmentations.mixing import draw_mix, mix_lane, partners
from vitline.vit.input.batches import Source, order_of_training
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.decoded_cache import DecodedCache, Label
from vitline.vit.input.read_shards import RowGroup, SplitReader
from vitline.vit.input.schedule import RankBatch

_MOST_PX, _SMALL_PX = 320, 96
_GROUPS_IN_MEMORY = 8


@dataclass(frozen=True)
class View:
    """Pixels (height, width, 3), uint8, and what they are, in lines of text."""

    pixels: np.ndarray
    heading: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Shown:
    """Some views that belong together."""

    title: str
    views: Sequence[View]


@dataclass(frozen=True)
class Views:
    """What the page shows."""

    examples: Sequence[Shown]
    mixed: Sequence[Shown]


def collect_views(
    corpora: TrainingCorpora, split: str, recipe: TrainRecipe, *, examples: int, views: int, mixed: int
) -> Views:
    """The first `examples` of the training, each with `views` training views, and a pair of each of the first `mixed` steps.

    Images are decoded in the decoding process. Raises ValueError for an image that cannot be decoded, and if lanes or batch do
    not fit the split.
    """
    augment, seed, batch = recipe.input.augment, recipe.seed, recipe.input.global_batch_size
    parts = sources_of(corpora, split)
    sources = [_Source(corpora, part) for part in parts]
    try:
        steps = order_of_training(parts, recipe.input, seed, world_size=1, most_examples=batch)
        num_shown = min(examples, sum(part.num_rows(split) for part in corpora.parts))
        shown = list[Shown]()
        for share in steps.shares(0, -(-num_shown // batch)):
            rows = zip(share.source.tolist(), share.rows.row.tolist(), strict=True)
            shown += [
                _example(sources[i], row, seed, augment, views) for i, row in islice(rows, num_shown - len(shown))
            ]
        shares = steps.shares(0, mixed if augment.mixes else 0)
        return Views(shown, [_mixed_pair(sources, share, seed, augment) for share in shares])
    finally:
        for source in sources:
            source.close()


def views_html(found: Views, recipe: TrainRecipe, *, title: str, lead: str) -> str:
    """One self-contained page."""
    kind = " large small" if recipe.input.augment.image_size_px <= _SMALL_PX else " large"
    settings = [
        [name, "none" if value is None else str(value)] for name, value in tree_of(recipe.input.augment).items()
    ]
    parts = [
        [(each.title, [(_data_uri(view.pixels), view.heading, view.lines) for view in each.views]) for each in of_part]
        for of_part in (found.examples, found.mixed)
    ]
    return render(
        "vit/pages/views.html.j2",
        title=title,
        lead=lead,
        kind=kind,
        settings=settings,
        examples=parts[0],
        mixed=parts[1],
        mixes=recipe.input.augment.mixes,
    )


class _Source:
    """Pixels and labels of the rows of one corpus."""

    def __init__(self, corpora: TrainingCorpora, source: Source) -> None:
        self._reader = SplitReader(source.corpus, source.manifest, source.split, DecodedCache(0), source.labels)
        self._groups, self._policy = self._reader.groups, source.manifest.decode_policy
        self._classes = corpora.class_names()
        self.name = f"{source.manifest.name}, " if len(corpora.parts) > 1 else ""
        self._load = lru_cache(maxsize=_GROUPS_IN_MEMORY)(self._reader.load)
        self.close = self._reader.close

    def pixels(self, row: int) -> np.ndarray:
        loaded, at = self._place(row)
        try:
            return decode_sandboxed(loaded.images[at].as_py(), self._policy)
        except ImageRejected as error:
            raise ValueError(
                f"{self._reader.where(row)} cannot be decoded: {error}. `vitline data verify NAME --pixels` lists all such images."
            ) from error

    def label(self, row: int) -> str:
        """The names of the classes of a row."""
        loaded, at = self._place(row)
        label: Label = self._reader.mapped(loaded.labels[at])
        ids = [label] if isinstance(label, int) else label[0]
        return ", ".join(self._classes[i] for i in ids) or "no label"

    def _place(self, row: int) -> tuple[RowGroup, int]:
        group = int(self._groups.group_of(np.array(row)))
        return self._load(group), row - int(self._groups.first_row(np.array(group)))


def _example(source: _Source, row: int, seed: int, augment: AugmentConfig, views: int) -> Shown:
    image = source.pixels(row)
    height, width = image.shape[:2]
    size = f"{augment.image_size_px} x {augment.image_size_px} px"
    shown = [View(image, "original", [f"{width} x {height} px"])]
    shown.append(View(evaluation_pixels(image, augment), "evaluation", [size]))
    shown += [_train_view(image, seed, epoch, row, augment, f"epoch {epoch}") for epoch in range(views)]
    return Shown(f"{source.label(row)}, {source.name}row {row:,}", shown)


def _train_view(image: np.ndarray, seed: int, epoch: int, row: int, augment: AugmentConfig, heading: str) -> View:
    draws = train_draws(seed, epoch, row, augment.randaugment_layers).tolist()
    out = torch.empty(augment.image_size_px, augment.image_size_px, 3, dtype=torch.uint8)
    train_pixels(image, draws, augment, out)
    return View(out.numpy(), heading, _drawn(image, draws, augment))


def _drawn(image: np.ndarray, draws: Sequence[float], augment: AugmentConfig) -> list[str]:
    """The drawn parameters of a training view, in the order in which they apply."""
    lines = []
    if augment.train_crop == "inception":
        box = inception_crop(image.shape[0], image.shape[1], draws, augment.min_area_fraction)
        lines.append(f"crop {box.words}")
    elif augment.train_resize_px is not None:
        box = random_crop(augment.train_resize_px, draws, augment.image_size_px)
        lines.append(f"crop {box.words} of {augment.train_resize_px}")
    if is_flipped(draws, augment):
        lines.append("mirrored")
    return lines + [f"{each.name} {each.parameters}".strip() for each in train_operations(draws, augment)]


def _mixed_pair(sources: Sequence[_Source], share: RankBatch, seed: int, augment: AugmentConfig) -> Shown:
    """An image of a step's batch, the one that is mixed into it, and the result; another position in each step."""
    rows, step = share.rows, share.step
    own = step % len(share.slots)
    other, mix = int(partners(rows.lane)[own]), draw_mix(seed, step, augment)
    views, labels = [], []
    for i, heading in ((own, "image"), (other, "partner")):
        row, source = int(rows.row[i]), sources[int(share.source[i])]
        labels.append(source.label(row))
        drawn = _train_view(source.pixels(row), seed, int(rows.epoch[i]), row, augment, heading)
        views.append(View(drawn.pixels, heading, [labels[-1], *drawn.lines]))
    images = [torch.from_numpy(view.pixels.copy()) for view in (views[1], views[0])]
    alone = own == other or not mix_lane(images, [True, True], mix)[1]
    shares = [f"{mix.share:.3f} {labels[0]}", f"{1 - mix.share:.3f} {labels[1]}"]
    lines = ["alone in its lane: not mixed"] if alone else [*mix.words, f"target {shares[0]}", f"+ {shares[1]}"]
    views.append(View((images[1] if not alone else torch.from_numpy(views[0].pixels)).numpy(), "mixed", lines))
    return Shown(f"step {step + 1}, position {own}", views)


def _data_uri(pixels: np.ndarray) -> str:
    image = thumbnail(pixels, _MOST_PX)
    return data_uri(image_file(image, "WEBP", quality=90, lossless=max(image.size) <= _SMALL_PX), "WEBP")
