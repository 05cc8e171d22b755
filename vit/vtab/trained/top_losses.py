"""The examples on which a model did worst, and those whose label looks wrong, as one page that opens without a network."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data_prep.decode import decode
from data_prep.shard_format import Manifest, ShardReader
from infra.storage import Store
from vit.input.order import RowGroups
from vit.training.predictions import Predictions

MAX_SHOWN = 24
"""Pictures of each of the two kinds."""
SURE, MIN_OTHERS = 0.9, 10
_MAX_SIDE_PX, _SMALL_PX, _MAX_NAMES = 160, 80, 5
# Each thread holds a row group of some 8 MiB; on S3 one takes a few hundred ms.
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
    """What the page shows of an example, beside its prediction."""

    example_id: str
    labels: tuple[int, ...]
    """All that the corpus gives it."""
    picture: str
    """Data URI; or in plain words why there is none."""
    small: bool
    """Drawn larger than it is."""


def top_losses(predictions: Predictions, most: int = MAX_SHOWN) -> np.ndarray:
    """Places in `predictions` of the largest losses, the largest first; of equals the smaller row. NaN is largest."""
    loss = np.where(np.isnan(predictions.loss), np.inf, predictions.loss)
    return np.lexsort((predictions.row, -loss))[:most]


def suspicious(predictions: Predictions, most: int = MAX_SHOWN) -> np.ndarray:
    """Places in `predictions` of examples whose label may be wrong, the surest first.

    The model contradicts the label with a probability of at least 0.9, and can be believed in that: there are at least
    ten other examples that it takes for the same class with that probability, and at least nine of ten of them carry
    that label. A weak model has no such examples. In the spirit of confident learning (arXiv:1911.00068), where the
    threshold is each class's mean probability; ours is fixed, so that a probability means the same on every page.
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
    """Ids, labels and small pictures of some rows of a split, by row; reads the row groups that hold them and no other.

    Raises ShardError where a row group is not what the manifest says.
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
    """The page: at most 24 examples of the largest loss, and at most 24 whose label may be wrong. Self-contained HTML.

    `names` are the classes by label id. Raises ShardError as `load_shown`.
    """
    worst, doubted = top_losses(predictions), suspicious(predictions)
    shown = load_shown(corpus, manifest, split, predictions.row[np.concatenate([worst, doubted])].tolist())

    def cards(places: np.ndarray) -> str:
        return "".join(_card(predictions, place, shown[int(predictions.row[place])], names) for place in places)

    lead = (
        f"{len(predictions):,} examples of split {split} of {manifest.name}; "
        f"{100 * predictions.right.mean():.2f} % of them right. Under each picture: its class, what it was taken for, "
        "with which probability and loss (nats), and its id."
    )
    doubt = (
        f"Taken for another class with a probability of at least {SURE:g}, where at least {MIN_OTHERS} other examples "
        f"are taken for that class as surely and at least {100 * SURE:.0f} % of them carry its label. The surest first. "
        "Look at them before believing the label, or the model."
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        f"'unsafe-inline'\"><title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{_text(title)}</h1><p class="lead">{_text(lead)}</p>\n'
        f"<h2>Hardest</h2><p>The largest losses, right or wrong.</p><ol>{cards(worst)}</ol>\n"
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
        f"<li>{picture}<b>{_text(classes + more)}</b><br>taken for <b>{_text(predicted)}</b>, "
        f"{100 * predictions.probability[place]:.1f} %<br>"
        f'<span class="soft">loss {predictions.loss[place]:.3f}<br>{_text(shown.example_id)}</span></li>'
    )


def _shown(example: dict, manifest: Manifest) -> Shown:
    try:
        pixels = decode(example["image"]["bytes"], manifest.decode_policy)
        picture, small = _thumbnail(pixels), max(pixels.shape[:2]) < _SMALL_PX
    except ValueError as error:  # it was decoded to be scored; whatever it is, the page is not worth less for it
        picture, small = f"cannot be decoded: {error}", False
    return Shown(example["example_id"], tuple(example["labels"]), picture, small)


def _thumbnail(pixels: np.ndarray) -> str:
    """At most 160 px wide and high, as a data URI: untouched in a PNG where it is no larger, else a JPEG."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    kind = "PNG" if max(image.size) <= _MAX_SIDE_PX else "JPEG"
    image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX), Image.Resampling.LANCZOS)
    image.save(file, kind, **({"quality": 85} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _text(value: object) -> str:
    return html.escape(str(value))
