"""Self-supervised training by masked patch prediction: some patch embeddings are corrupted, and the network predicts them.

Source: arXiv:2010.11929, Sec. 4.6 and App. B.1.2. A training step:

    corruption = draw_corruption(torch.rand(len(images), 2 * network.config.grid_side**2))
    targets = patch_targets(images, network.config.patch_size_px, "mean-color-3bit")
    losses = masked_patch_losses(model(images, corruption), targets, corruption)
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from vitline.vit.models.config import PatchTarget as Target
from vitline.vit.models.network import Network
from vitline.vit.models.vit import POS_EMBED_STD, VisionTransformer

# 3 bits per channel.
LEVELS, NUM_COLORS = 8, 512
DOWNSIZED_SIDE = 4
MASKED_FRACTION, REPLACED_FRACTION = 0.8, 0.1


@dataclass(frozen=True, eq=False)
class Corruption:
    """Which M of the N patches of each image are corrupted, and how."""

    places: Int64[Tensor, "B M"]
    """Indices of the corrupted patches: first the masked, then the replaced, then the unchanged ones."""
    source: Int64[Tensor, "B N"]
    """Index of the patch whose embedding each patch gets: its own, or that of another patch of the image."""
    masked: Bool[Tensor, "B N"]
    """True for patches whose embedding is replaced by the mask token."""

    def to(self, device: torch.device | str) -> "Corruption":
        """A copy on another device, whose copying is not waited for: from pinned memory, as a GPU needs for that."""
        parts = (self.places, self.source, self.masked)
        if torch.device(device).type == "cpu":
            return Corruption(*(x.to(device) for x in parts))
        return Corruption(*(x.pin_memory().to(device, non_blocking=True) for x in parts))


def draw_corruption(
    draws: Float[Tensor, "B two_N"], rate: float = 0.5, device: torch.device | str = "cpu"
) -> Corruption:
    """M = round(rate * N) corrupted patches for each image, from uniform random numbers in [0, 1).

    round(0.8 M) of them get the mask token, round(0.1 M) the embedding of another patch of the image (drawn uniformly),
    and the rest stay unchanged but are predicted as well. The paper gives these shares; it is our choice that each image
    has them exactly. Raises ValueError if nothing would be corrupted, or if an image has only one patch.
    """
    num_images, num_patches = len(draws), draws.shape[1] // 2
    num_corrupted = round(rate * num_patches)
    if not 1 <= num_corrupted <= num_patches or num_patches < 2:
        raise ValueError(
            f"rate={rate} corrupts {num_corrupted} of {num_patches} patches, but between 1 and all of at least 2 patches "
            "must be corrupted. Choose another rate, or images with more patches."
        )
    num_masked, num_replaced = round(MASKED_FRACTION * num_corrupted), round(REPLACED_FRACTION * num_corrupted)
    places = draws[:, :num_patches].argsort(dim=1, stable=True)[:, :num_corrupted]
    # 1 to N - 1 patches further on, modulo N: never the patch itself.
    further = 1 + (draws[:, num_patches : num_patches + num_replaced] * (num_patches - 1)).long().clamp(
        max=num_patches - 2
    )
    replaced = places[:, num_masked : num_masked + num_replaced]
    source = torch.arange(num_patches, device=draws.device).repeat(num_images, 1)
    source.scatter_(1, replaced, (replaced + further) % num_patches)
    masked = torch.zeros_like(source, dtype=torch.bool).scatter_(1, places[:, :num_masked], True)
    return Corruption(places, source, masked).to(device)


def patch_targets(images: Float[Tensor, "B 3 H W"], patch_size_px: int, target: Target) -> Tensor:
    """The prediction targets of every patch, (B, N, ...) in raster order, from images in [-1, 1].

    - "mean-color-3bit": (B, N, 1) int64, `color_index` of the mean colour of the patch.
    - "downsized-4x4-3bit": (B, N, 16) int64, the same for a 4 x 4 version of the patch, in raster order. Each of the 16
      is the mean over its part; if 4 does not divide the side of the patch, parts overlap by a pixel (adaptive pooling).
    - "pixels-l2": (B, N, P * P * 3) float32, all pixels from 0 to 1, colours innermost.

    Means are over RGB values from 0 to 1; the paper does not specify this. Pixels that fill no whole patch are dropped,
    as in the stem.
    """
    side = patch_size_px
    rows, columns = images.shape[2] // side, images.shape[3] // side
    pixels = (images[:, :, : rows * side, : columns * side].float() + 1) / 2
    patches: Tensor = pixels.unflatten(2, (rows, side)).unflatten(4, (columns, side))  # B 3 rows P columns P
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # B N 3 P P
    if target == "mean-color-3bit":
        return color_index(patches.mean(dim=(3, 4)))[:, :, None]
    if target == "pixels-l2":
        return patches.permute(0, 1, 3, 4, 2).flatten(2)
    small = F.adaptive_avg_pool2d(patches.flatten(0, 1), DOWNSIZED_SIDE).unflatten(0, patches.shape[:2])
    return color_index(small.permute(0, 1, 3, 4, 2)).flatten(2)


def color_index(colors: Float[Tensor, "*S 3"]) -> Int64[Tensor, "*S"]:
    """r * 64 + g * 8 + b of RGB from 0 to 1, with 8 equal levels per channel; values outside are clamped."""
    r, g, b = (colors * LEVELS).floor().clamp(0, LEVELS - 1).long().unbind(dim=-1)
    return (r * LEVELS + g) * LEVELS + b


class MaskedPatchModel(Network):
    """A Vision Transformer that predicts its corrupted patches, each from its output token.

    It adds a mask token and a prediction head to `network`, which can be fine-tuned later like any other. The head and
    pooling of `network` are not used, and are not trained. Raises ValueError for another network.
    """

    def __init__(self, network: Network, target: Target = "mean-color-3bit"):
        super().__init__()
        if not isinstance(network, VisionTransformer):
            raise ValueError(
                f"Masked patches are predicted by a Vision Transformer, not by {network.config.summary}. Use one, or train on labels."
            )
        self.config, self.num_classes = network.config, network.num_classes
        config = network.config
        for unused in (network.head, network.pre_logits, network.pool):
            if unused is not None:
                unused.requires_grad_(False)
        if target == "downsized-4x4-3bit" and config.patch_size_px < DOWNSIZED_SIDE:
            raise ValueError(
                f"target={target} needs patches of {DOWNSIZED_SIDE} px or more, not {config.patch_size_px}. "
                "Use mean-color-3bit, which works with any."
            )
        self.network, self.target = network, target
        outputs = {
            "mean-color-3bit": NUM_COLORS,
            "downsized-4x4-3bit": DOWNSIZED_SIDE**2 * NUM_COLORS,
            "pixels-l2": 3 * config.patch_size_px**2,
        }[target]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.prediction_head = nn.Linear(config.embed_dim, outputs)
        # Like our position embeddings and class heads; the paper does not specify it.
        nn.init.normal_(self.mask_token, std=POS_EMBED_STD)
        nn.init.zeros_(self.prediction_head.weight)
        nn.init.zeros_(self.prediction_head.bias)

    def forward(  # type: ignore[override]  # logits of patches, not of images
        self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"], corruption: Corruption
    ) -> Tensor:
        """Predictions for the corrupted patches, in the order of `corruption.places`.

        Logits (B, M, 1, 512) or (B, M, 16, 512), or pixels (B, M, P * P * 3). Raises ValueError if the corruption was
        drawn for another number of images or patches.
        """
        x = self.network.stem(images).flatten(2).transpose(1, 2)
        if x.shape[:2] != corruption.source.shape:
            raise ValueError(
                f"The batch has {x.shape[0]} images of {x.shape[1]} patches, but the corruption is for "
                f"{corruption.source.shape[0]} images of {corruption.source.shape[1]}. Draw a corruption for this batch."
            )
        num_patches = x.shape[1]
        x = self.corrupted(x, corruption)
        if self.network.cls_token is not None:
            x = torch.cat([self.network.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = _at(self.network.encode(x)[:, -num_patches:], corruption.places)
        x = self.prediction_head(x)
        predictions: Tensor = x if self.target == "pixels-l2" else x.unflatten(2, (-1, NUM_COLORS))
        return predictions

    def corrupted(self, embeddings: Float[Tensor, "B N D"], corruption: Corruption) -> Float[Tensor, "B N D"]:
        """The corrupted patch embeddings, before position embeddings are added."""
        mask = self.mask_token.to(embeddings.dtype)
        return torch.where(corruption.masked[:, :, None], mask, _at(embeddings, corruption.source))


def masked_patch_losses(predictions: Tensor, targets: Tensor, corruption: Corruption) -> Float[Tensor, " B"]:
    """Loss per image, in float32: the mean over its corrupted patches only.

    Cross-entropy of colours (mean over the 16 of a downsized patch), or mean squared error of pixels from 0 to 1.
    `predictions` come from the model, `targets` from `patch_targets` for all patches.
    """
    wanted = _at(targets, corruption.places)
    if targets.is_floating_point():
        return F.mse_loss(predictions.float(), wanted, reduction="none").mean(dim=(1, 2))
    losses = F.cross_entropy(predictions.float().flatten(0, 2), wanted.flatten(), reduction="none")
    per_image: Tensor = losses.unflatten(0, wanted.shape).mean(dim=(1, 2))
    return per_image


def masked_patch_accuracy(predictions: Tensor, targets: Tensor, corruption: Corruption) -> Float[Tensor, " B"]:
    """Per image, the fraction of its corrupted patches whose 3-bit colour is predicted correctly.

    For a downsized patch, the fraction of its 16 colours. Predicted pixels are correct if their mean colour has the same
    index as that of the patch, so the result can be compared with "mean-color-3bit".
    """
    wanted = _at(targets, corruption.places)
    if not targets.is_floating_point():
        return (predictions.argmax(dim=3) == wanted).float().mean(dim=(1, 2))
    found, true = (color_index(x.float().unflatten(2, (-1, 3)).mean(dim=2)) for x in (predictions, wanted))
    return (found == true).float().mean(dim=1)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Rows (B, M, D) of (B, N, D)."""
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
