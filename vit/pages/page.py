"""Draws the figures of an inspection as PNG files, and one self-contained HTML page that explains them."""

import hashlib
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitline.infra.html.page import data_uri, render
from vitline.infra.html.pictures import contact_sheet, image_file
from vitline.infra.storage import Store
from vitline.vit.pages.figures import Inspection

if TYPE_CHECKING:  # matplotlib takes a second to import, and not all figures need it
    from matplotlib.figure import Figure

MAX_SHOWN = 16
"""Number of images in the rollout figure."""
_DPI, _GAP_PX = 120, 4
_FILTER_COLUMNS, _FILTER_TILE_PX = 7, 112
_PAIRS_A_ROW, _IMAGE_TILE_PX = 4, 160
_MAP_PX, _MAX_TICKS = 720, 16
_DOT, _LINE, _SOFT = "#3556a8", "#c2571a", "#5a6375"


@dataclass(frozen=True)
class _Picture:
    """One section of the page."""

    key: str
    heading: str
    caption: str
    png: bytes


def write_inspection(
    store: Store, inspection: Inspection, images_uint8: UInt8[np.ndarray, "n H W 3"], title: str
) -> list[str]:
    """Writes each figure of the network as a PNG, `inspection.json` with the numbers, and `index.html` last.

    `images_uint8` are the inspected images in the same order; the first 16 are shown. Returns the keys written. Raises
    ValueError if the pixels have another shape or there are too few images.
    """
    pictures = [_filters(inspection)]
    if inspection.position_similarity is not None:
        pictures.append(_similarity(inspection, inspection.position_similarity))
    if inspection.attention_distance_px is not None:
        pictures.append(_distance(inspection, inspection.attention_distance_px))
    if inspection.rollout is not None:
        pictures.append(_rollout(inspection, inspection.rollout, images_uint8))
    for picture in pictures:
        store.write(picture.key, picture.png)
    numbers = json.dumps(_numbers(inspection, images_uint8, title), sort_keys=True, ensure_ascii=False, allow_nan=False)
    store.write("inspection.json", f"{numbers}\n".encode())
    store.write("index.html", _page(inspection, pictures, title).encode())
    return [*(picture.key for picture in pictures), "inspection.json", "index.html"]


def rollout_mask(
    rollout: Float[np.ndarray, "g g"], image_px: int, patch_px: float
) -> Float[np.ndarray, "image_px image_px"]:
    """The rollout as an alpha mask from 0 to 1 over an image whose patches are `patch_px` wide.

    It is divided by its maximum, enlarged by Lanczos, blurred by a Gaussian of standard deviation `patch_px` and stretched
    to [0, 1], as an author of the paper describes it. Pixels that fill no whole patch, which the network does not see,
    stay 0.
    """
    covered = round(len(rollout) * patch_px)
    share = Image.fromarray((rollout / max(float(rollout.max()), 1e-30)).astype(np.float32))
    large = np.asarray(share.resize((covered, covered), Image.Resampling.LANCZOS), np.float64)
    # Pillow blurs bytes only, which would leave too few levels after stretching.
    place = np.arange(covered)
    blur = np.exp(-0.5 * ((place[:, None] - place) / patch_px) ** 2)
    blur /= blur.sum(axis=1, keepdims=True)
    large = blur @ large @ blur.T
    spread = float(large.max() - large.min())
    mask = np.zeros((image_px, image_px))
    seen = min(covered, image_px)
    # Uniform attention masks nothing.
    mask[:seen, :seen] = ((large - large.min()) / spread if spread > 1e-9 else np.ones_like(large))[:seen, :seen]
    return mask


def _filters(inspection: Inspection) -> _Picture:
    tiles = [_tile(_stretched(component), _FILTER_TILE_PX) for component in inspection.filters]
    count, side = len(tiles), inspection.filters.shape[1]
    total = inspection.filter_variance_fractions.sum()
    if inspection.filter_source == "root convolution":
        layer = f"{side} x {side} root convolution of the ResNet, standardised as in the network"
    else:
        layer = f"patch embedding, {side} x {side} pixels each"
    caption = (
        f"The first {count} principal components of the {inspection.num_kernels:,} kernels of the {layer}. They are sorted "
        f"by decreasing variance, row by row; together they explain {100 * total:.0f}\u00a0% of it. Every component is "
        "stretched to the full range of colours by its own minimum and maximum; its sign is arbitrary."
    )
    return _Picture(
        "patch-filters.png",
        "Filters",
        caption,
        image_file(contact_sheet(tiles, _FILTER_COLUMNS, _GAP_PX), optimize=True),
    )


def _similarity(inspection: Inspection, similarity: np.ndarray) -> _Picture:
    side = round(len(similarity) ** 0.5)
    cell_px = max(1, _MAP_PX // side**2)
    tile_px = side * cell_px + _GAP_PX
    tiles = np.full((side, tile_px, side, tile_px), np.nan)
    cells = similarity.reshape(side, side, side, side).repeat(cell_px, axis=2).repeat(cell_px, axis=3)
    tiles[:, :-_GAP_PX, :, :-_GAP_PX] = cells.transpose(0, 2, 1, 3)
    sheet = tiles.reshape(side * tile_px, side * tile_px)[:-_GAP_PX, :-_GAP_PX]
    # The axes have as many pixels as the sheet, so that all cells are drawn at the same size.
    width, height = len(sheet) + 190, len(sheet) + 75
    figure = _figure(width / _DPI, height / _DPI)
    axes = figure.add_axes((60 / width, 60 / height, len(sheet) / width, len(sheet) / height))
    drawn = axes.imshow(sheet, cmap="viridis", vmin=-1, vmax=1, extent=(0.5, side + 0.5, side + 0.5, 0.5))
    ticks = range(1, side + 1, -(-side // _MAX_TICKS))
    axes.set(xlabel="column of the patch", ylabel="row of the patch", xticks=ticks, yticks=ticks)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(
        drawn,
        cax=figure.add_axes((1 - 120 / width, 60 / height, 15 / width, len(sheet) / height)),
        ticks=[-1, -0.5, 0, 0.5, 1],
    )
    bar.set_label("cosine similarity")
    bar.outline.set_visible(False)
    entry = " The class token is left out." if inspection.has_class_token else ""
    caption = (
        "One tile per patch, at the position of the patch. A tile shows the cosine similarity of the position embedding of "
        f"this patch with those of all patches, at their positions.{entry}"
    )
    return _Picture("position-similarity.png", "Position embeddings", caption, _figure_png(figure))


def _distance(inspection: Inspection, distance: np.ndarray) -> _Picture:
    depth, heads = distance.shape
    figure = _figure(7.2, 4.4)
    axes = figure.add_axes((0.09, 0.12, 0.88, 0.8))
    layers = np.arange(depth)
    axes.scatter(np.repeat(layers, heads), distance.ravel(), s=22, color=_DOT, alpha=0.65, linewidths=0, label="a head")
    axes.plot(layers, distance.mean(axis=1), color=_LINE, linewidth=1.2, label="mean of the heads")
    if inspection.uniform_distance_px is not None:
        axes.axhline(
            inspection.uniform_distance_px, color=_SOFT, linewidth=1, linestyle=(0, (4, 3)), label="uniform attention"
        )
    top = max(float(distance.max()), inspection.uniform_distance_px or 0.0, 1e-9)
    axes.set(xlabel="layer, from the first (0) to the last", ylabel="mean attention distance (px)")
    axes.set(xlim=(-0.5, depth - 0.5), ylim=(0, 1.12 * top), xticks=layers[:: -(-depth // _MAX_TICKS)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, borderaxespad=0)
    token = (
        " The class token, which is not part of the grid, is dropped as query and as key, and the remaining weights are "
        "renormalised to sum to 1."
        if inspection.has_class_token
        else ""
    )
    caption = (
        "One dot per head of each layer: the distance from a patch to all patches of the grid, weighted by its attention to "
        f"them, and averaged over the patches of {_images(inspection.num_images)}. In pixels of the "
        f"{inspection.image_size_px} px image; neighbouring patches are {inspection.patch_px} px apart.{token} The dashed "
        "line is the distance of uniform attention to all patches."
    )
    return _Picture("attention-distance.png", "Attention distance", caption, _figure_png(figure))


def _rollout(inspection: Inspection, rollout: np.ndarray, images: np.ndarray) -> _Picture:
    shown = min(len(rollout), MAX_SHOWN)
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] != 3 or images.dtype != np.uint8:
        raise ValueError(f"The pixels have shape {images.shape} and dtype {images.dtype}, expected (n, H, H, 3) uint8.")
    if len(images) < shown:
        raise ValueError(
            f"Got the pixels of {len(images)} images, but {len(rollout)} images were inspected. Pass the same images."
        )
    assert inspection.patch_px is not None
    image_px = images.shape[1]
    patch_px = inspection.patch_px * image_px / inspection.image_size_px
    pairs = []
    for image, share in zip(images[:shown], rollout[:shown], strict=True):
        masked = (image * rollout_mask(share, image_px, patch_px)[:, :, None]).round().astype(np.uint8)
        pairs.append(contact_sheet([_tile(image, _IMAGE_TILE_PX), _tile(masked, _IMAGE_TILE_PX)], 2, _GAP_PX))
    row = "the class token's row" if inspection.has_class_token else "the mean over the rows of all patches"
    caption = (
        "Beside each image, the share of each patch in the output: brighter patches have larger shares. Attention weights "
        "are averaged over heads, the identity is added for the residual connection, rows are normalised to sum to 1, and "
        f"the layers are multiplied from the first to the last. Shown is {row} (Abnar and Zuidema, arXiv:2005.00928). The "
        "shares are divided by their maximum, enlarged by Lanczos, blurred by a Gaussian as wide as a patch and stretched "
        "from 0 to 1. They show where information comes from, not why a class was predicted."
    )
    sheet = contact_sheet(pairs, _PAIRS_A_ROW, 4 * _GAP_PX)
    return _Picture("attention-rollout.png", "Attention rollout", caption, image_file(sheet, optimize=True))


def _numbers(inspection: Inspection, images: np.ndarray, title: str) -> dict[str, Any]:
    """The numbers of the figures, except the pixels of the filters. Attention distances are by layer, then head.

    `images_sha256` is equal for rollout figures that show the same images at the same places.
    """

    def rounded(values: np.ndarray | None, digits: int) -> Any:
        return None if values is None else values.round(digits).tolist()

    shown = None if inspection.rollout is None else inspection.rollout[:MAX_SHOWN]
    return {
        "schema_version": 1,
        "title": title,
        "network": inspection.network,
        "image_size_px": inspection.image_size_px,
        "patch_px": inspection.patch_px,
        "num_images": inspection.num_images,
        "filter_source": inspection.filter_source,
        "filter_variance_fractions": rounded(inspection.filter_variance_fractions, 6),
        "position_similarity": rounded(inspection.position_similarity, 4),
        "attention_distance_px": rounded(inspection.attention_distance_px, 4),
        "uniform_distance_px": inspection.uniform_distance_px,
        "rollout": rounded(shown, 6),
        "images_sha256": None if shown is None else hashlib.sha256(images[: len(shown)].tobytes()).hexdigest(),
        "notes": list(inspection.notes),
    }


def _page(inspection: Inspection, pictures: list[_Picture], title: str) -> str:
    seen = f"; attention on {_images(inspection.num_images)}" if inspection.num_images else ""
    network = inspection.network[:1].upper() + inspection.network[1:]
    figures = [(p.heading, p.caption, data_uri(p.png)) for p in pictures]
    return render("vit/pages/page.html.j2", title=title, lead=network + seen, notes=inspection.notes, figures=figures)


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _stretched(component: np.ndarray) -> np.ndarray:
    low, high = float(component.min()), float(component.max())
    return ((component - low) / max(high - low, 1e-30) * 255).round().astype(np.uint8)


def _tile(pixels: np.ndarray, side: int) -> np.ndarray:
    """A square image at about `side` pixels: reduced by Lanczos, or enlarged by an integer factor without smoothing."""
    own = len(pixels)
    if own > side:
        return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS))
    return pixels.repeat(side // own, axis=0).repeat(side // own, axis=1)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # avoids the global state of pyplot

    return Figure(figsize=(width, height), dpi=_DPI)


def _figure_png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
