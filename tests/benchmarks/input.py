"""Input speed per CPU-second, against Pillow with the same crops. Command: python tests/benchmarks/input.py

Sides are interleaved; prints every round, then medians with their 95 % intervals. Bar (performance-notes): 1.7 x Pillow
with torchvision's recipe, which ends in normalised floats; with `vitline-native` installed 2.2 x, and 0.95 of what
libjpeg-turbo takes to decode the whole image and nothing more. Ours hands over uint8 and normalises on the device, so
the ratio to Pillow without the last step is printed, too.
"""

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import comb
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch
from PIL import Image

from vitline.data_prep.decode import DecodePolicy, decode
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo, shard_key
from vitline.infra.storage import open_store
from vitline.vit.input.augment import inception_crop, train_draws, train_pixels
from vitline.vit.input.augmentations.mixing import Mix, mix_lane
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoding.native_view import TrainingView, native_decoder

sys.path.insert(0, str(Path(__file__).parents[1]))
from shard_lists import with_shard_list


def photograph(seed: int, height: int = 375, width: int = 500) -> np.ndarray:
    """Noise with the spectrum of photographs (amplitude 1 / frequency), the channels mostly alike."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]) + 1 / width
    planes = [np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) / frequency) for _ in range(4)]
    image = np.stack([planes[0] + 0.3 * p for p in planes[1:]], axis=-1)
    return np.clip(127 + 50 * image / image.std(), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=82)
    return buffer.getvalue()


def ours(files: Sequence[bytes], draws: Sequence[Sequence[float]], config: AugmentConfig, out: torch.Tensor) -> None:
    for data, d, image in zip(files, draws, out, strict=True):
        train_pixels(decode(data), d, config, image)


def ours_native(
    files: Sequence[bytes], draws: Sequence[Sequence[float]], config: AugmentConfig, out: torch.Tensor
) -> None:
    for data, d, image in zip(files, draws, out, strict=True):
        assert TrainingView(d, config).write_natively(data, _POLICY, image)


_POLICY = DecodePolicy()


def full_decode(
    files: Sequence[bytes], draws: Sequence[Sequence[float]], config: AugmentConfig, out: torch.Tensor
) -> None:
    for data in files:
        simplejpeg.decode_jpeg(data)


def pillow(files: Sequence[bytes], draws: Sequence[Sequence[float]], config: AugmentConfig, out: torch.Tensor) -> None:
    """What torchvision's RandomResizedCrop and RandomHorizontalFlip do to a Pillow image, with the same draws."""
    for data, d, image in zip(files, draws, out.numpy(), strict=True):
        image[:] = np.asarray(pillow_view(data, d, config))


def torchvision_recipe(
    files: Sequence[bytes], draws: Sequence[Sequence[float]], config: AugmentConfig, out: torch.Tensor
) -> None:
    """As `pillow`, then what torchvision's ToTensor and Normalize do."""
    half = torch.full((3, 1, 1), 0.5)
    for data, d, image in zip(files, draws, out, strict=True):
        pixels = torch.from_numpy(np.array(pillow_view(data, d, config), copy=True))
        image.copy_(pixels.permute(2, 0, 1).contiguous().float().div(255).clone().sub_(half).div_(half))


def pillow_view(data: bytes, draws: Sequence[float], config: AugmentConfig) -> Image.Image:
    picture, side = Image.open(io.BytesIO(data)).convert("RGB"), config.image_size_px
    top, left, h, w = inception_crop(picture.height, picture.width, draws, config.min_area_fraction)
    view = picture.crop((left, top, left + w, top + h)).resize((side, side), Image.Resampling.BILINEAR)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[-1] < 0.5 else view


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval by order statistics (no assumption on the distribution)."""
    n, ordered = len(values), sorted(values)
    k = 0
    while 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n <= 0.05:
        k += 1
    return statistics.median(ordered), ordered[max(k - 1, 0)], ordered[n - max(k, 1)]


def compare_jpeg(rounds: int, num_images: int) -> None:
    files = [jpeg(photograph(i)) for i in range(num_images)]
    config, draws = AugmentConfig(), train_draws(0, 0, np.arange(num_images)).tolist()
    pixels = torch.empty(3, num_images, 224, 224, 3, dtype=torch.uint8)
    floats = torch.empty(num_images, 3, 224, 224)
    sides = {
        "vitline": (ours, pixels[0]),
        "vitline, vitline-native": (ours_native, pixels[1]),
        "Pillow": (pillow, pixels[2]),
        "Pillow, torchvision's recipe": (torchvision_recipe, floats),
        "libjpeg-turbo, whole image, no more": (full_decode, floats),
    }
    if native_decoder() is None:
        del sides["vitline, vitline-native"]
        print("vitline-native is not installed: make install builds it")
    for side, out in sides.values():
        side(files[:8], draws[:8], config, out[:8])
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        names = list(sides)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            side, out = sides[name]
            speeds[name].append(num_images / cpu_seconds(partial(side, files, draws, config, out)))
        print(f"  round {i + 1:2d}: " + " ".join(f"{values[-1]:7.1f}" for values in speeds.values()) + " images/CPU-s")
    print(f"\n500x375 JPEG ({sum(map(len, files)) / num_images / 1e3:.0f} KB) -> decode, crop, resize 224, flip")
    for name, values in speeds.items():
        print("  {:64s} {:8.2f}  [{:.2f}, {:.2f}]".format(name, *interval(values)))
    for name in [name for name in sides if name.startswith("vitline")]:
        for peer in [peer for peer in sides if not peer.startswith("vitline")]:
            ratios = [one / other for one, other in zip(speeds[name], speeds[peer], strict=True)]
            print("  {:64s} {:8.3f}  [{:.3f}, {:.3f}]".format(f"{name} / {peer}", *interval(ratios)))
    error = (pixels[0].int() - pixels[2].int()).abs()
    print(f"  against Pillow's pixels: mean error {error.float().mean():.3f} grey levels, largest {int(error.max())}")
    if native_decoder() is not None:
        print(f"  vitline-native's pixels equal to vitline's: {torch.equal(pixels[0], pixels[1])}")


def augmented(rounds: int, num_images: int) -> None:
    """RandAugment by layers, and MixUp of whole lanes, on decoded photographs: what they add to crop, resize and flip."""
    photographs = [photograph(i) for i in range(num_images)]
    out = torch.empty(num_images, 224, 224, 3, dtype=torch.uint8)

    def views(layers: int) -> None:
        config = AugmentConfig(randaugment_layers=layers, randaugment_magnitude=15 if layers else None)
        draws = train_draws(0, 0, np.arange(num_images), layers).tolist()
        for image, d, view in zip(photographs, draws, out, strict=True):
            train_pixels(image, d, config, view)

    def mixup() -> None:
        mix_lane(list(out), [True] * num_images, Mix(0.75, None))

    sides = [("crop, resize, flip", partial(views, 0)), ("MixUp", mixup)]
    sides += [(f"the same, {n} layers of RandAugment", partial(views, n)) for n in (1, 2)]
    spent: dict[str, list[float]] = {name: [] for name, _ in sides}
    for i in range(rounds):
        for name, side in sides[i % len(sides) :] + sides[: i % len(sides)]:
            spent[name].append(1e3 * cpu_seconds(side) / num_images)
    print("\n224 px from decoded 500x375 photographs, CPU-milliseconds an image")
    for name, values in spent.items():
        print("  {:36s} {:6.3f}  [{:.3f}, {:.3f}]".format(name, *interval(values)))


def cached_small(rounds: int) -> None:
    """64-pixel icons whose decoded pixels are cached: crop, resize, flip, alone and through the whole pipeline."""
    icons = [photograph(i, 72, 72) for i in range(512)]
    config, out = AugmentConfig(image_size_px=64), torch.empty(512, 64, 64, 3, dtype=torch.uint8)
    draws = train_draws(0, 0, np.arange(512)).tolist()

    def alone() -> None:
        for icon, d, image in zip(icons, draws, out, strict=True):
            train_pixels(icon, d, config, image)

    print("\n64-pixel icons, decoded pixels cached, CPU-microseconds an image")
    values = [1e6 * cpu_seconds(alone) / 512 for _ in range(rounds)]
    print("  {:32s} {:8.1f}  [{:.1f}, {:.1f}]".format("crop, resize, flip", *interval(values)))
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2):
            values = pipeline_costs(Path(folder), icons * 4, config, world_size, rounds)
            print("  {:32s} {:8.1f}  [{:.1f}, {:.1f}]".format(f"whole pipeline, W = {world_size}", *interval(values)))


def pipeline_costs(
    folder: Path, icons: Sequence[np.ndarray], augment: AugmentConfig, world_size: int, rounds: int
) -> list[float]:
    """CPU-microseconds per image of one rank, planning and threads included, once all is cached."""
    corpus, manifest = icon_corpus(folder, icons)
    recipe = InputConfig(global_batch_size=64, num_lanes=32, shuffle_window=4, augment=augment)
    loading = LoaderResources(world_size=world_size, decoded_cache_bytes=2**28)
    with source_batches(
        [Source(corpus, manifest, "train")], recipe, seed=0, micro_batch_size=64, loading=loading
    ) as batches:
        warm_up = 8 * len(icons) // 64
        for _ in range(warm_up):
            next(batches)
        return [1e6 * cpu_seconds(lambda: list(islice(batches, 32))) * world_size / (32 * 64) for _ in range(rounds)]


def icon_corpus(folder: Path, icons: Sequence[np.ndarray | bytes], rows_per_group: int = 8):
    """A corpus of images, which are written as PNG, or of image files as they are."""
    num_rows, store = len(icons), open_store(folder)
    segment = SegmentInfo(split="train", name="s000", num_rows=num_rows, num_shards=1)
    split = SplitInfo(
        num_rows=num_rows,
        rows_per_row_group=rows_per_group,
        row_groups_per_shard=-(-num_rows // rows_per_group),
        segments=(segment,),
        digest="icons",
    )
    manifest = Manifest(
        name="icons",
        version="0",
        digest="icons",
        class_map_digest="",
        num_classes=10,
        single_label=True,
        order_seed=0,
        splits={"train": split},
        decode_policy=DecodePolicy(),
        counts=Counts(num_found=num_rows, num_accepted=num_rows, num_refused=0, num_bytes=0, refused={}),
        provenance={},
    )
    rows = []
    for i, icon in enumerate(icons):
        buffer = io.BytesIO(icon if isinstance(icon, bytes) else b"")
        if not isinstance(icon, bytes):
            Image.fromarray(icon).save(buffer, "PNG")
        hashes = dict.fromkeys(("sha256", "pixel_sha256", "phash", "phash_mirror"), b"")
        rows.append(
            hashes
            | {"image": {"bytes": buffer.getvalue(), "path": f"{i}.png"}, "labels": [i % 10], "label": i % 10}
            | {"example_id": str(i), "width_px": 72, "height_px": 72, "source": ""}
        )
    with store.writer(shard_key("train", "s000", 0, 1)) as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=manifest.arrow_schema()), file, row_group_size=rows_per_group)
    return store, with_shard_list(store, manifest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=96, help="JPEG images on each side of a round")
    parser.add_argument("--jpeg-only", action="store_true", help="no RandAugment, no small icons")
    given = parser.parse_args()
    torch.set_num_threads(1)
    compare_jpeg(given.rounds, given.images)
    if given.jpeg_only:
        return
    augmented(given.rounds, given.images)
    cached_small(given.rounds)


if __name__ == "__main__":
    main()
