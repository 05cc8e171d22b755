"""A self-contained HTML page of the examples with the highest loss, and of those whose label may be wrong."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data_prep.decode import decode
from data_prep.shard_format import Manifest, ShardReader
from infra.storage import Store
from vit.input.order import RowGroups
from vit.training.predictions import Predictions

MAX_SHOWN = 24
"""Images in each of the two lists."""
SURE, MIN_OTHERS = 0.9, 10
_MAX_SIDE_PX, _SMALL_PX, _MAX_NAMES = 160, 80, 5
# Each thread holds one row group of about 8 MiB. Reading one from S3 takes a few hundred ms.
_READ_THREADS = 4
_STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 68rem; margin: 2.5rem auto;
 padding: 0 1.25rem }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem }
p { color: #4a5365; max-width: 48rem; margin: 0 0 1rem } p.lead { margin-top: 0 }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1.4rem 1.1rem; padding: 0;
 list-style: none }
li { min-width: 0; font-size: .85rem; line-height: 1.4; overflow-wrap: anywhere }
img, .none { width: 160px; height: 160px; object-fit: contain; background: #f4f5f8; border-radius: 4px; display: block;
 margin-bottom: .4rem }
img.small { image-rendering: pixelated } .none { padding: .6rem; color: #4a5365 }
b { font-weight: 600 } .soft { color: #5a6375 }
"""


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
    claims = np.bincount(predictions.predicted[sure], minlength=size)
    kept = np.bincount(predictions.predicted[sure & ~wrong], minlength=size)
    others = claims - 1
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


def top_losses_page(
    predictions: Predictions, corpus: Store, manifest: Manifest, split: str, names: Sequence[str], title: str
) -> str:
    """The page: up to 24 examples with the largest loss, and up to 24 whose label may be wrong.

    `names` are the class names by label id. Raises ShardError like `load_shown`.
    """
    worst, doubted = top_losses(predictions), suspicious(predictions)
    shown = load_shown(corpus, manifest, split, predictions.row[np.concatenate([worst, doubted])].tolist())

    def cards(places: np.ndarray) -> str:
        return "".join(_card(predictions, place, shown[int(predictions.row[place])], names) for place in places)

    lead = (
        f"{len(predictions):,} examples of split {split} of {manifest.name}; "
        f"{100 * predictions.right.mean():.2f} % were classified correctly. Below each image: its class, the predicted "
        "class with its probability, the loss in nats, and the id."
    )
    doubt = (
        f"Another class was predicted with a probability of at least {SURE:g}. At least {MIN_OTHERS} other examples were "
        f"predicted as that class with such a probability, and for at least {100 * SURE:.0f} % of them it is correct. "
        "Highest probability first. Check whether the label or the model is wrong."
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        f"'unsafe-inline'\"><title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{_text(title)}</h1><p class="lead">{_text(lead)}</p>\n'
        f"<h2>Top losses</h2><p>The examples with the highest loss.</p><ol>{cards(worst)}</ol>\n"
        f"<h2>Suspicious labels</h2><p>{_text(doubt)}</p>"
        + (f"<ol>{cards(doubted)}</ol>" if len(doubted) else "<p><b>None.</b></p>")
        + "</body></html>\n"
    )


def _card(predictions: Predictions, place: int, shown: Shown, names: Sequence[str]) -> str:
    classes = ", ".join(names[label] for label in shown.labels[:_MAX_NAMES])
    more = f" and {len(shown.labels) - _MAX_NAMES} more" if len(shown.labels) > _MAX_NAMES else ""
    if shown.picture.startswith("data:"):
        small = ' class="small"' if shown.small else ""
        picture = f'<img{small} alt="{_text(shown.example_id)}" src="{shown.picture}">'
    else:
        picture = f'<div class="none">{_text(shown.picture)}</div>'
    predicted = names[predictions.predicted[place]]
    return (
        f"<li>{picture}<b>{_text(classes + more)}</b><br>predicted <b>{_text(predicted)}</b>, "
        f"{100 * predictions.probability[place]:.1f} %<br>"
        f'<span class="soft">loss {predictions.loss[place]:.3f}<br>{_text(shown.example_id)}</span></li>'
    )


def _shown(example: dict[str, Any], manifest: Manifest) -> Shown:
    try:
        pixels = decode(example["image"]["bytes"], manifest.decode_policy)
        picture, small = _thumbnail(pixels), max(pixels.shape[:2]) < _SMALL_PX
    except ValueError as error:  # unlikely, as it was decoded for scoring; the page shows the reason instead
        picture, small = f"cannot be decoded: {error}", False
    return Shown(example["example_id"], tuple(example["labels"]), picture, small)


def _thumbnail(pixels: np.ndarray) -> str:
    """A data URI of at most 160 x 160 px: an unchanged PNG if the image is no larger, else a resized JPEG."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    kind = "PNG" if max(image.size) <= _MAX_SIDE_PX else "JPEG"
    image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX), Image.Resampling.LANCZOS)
    image.save(file, kind, **({"quality": 85} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _text(value: object) -> str:
    return html.escape(str(value))
