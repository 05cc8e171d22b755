"""Published checks: finds the published scores that a model may be compared with.

These are rows of the same network and pre-training data, and for published weights the scores that others measured with
them. Only exact matches count.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vitline.vit.evaluation.reference.published_scores import ROWS, PublishedRow
from vitline.vit.models.config import NetworkConfig
from vitline.vit.models.variants import REGISTERED, network_variant, spelled

# Two networks are the same if these fields are equal, whatever their resolution, head and pooling.
_SIZES = ("architecture", "embed_dim", "depth", "num_heads", "mlp_dim", "patch_size_px")
_STAGES = ("stages", "width_factor", "patch_size")
TOLERANCE = 0.002
"""Difference of a top-1 that other preprocessing and arithmetic can explain, as a fraction (0.2 points)."""
WHOLE_TEST_SPLIT = {"imagenet": 50_000, "imagenet-real": 46_837, "cifar10": 10_000, "cifar100": 10_000}

# From the results files of huggingface/pytorch-image-models: name, side in px, ImageNet top-1, ReaL top-1.
_TIMM = """
vit_base_patch16_384.orig_in21k_ft_in1k      384  84.212  88.398
vit_base_patch16_224.orig_in21k_ft_in1k      224  81.782  86.754
vit_large_patch32_384.orig_in21k_ft_in1k     384  81.508  85.913
vit_base_r50_s16_384.orig_in21k_ft_in1k      384  84.988  88.802
vit_large_patch16_384.augreg_in21k_ft_in1k   384  87.096  90.219
vit_base_patch16_384.augreg_in21k_ft_in1k    384  86.010  89.969
vit_base_patch16_224.augreg_in21k_ft_in1k    224  84.534  88.887
vit_base_patch32_384.augreg_in21k_ft_in1k    384  83.358  87.903
vit_base_patch32_224.augreg_in21k_ft_in1k    224  80.732  85.979
vit_small_patch16_384.augreg_in21k_ft_in1k   384  83.814  88.650
vit_small_patch16_224.augreg_in21k_ft_in1k   224  81.402  86.854
vit_small_patch32_224.augreg_in21k_ft_in1k   224  76.010  82.503
vit_tiny_patch16_384.augreg_in21k_ft_in1k    384  78.438  84.822
vit_tiny_patch16_224.augreg_in21k_ft_in1k    224  75.452  82.061
vit_large_r50_s32_384.augreg_in21k_ft_in1k   384  86.188  89.790
vit_small_r26_s32_384.augreg_in21k_ft_in1k   384  84.066  88.817
vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k   384  75.962  82.687
vit_base_patch16_224.augreg_in1k             224  79.154  84.388
vit_base_patch16_224.sam_in1k                224  80.246  85.881
resnetv2_50x1_bit.goog_in21k_ft_in1k         448  80.386  86.464
resnetv2_101x1_bit.goog_in21k_ft_in1k        448  82.332  87.678
resnetv2_101x3_bit.goog_in21k_ft_in1k        448  84.430  88.445
resnetv2_152x2_bit.goog_in21k_ft_in1k        448  84.468  88.710
resnetv2_152x4_bit.goog_in21k_ft_in1k        480  84.936  88.567
"""
# The file names that the authors gave the same weights.
_OFFICIAL_FILES = {
    "vit_base_patch16_384.orig_in21k_ft_in1k": "ViT-B_16",
    "vit_base_patch16_224.orig_in21k_ft_in1k": "ViT-B_16-224",
    "vit_large_patch32_384.orig_in21k_ft_in1k": "ViT-L_32",
    "vit_base_r50_s16_384.orig_in21k_ft_in1k": "R50+ViT-B_16",
}
_TIMM_SOURCE = "huggingface/pytorch-image-models, results"
_RERUN = "re-run, "


@dataclass(frozen=True)
class Target:
    """Scores that others measured with published weights: lowest and highest top-1 by corpus, as fractions."""

    protocol: str
    """The protocol of the scores: `head` uses the model's own head, others train."""
    image_size_px: int | None
    """Resolution of the scores; None if the protocol fixes it."""
    scores: dict[str, tuple[float, float]]
    source: str


@dataclass(frozen=True)
class PublishedCheck:
    """Our score of published weights, compared with the scores that others measured with them."""

    corpus: str
    ours: float
    published: tuple[float, float]
    difference: float
    """Distance to the published range; 0 inside it."""
    verdict: str
    """`agrees`, `differs`, or `not comparable` with the reason."""
    source: str


def architecture_of(config: NetworkConfig) -> str | None:
    """The network as the paper names it, such as `ViT-B/16` or `R50+ViT-B/16`; None if it has no named size."""
    for variant in REGISTERED:
        known = network_variant(variant)
        if all(getattr(known, f, None) == getattr(config, f, None) for f in (*_SIZES, *_STAGES)):
            return spelled(variant)
    return None


def data_of_weights(uri: str) -> str | None:
    """The pre-training data of published weights, if the name of their file or folder says so."""
    # Subsets do not count as ImageNet-21k: 21k-P has about half of its classes, and 12k is another subset.
    if re.search(r"miil|in12k|21k[-_]?p(?![a-z0-9])", uri):
        return None
    if re.search(r"imagenet-?21k|in21k", uri):
        return "ImageNet-21k"
    return "ImageNet" if re.search(r"imagenet2012|imagenet-?1k|(?<![a-z0-9])in1k", uri) else None


def data_of_corpus(source_kind: str | None, num_classes: int, is_view: bool) -> str | None:
    """The public data set that a corpus contains completely, else None. A corpus similar to JFT-300M is not JFT-300M."""
    if source_kind == "imagenet21k" and num_classes in (21_841, 21_843) and not is_view:
        return "ImageNet-21k"
    whole_1k = source_kind in ("ilsvrc2012", "imagenet") and num_classes == 1000
    return "ImageNet" if whole_1k and not is_view else None


def matching_row(
    architecture: str | None, data: str | None, protocol: str, columns: Collection[str]
) -> PublishedRow | None:
    """The published row of this network and pre-training data that has a score in one of these columns, or None.

    Protocols ending in `-v1` get rows of version 1 of the paper. Of several rows, prefers the one at 384 px, unless the
    protocol ends in `-512`.
    """
    if architecture is None or data is None:
        return None
    rows = [
        row
        for row in ROWS.values()
        if (row.architecture, row.data, row.is_v1) == (architecture, data, protocol.endswith("-v1"))
        and not {*columns}.isdisjoint({*row.scores, *row.printed_means})
    ]
    if not protocol.endswith("-512"):
        rows.sort(key=lambda row: row.setting != "384 px")
    return rows[0] if rows else None


def targets_of(weights: str) -> Iterator[Target]:
    """The published scores of the weights in this file or folder."""
    for line in _TIMM.strip().splitlines():
        name, side, top1, real = line.split()
        if _names(weights, re.escape(name)) or _is_official(
            weights, "imagenet21k+imagenet2012", _OFFICIAL_FILES.get(name)
        ):
            scores = {"imagenet": round(float(top1) / 100, 6), "imagenet-real": round(float(real) / 100, 6)}
            yield Target("head", int(side), {c: (v, v) for c, v in scores.items()}, f"{_TIMM_SOURCE}: {name}")
    reruns = [row for row in ROWS.values() if row.setting.startswith(_RERUN) and row.scores]
    for model in dict.fromkeys(row.model for row in reruns):
        if _is_official(weights, "imagenet21k", model.replace("R50x1", "R50").replace("/", "_")):
            found = [row for row in reruns if row.model == model]
            ends = {c: (min(r.scores[c] for r in found), max(r.scores[c] for r in found)) for c in found[0].scores}
            yield Target("vit-paper-transfer", None, ends, found[0].source)


def check_score(
    target: Target, corpus: str, value: float, num_examples: int, image_size_px: int | None
) -> PublishedCheck:
    """Compares our score with the published ones, within `TOLERANCE`."""
    low, high = target.scores[corpus]
    difference = value - high if value > high else min(value - low, 0.0)
    if target.image_size_px not in (None, image_size_px):
        verdict = f"not comparable: published at {target.image_size_px} px, scored at {image_size_px} px"
    elif num_examples != WHOLE_TEST_SPLIT[corpus]:
        verdict = f"not comparable: scored on {num_examples:,} of {WHOLE_TEST_SPLIT[corpus]:,} images"
    else:
        verdict = "agrees" if abs(difference) <= TOLERANCE + 1e-9 else "differs"
    return PublishedCheck(corpus, value, (low, high), difference, verdict, target.source)


def _names(weights: str, pattern: str) -> bool:
    """True if the URI contains the name as a whole, not as part of a longer name."""
    return re.search(rf"(?<![\w.+]){pattern}(?![\w+-])(?!\.(?!npz|safetensors))", weights) is not None


def _is_official(weights: str, folder: str, name: str | None) -> bool:
    """True if the URI ends in the official file of this name, either in its folder or with the folder's name as a prefix."""
    return name is not None and _names(weights, rf"{re.escape(folder)}[/_]{re.escape(name)}\.npz")
