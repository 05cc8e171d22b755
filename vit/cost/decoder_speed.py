"""How fast each of the two decoders makes training views of the images of a corpus: the native one, which decodes only what a
view shows, and the one that decodes whole images."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vitline.vit.config import TrainConfig
from vitline.vit.input.augment import train_draws
from vitline.vit.input.batches import Source
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.decoding.native_view import TrainingView, native_decoder
from vitline.vit.input.decoding.which_decoder import HOW_TO_GET_IT
from vitline.vit.input.read_shards import SplitReader

_MOST_IMAGES = 256


@dataclass(frozen=True)
class DecoderSpeed:
    """Images per second of CPU time of one thread, decoded, cropped, resized and augmented."""

    whole: float
    native: float | None
    """With the images that the native decoder leaves to the other one; None where it is not installed, or cannot be used here."""
    native_fraction: float = 0.0
    """Of the images, those that the native decoder takes."""

    def sentence(self) -> str:
        """Which decoder trainings use here, and what the other would give."""
        if self.native is None:
            return (
                f"Decoder: whole images, {self.whole:,.0f} images/s a core. The native one is not installed or cannot be used here, so "
                f"what it would give was not measured; {HOW_TO_GET_IT}."
            )
        return (
            f"Decoder: vitline-native for {self.native_fraction:.0%} of the images, {self.native:,.0f} images/s a core; without it, "
            f"decoding whole images, {self.whole:,.0f} ({self.whole / self.native:.2f} x)."
        )


def decoder_speed(sources: Sequence[Source], config: TrainConfig, seconds: float) -> DecoderSpeed:
    """Decodes images of the first row group of each corpus with both decoders in turn, for about `seconds`, one image at least. Raises
    ShardError for a corpus that cannot be read, ValueError if none of these images can be decoded."""
    augment, seed, native = config.recipe.input.augment, config.recipe.seed, native_decoder() is not None
    out = torch.zeros(augment.image_size_px, augment.image_size_px, 3, dtype=torch.uint8)
    began, images, taken, whole_s, native_s = time.monotonic(), 0, 0, 0.0, 0.0
    for source in sources:
        reader = SplitReader(source.corpus, source.manifest, source.split, DecodedCache(0), source.labels)
        encoded = reader.load(0).images
        draws = train_draws(seed, 0, range(len(encoded)), augment.randaugment_layers).tolist()
        limit = began + seconds * (1 + sources.index(source)) / len(sources)
        for row, of_image in enumerate(draws[: _MOST_IMAGES // len(sources)]):
            view, data = TrainingView(of_image, augment), encoded[row].as_py()
            try:
                start = time.thread_time()
                view(reader.decode(row, data), out)
                took_s = time.thread_time() - start
            except ValueError:
                continue  # a bad example, which a training masks
            images, whole_s = images + 1, whole_s + took_s
            if native:
                start = time.thread_time()
                written = view.write_natively(data, reader.policy, out)
                native_s += time.thread_time() - start + (0.0 if written else took_s)
                taken += written
            if time.monotonic() > limit:
                break
        reader.close()
    if not images:
        raise ValueError(
            "None of the first images can be decoded. `vitline data verify NAME --pixels` lists those that cannot."
        )
    return DecoderSpeed(images / whole_s, images / native_s if native else None, taken / images)
