"""A self-contained HTML page of the examples with the highest loss, and of those whose label may be wrong."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
from PIL import Image

from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.data_prep.shard_format import Manifest, ShardReader
from vitline.infra.html.page import data_uri, render
from vitline.infra.html.pictures import image_file, thumbnail
from vitline.infra.html.text import shortened_list
from vitline.infra.storage import Store
from vitline.vit.input.order import RowGroups
from vitline.vit.training.predictions import Predictions

MAX_SHOWN = 24
"""Images in each of the two lists."""
SURE, MIN_OTHERS = 0.9, 10
_MAX_SIDE_PX, _SMALL_PX, _MAX_NAMES = 160, 80, 5
# Each thread holds one row group of about 8 MiB. Reading one from S3 takes a few hundred ms.
_READ_THREADS = 4


@dataclass(frozen=True)
class Shown:
    """What the page shows of an example, in addition to its prediction."""

    example_id: str
    labels: tuple[int, ...]
    """All labels of the example in the corpus."""
    picture: str
    """Data URI of the image, or the reason why it cannot be shown."""
    small: bool
    """True for a small image, which the page enlarges."""


def top_losses(predictions: Predictions, most: int = MAX_SHOWN) -> np.ndarray:
    """Indices into `predictions` of the largest losses, largest first, ties by row. NaN counts as the largest loss."""
    loss = np.where(np.isnan(predictions.loss), np.inf, predictions.loss)
    return np.lexsort((predictions.row, -loss))[:most]


def suspicious(predictions: Predictions, most: int = MAX_SHOWN) -> np.ndarray:
    """Indices into `predictions` of examples whose label may be wrong, by decreasing probability of the prediction.

    The model predicts another class than the label, with a probability of at least 0.9, and such predictions are
    reliable: at least ten other examples are predicted as that class with that probability, and for at least 90 % of
    them this is correct. A weak model has no such examples. The idea is that of confident learning (arXiv:1911.00068),
    where the threshold is the mean probability of each class; here it is fixed, so that pages are comparable.
    """
    sure, wrong = predictions.probability >= SURE, ~predictions.right
    size = int(predictions.predicted.max(initial=0)) + 1
    leases = np.bincount(predictions.predicted[sure], minlength=size)
    kept = np.bincount(predictions.predicted[sure & ~wrong], minlength=size)
    others = leases - 1
    believed = (others >= MIN_OTHERS) & (kept >= SURE * others)
    found = np.flatnonzero(sure & wrong & believed[predictions.predicted])
    order = np.lexsort((predictions.row[found], -predictions.loss[found], -predictions.probability[found]))
    return found[order][:most]


def load_shown(corpus: Store, manifest: Manifest, split: str, rows: Iterable[int]) -> dict[int, Shown]:
    """Ids, labels and thumbnails of some rows of a split, by row. Reads only the row groups that contain them.

    Raises ShardError if a row group differs from the manifest.
    """
    groups = RowGroups.of(manifest.split(split))
    wanted: dict[int, list[int]] = {}
    for row in sorted(set(rows)):
        wanted.setdefault(int(groups.group_of(np.array(row))), []).append(row)
    columns = ["image", "labels", "example_id"]
    with ShardReader(corpus, manifest, split) as reader:

        def load(group: int) -> dict[int, Shown]:
            table, first = reader.row_group(group, columns), int(groups.first_row(np.array(group)))
            examples = table.take([row - first for row in wanted[group]]).to_pylist()
            return {row: _shown(example, manifest) for row, example in zip(wanted[group], examples, strict=True)}

        with ThreadPoolExecutor(_READ_THREADS) as pool:
            return {row: shown for part in pool.map(load, wanted) for row, shown in part.items()}


class _ImageField(TypedDict):
    bytes: bytes


class _ShardRow(TypedDict):
    """The columns of a shard that the page reads."""

    example_id: str
    labels: list[int]
    image: _ImageField


class _Card(NamedTuple):
    """An example on the page."""

    shown: Shown
    classes: str
    predicted: str
    probability: float
    loss: float


def top_losses_page(
    predictions: Predictions, corpus: Store, manifest: Manifest, split: str, names: Sequence[str], title: str
) -> str:
    """The page: up to 24 examples with the largest loss, and up to 24 whose label may be wrong.

    `names` are the class names by label id. Raises ShardError like `load_shown`.
    """
    worst, doubted = top_losses(predictions), suspicious(predictions)
    shown = load_shown(corpus, manifest, split, predictions.row[np.concatenate([worst, doubted])].tolist())

    def card(place: int) -> _Card:
        example = shown[int(predictions.row[place])]
        return _Card(
            shown=example,
            classes=shortened_list([names[label] for label in example.labels], _MAX_NAMES),
            predicted=names[predictions.predicted[place]],
            probability=float(predictions.probability[place]),
            loss=float(predictions.loss[place]),
        )

    return render(
        "vit/evaluation/top_losses.html.j2",
        title=title,
        num_examples=len(predictions),
        split=split,
        corpus=manifest.name,
        top1=float(predictions.right.mean()),
        worst=[card(place) for place in worst.tolist()],
        doubted=[card(place) for place in doubted.tolist()],
        sure=SURE,
        min_others=MIN_OTHERS,
    )


def _shown(example: _ShardRow, manifest: Manifest) -> Shown:
    try:
        pixels = decode_sandboxed(example["image"]["bytes"], manifest.decode_policy)
        picture, small = _thumbnail(pixels), max(pixels.shape[:2]) < _SMALL_PX
    except ValueError as error:  # unlikely, as it was decoded for scoring; the page shows the reason instead
        picture, small = f"cannot be decoded: {error}", False
    return Shown(example["example_id"], tuple(example["labels"]), picture, small)


def _thumbnail(pixels: np.ndarray) -> str:
    """A data URI of at most 160 x 160 px: an unchanged PNG if the image is no larger, else a resized JPEG."""
    if max(pixels.shape[:2]) <= _MAX_SIDE_PX:
        return data_uri(image_file(pixels, optimize=True))
    return data_uri(image_file(thumbnail(pixels, _MAX_SIDE_PX, Image.Resampling.LANCZOS), "JPEG", quality=85), "JPEG")
