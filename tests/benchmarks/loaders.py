"""The whole way from shards to batches in memory on two cores, against other loaders. Command: python tests/benchmarks/loaders.py

In an environment of its own, with torch, webdataset, datasets, litdata, mosaicml-streaming, `pip install ./vit/native` and this
folder's project on PYTHONPATH; a peer that is not installed is left out. Each peer reads its own format with two worker
processes, decodes with Pillow and torchvision's recipe (crop, flip, normalised floats; torchvision itself is not
needed), and again with our decoder in it, to uint8 as ours. vitline reads Parquet with two threads. Sides take turns; all
workers stay alive between rounds. Prints every round: images per second of wall time, and per CPU-second of all processes.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parent))
from input import icon_corpus, interval, jpeg, photograph, pillow_view

from vitline.data_prep.decode import DecodePolicy, decode
from vitline.vit.input.augment import train_draws
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoding.native_view import TrainingView, native_decoder

BATCH, WORKERS, AUGMENT, POLICY = 64, 2, AugmentConfig(), DecodePolicy()
DRAWS = train_draws(0, 0, np.arange(4096)).tolist()
Decoder = Callable[[bytes], torch.Tensor]


class Usual:
    """Pillow, and what torchvision's RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize do."""

    num = 0

    def __call__(self, data: bytes) -> torch.Tensor:
        self.num += 1
        pixels = torch.from_numpy(np.array(pillow_view(data, DRAWS[self.num % len(DRAWS)], AUGMENT), copy=True))
        half = torch.full((3, 1, 1), 0.5)
        return pixels.permute(2, 0, 1).contiguous().float().div(255).sub_(half).div_(half)


class Ours:
    """The view of a training of ours."""

    num = 0

    def __call__(self, data: bytes) -> torch.Tensor:
        self.num += 1
        out = torch.empty(224, 224, 3, dtype=torch.uint8)
        view = TrainingView(DRAWS[self.num % len(DRAWS)], AUGMENT)
        if not view.write_natively(data, POLICY, out):
            view(decode(data, POLICY), out)
        return out


def one_thread(_: int) -> None:
    torch.set_num_threads(1)


def loader(dataset: Iterable, kind: type = DataLoader, **options) -> Iterable:
    options |= {"persistent_workers": True, "worker_init_fn": one_thread, "multiprocessing_context": "fork"}
    return kind(dataset, batch_size=BATCH, num_workers=WORKERS, drop_last=False, **options)


class ParquetRows(IterableDataset):
    """Row groups of the Parquet shards, dealt to the workers; the plainest loader."""

    def __init__(self, files: list[str], decoder: Decoder) -> None:
        self.files, self.decoder = files, decoder

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        for file in self.files:
            parquet = pq.ParquetFile(file)
            for group in range(worker.id, parquet.num_row_groups, worker.num_workers):
                table = parquet.read_row_group(group, columns=["image", "label"])
                for image, label in zip(table["image"].to_pylist(), table["label"].to_pylist(), strict=True):
                    yield self.decoder(image["bytes"]), label


def parquet_loader(folder: Path, files: list[bytes], decoder: Decoder) -> Iterable:
    return loader(ParquetRows([str(path) for path in sorted((folder / "vitline").rglob("part-*.parquet"))], decoder))


def webdataset_loader(folder: Path, files: list[bytes], decoder: Decoder) -> Iterable:
    import webdataset

    made = folder / "webdataset"
    if not made.exists():
        made.mkdir()
        with webdataset.ShardWriter(f"{made}/%04d.tar", maxcount=-(-len(files) // 4), verbose=0) as sink:
            for i, data in enumerate(files):
                sink.write({"__key__": f"{i:06d}", "jpg": data, "cls": b"%d" % (i % 10)})
    urls = [str(path) for path in sorted(made.glob("*.tar"))]
    rows = webdataset.WebDataset(urls, shardshuffle=False).shuffle(100).to_tuple("jpg", "cls")
    return loader(rows.map_tuple(decoder, int))


def decoded_batch(rows: list[dict], decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of rows `{"image": bytes, "label": int}`; called in the worker that read them."""
    return torch.stack([decoder(row["image"]) for row in rows]), torch.tensor([int(row["label"]) for row in rows])


def row_of(pair: tuple[int, bytes]) -> dict:
    return {"image": pair[1], "label": pair[0] % 10}


def streaming_loader(folder: Path, files: list[bytes], decoder: Decoder) -> Iterable:
    import streaming

    made = folder / "streaming"
    if not made.exists():
        with streaming.MDSWriter(out=str(made), columns={"image": "bytes", "label": "int"}) as sink:
            for pair in enumerate(files):
                sink.write(row_of(pair))
    rows = streaming.StreamingDataset(local=str(made), shuffle=True, batch_size=BATCH)
    return loader(rows, streaming.StreamingDataLoader, collate_fn=partial(decoded_batch, decoder=decoder))


def litdata_loader(folder: Path, files: list[bytes], decoder: Decoder) -> Iterable:
    import litdata

    made = folder / "litdata"
    if not made.exists():
        pairs = list(enumerate(files))
        litdata.optimize(row_of, pairs, output_dir=str(made), chunk_bytes="16MB", num_workers=1, verbose=False)
    rows = litdata.StreamingDataset(str(made), shuffle=True)
    return loader(rows, litdata.StreamingDataLoader, collate_fn=partial(decoded_batch, decoder=decoder))


def huggingface_loader(folder: Path, files: list[bytes], decoder: Decoder, streamed: bool) -> Iterable:
    import datasets

    datasets.disable_progress_bars()
    made = folder / "huggingface"
    if not made.exists():  # a worker streams whole files
        made.mkdir()
        (file,) = (folder / "vitline").rglob("part-*.parquet")
        table = pq.read_table(file, columns=["image", "label"])
        for i in range(WORKERS):
            part = table.slice(i * len(files) // WORKERS, len(files) // WORKERS)
            pq.write_table(part, made / f"{i}.parquet", row_group_size=16, compression="none")
    parts = [str(path) for path in sorted(made.glob("*.parquet"))]
    given = {"data_files": parts, "split": "train", "columns": ["image", "label"], "streaming": streamed}
    rows = datasets.load_dataset("parquet", cache_dir=str(folder / "cache"), **given)
    rows = rows.cast_column("image", datasets.Image(decode=False))
    if streamed:
        return loader(rows.map(partial(huggingface_row, decoder=decoder), remove_columns=["image", "label"]))
    return loader(rows.with_transform(partial(huggingface_rows, decoder=decoder)))


def huggingface_row(row: dict, decoder: Decoder) -> dict:
    return {"pixels": decoder(row["image"]["bytes"]), "class": row["label"]}


def huggingface_rows(rows: dict, decoder: Decoder) -> dict:
    return {"pixels": [decoder(image["bytes"]) for image in rows["image"]], "class": rows["label"]}


PEERS = {
    "webdataset": ("webdataset", webdataset_loader),
    "MosaicML Streaming": ("streaming", streaming_loader),
    "LitData": ("litdata", litdata_loader),
    "Hugging Face datasets, streamed": ("datasets", partial(huggingface_loader, streamed=True)),
    "Hugging Face datasets, memory-mapped": ("datasets", partial(huggingface_loader, streamed=False)),
    "DataLoader over Parquet": ("torch", parquet_loader),
}


def stand_in_for_torchvision() -> None:
    """MosaicML Streaming imports torchvision, whose operators do not load beside a torch for the CPU, and uses none of it here."""
    for name, content in {"": {}, ".transforms": {}, ".transforms.functional": {"to_tensor": None}}.items():
        module = types.ModuleType(f"torchvision{name}")
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
    folders = types.ModuleType("torchvision.datasets")
    folders.__spec__, folders.VisionDataset = ModuleSpec(folders.__name__, None), object
    sys.modules[folders.__name__] = folders


def epoch_of(batches: Iterable, num_images: int) -> None:
    """All images of one epoch."""
    seen = sum(len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]) for batch in batches)
    assert seen == num_images, f"{seen} of {num_images}"


def steps_of(batches: Iterator, num_images: int) -> None:
    """As many images of the endless stream of a training."""
    seen = sum(batch.num_examples for step in islice(batches, num_images // BATCH) for batch in step)
    assert seen == num_images, f"{seen} of {num_images}"


def spent(call: Callable[[], None], used_up: Iterator | None = None) -> tuple[float, float]:
    """Wall seconds, and CPU-seconds of this process and its children. Four steps of `used_up` are taken first: what an endless
    stream has made ahead, while others ran, is not to count."""

    def cpu() -> float:
        here = psutil.Process()
        times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    if used_up is not None:
        next(islice(used_up, 3, 4))
    before, started = cpu(), time.perf_counter()
    call()
    return time.perf_counter() - started, cpu() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    stand_in_for_torchvision()
    files = [jpeg(photograph(i % 64)) for i in range(given.images)]
    with tempfile.TemporaryDirectory() as place:
        compare(Path(place), files, given.rounds)


def compare(folder: Path, files: list[bytes], rounds: int) -> None:
    corpus, manifest = icon_corpus(folder / "vitline", files, rows_per_group=16)
    recipe = InputConfig(global_batch_size=BATCH, num_lanes=8, shuffle_window=2, augment=AUGMENT)
    loading = LoaderResources(threads=WORKERS)
    sides: dict[str, Callable[[], None]] = {}
    for name, (package, make) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name} is not installed")
            continue
        for decoder, suffix in ((Usual(), ""), (Ours(), ", our decoder")):
            sides[name + suffix] = partial(epoch_of, make(folder, files, decoder), len(files))
            sides[name + suffix]()  # starts the workers: before ours has threads, which a fork would not copy
    ours = source_batches([Source(corpus, manifest, "train")], recipe, seed=0, micro_batch_size=BATCH, loading=loading)
    sides = {"vitline": partial(steps_of, ours, len(files)), **sides}
    sides["vitline"]()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(rounds):
        names = list(sides)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            wall, cpu = spent(sides[name], ours if name == "vitline" else None)
            results[name].append((len(files) / wall, len(files) / cpu))
        print(
            f"  round {i + 1}: " + " ".join("{:.0f}/{:.0f}".format(*values[-1]) for values in results.values()),
            flush=True,
        )
    ours.close()
    decoder = "vitline-native" if native_decoder() else "whole images"
    load = psutil.getloadavg()[1]
    print(f"\n{len(files)} JPEGs of 93 KB an epoch, {WORKERS} workers, ours: {decoder}; load {load:.1f}")
    print("ratio of vitline to each, wall time and CPU-seconds: median and 95 % interval")
    for name, values in results.items():
        wall, cpu = (
            interval([one[k] / other[k] for one, other in zip(results["vitline"], values, strict=True)]) for k in (0, 1)
        )
        rate = interval([value[0] for value in values])[0]
        text = "{:.2f} [{:.2f}, {:.2f}]   {:.2f} [{:.2f}, {:.2f}]".format(*wall, *cpu)
        print(f"  {name:52s} {rate:7.0f} images/s   {text}")


if __name__ == "__main__":
    main()
