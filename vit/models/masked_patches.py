"""Self-supervision by masked patches: some patch embeddings are corrupted, and the network tells what was there.

Source: arXiv:2010.11929, Sec. 4.6 and App. B.1.2. A step of training:

    corruption = draw_corruption(len(images), network.config.num_patches, generator)
    targets = patch_targets(images, network.config.patch_size_px, "mean-color-3bit")
    losses = masked_patch_losses(model(images, corruption), targets, corruption)
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vit.models.vit import POS_EMBED_STD, VisionTransformer

Target = Literal["mean-color-3bit", "downsized-4x4-3bit", "pixels-l2"]

# At 3 bits a channel.
LEVELS, NUM_COLORS = 8, 512
DOWNSIZED_SIDE = 4
MASKED_FRACTION, REPLACED_FRACTION = 0.8, 0.1


@dataclass(frozen=True, eq=False)
class Corruption:
    """Which M of the N patches of each image are corrupted, and what stands in the place of every patch."""

    places: Int64[Tensor, "B M"]
    """The corrupted patches: first those behind the mask token, then the replaced, then the unchanged."""
    source: Int64[Tensor, "B N"]
    """Whose embedding a patch has: its own, or that of another patch of the same image."""
    masked: Bool[Tensor, "B N"]
    """Where the mask token stands instead."""

    def to(self, device: torch.device | str) -> "Corruption":
        """The same on another device."""
        return Corruption(self.places.to(device), self.source.to(device), self.masked.to(device))


def draw_corruption(
    num_images: int, num_patches: int, generator: torch.Generator, rate: float = 0.5, device: torch.device | str = "cpu"
) -> Corruption:
    """Corrupts M = round(rate * num_patches) patches of every image: a function of the generator's state alone.

    round(0.8 M) of them give way to the mask token, round(0.1 M) to the embedding of another patch, drawn evenly from
    the image's others, and the rest stay as they are, though they are predicted too. The paper states the shares; that
    each image has them exactly is our choice. A generator on the CPU draws the same for every `device`. Raises
    ValueError where nothing would be corrupted, or where a patch has no other.
    """
    num_corrupted = round(rate * num_patches)
    if not 1 <= num_corrupted <= num_patches or num_patches < 2:
        raise ValueError(
            f"rate={rate} corrupts {num_corrupted} of {num_patches} patches; it must be at least 1 of at least 2, and "
            f"not more than all. Choose another rate, or images with more patches."
        )
    num_masked, num_replaced = round(MASKED_FRACTION * num_corrupted), round(REPLACED_FRACTION * num_corrupted)
    shape, at = (num_images, num_patches), generator.device
    places = torch.rand(shape, generator=generator, device=at).argsort(dim=1, stable=True)[:, :num_corrupted]
    # 1 to N - 1 further on, around the end: never the patch itself.
    further = torch.randint(1, num_patches, (num_images, num_replaced), generator=generator, device=at)
    replaced = places[:, num_masked : num_masked + num_replaced]
    source = torch.arange(num_patches, device=at).repeat(num_images, 1)
    source.scatter_(1, replaced, (replaced + further) % num_patches)
    masked = torch.zeros(shape, dtype=torch.bool, device=at).scatter_(1, places[:, :num_masked], True)
    return Corruption(places, source, masked).to(device)


def patch_targets(images: Float[Tensor, "B 3 H W"], patch_size_px: int, target: Target) -> Tensor:
    """What is to be predicted of every patch, (B, N, ...) in raster order, of images in [-1, 1].

    - "mean-color-3bit": (B, N, 1) int64, `color_index` of the patch's mean colour.
    - "downsized-4x4-3bit": (B, N, 16) int64, the same for a 4 x 4 version of the patch, in raster order. Each of the 16
      is the mean over its part; where 4 does not divide the patch, parts overlap by a pixel (adaptive pooling).
    - "pixels-l2": (B, N, P * P * 3) float32, all pixels from 0 to 1, colours innermost.

    Means are taken of RGB values from 0 to 1; the paper does not say. Rows and columns that make no whole patch are
    dropped, as the stem does.
    """
    side = patch_size_px
    rows, columns = images.shape[2] // side, images.shape[3] // side
    pixels = (images[:, :, : rows * side, : columns * side].float() + 1) / 2
    patches = pixels.unflatten(2, (rows, side)).unflatten(4, (columns, side))  # B 3 rows P columns P
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # B N 3 P P
    if target == "mean-color-3bit":
        return color_index(patches.mean(dim=(3, 4)))[:, :, None]
    if target == "pixels-l2":
        return patches.permute(0, 1, 3, 4, 2).flatten(2)
    small = F.adaptive_avg_pool2d(patches.flatten(0, 1), DOWNSIZED_SIDE).unflatten(0, patches.shape[:2])
    return color_index(small.permute(0, 1, 3, 4, 2)).flatten(2)


def color_index(colors: Float[Tensor, "*S 3"]) -> Int64[Tensor, "*S"]:
    """r * 64 + g * 8 + b of RGB from 0 to 1, at 8 equal levels a channel; what lies outside counts as its nearest."""
    r, g, b = (colors * LEVELS).floor().clamp(0, LEVELS - 1).long().unbind(dim=-1)
    return (r * LEVELS + g) * LEVELS + b


class MaskedPatchModel(nn.Module):
    """A Vision Transformer that predicts its corrupted patches, each from its own output token.

    The mask token and the prediction head are new; `network` stays a network like any other, to be fine-tuned later. Its
    own head, and whatever pools the tokens, are kept but not used: they get no gradient.
    """

    def __init__(self, network: VisionTransformer, target: Target = "mean-color-3bit"):
        super().__init__()
        config = network.config
        if target == "downsized-4x4-3bit" and config.patch_size_px < DOWNSIZED_SIDE:
            raise ValueError(
                f"target={target} needs patches of {DOWNSIZED_SIDE} px or more, not {config.patch_size_px}; "
                f"mean-color-3bit does for any."
            )
        self.network, self.target = network, target
        outputs = {
            "mean-color-3bit": NUM_COLORS,
            "downsized-4x4-3bit": DOWNSIZED_SIDE**2 * NUM_COLORS,
            "pixels-l2": 3 * config.patch_size_px**2,
        }[target]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.prediction_head = nn.Linear(config.embed_dim, outputs)
        # As the position embeddings and the class head of this house; the paper does not say.
        nn.init.normal_(self.mask_token, std=POS_EMBED_STD)
        nn.init.zeros_(self.prediction_head.weight)
        nn.init.zeros_(self.prediction_head.bias)

    def forward(self, images: Float[Tensor, "B 3 H W"], corruption: Corruption) -> Tensor:
        """Predictions for the corrupted patches, in the order of `corruption.places`.

        Logits (B, M, 1, 512) or (B, M, 16, 512), or pixels (B, M, P * P * 3). Raises ValueError where the corruption is
        not for these images.
        """
        x = self.network.stem(images).flatten(2).transpose(1, 2)
        if x.shape[:2] != corruption.source.shape:
            raise ValueError(
                f"{x.shape[0]} images of {x.shape[1]} patches, but a corruption of {corruption.source.shape[0]} images "
                f"of {corruption.source.shape[1]}; draw it for this batch."
            )
        num_patches = x.shape[1]
        x = self.corrupted(x, corruption)
        if self.network.cls_token is not None:
            x = torch.cat([self.network.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = _at(self.network.encode(x)[:, -num_patches:], corruption.places)
        x = self.prediction_head(x)
        return x if self.target == "pixels-l2" else x.unflatten(2, (-1, NUM_COLORS))

    def corrupted(self, embeddings: Float[Tensor, "B N D"], corruption: Corruption) -> Float[Tensor, "B N D"]:
        """The patch embeddings, before positions are added, with others' and the mask token in their places."""
        mask = self.mask_token.to(embeddings.dtype)
        return torch.where(corruption.masked[:, :, None], mask, _at(embeddings, corruption.source))


def masked_patch_losses(predictions: Tensor, targets: Tensor, corruption: Corruption) -> Float[Tensor, " B"]:
    """Loss per image, in float32: the mean over its corrupted patches; no other patch counts.

    Cross-entropy of colours (mean over the 16 of a downsized patch), or the mean squared error of the pixels, on their
    scale from 0 to 1. `predictions` are the model's, `targets` those of `patch_targets` for all patches.
    """
    wanted = _at(targets, corruption.places)
    if targets.is_floating_point():
        return F.mse_loss(predictions.float(), wanted, reduction="none").mean(dim=(1, 2))
    losses = F.cross_entropy(predictions.float().flatten(0, 2), wanted.flatten(), reduction="none")
    return losses.unflatten(0, wanted.shape).mean(dim=(1, 2))


def masked_patch_accuracy(predictions: Tensor, targets: Tensor, corruption: Corruption) -> Float[Tensor, " B"]:
    """Per image, the fraction of its corrupted patches whose 3-bit colour is predicted right.

    Of a downsized patch, the fraction of its 16 colours counts. Predicted pixels are right where their mean colour falls
    on the index of the patch's, so that the figure can be compared with that of "mean-color-3bit".
    """
    wanted = _at(targets, corruption.places)
    if not targets.is_floating_point():
        return (predictions.argmax(dim=3) == wanted).float().mean(dim=(1, 2))
    found, true = (color_index(x.float().unflatten(2, (-1, 3)).mean(dim=2)) for x in (predictions, wanted))
    return (found == true).float().mean(dim=1)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Rows (B, M, D) of (B, N, D)."""
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
