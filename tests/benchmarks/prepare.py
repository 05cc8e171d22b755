"""The overhead of preparation over its unavoidable work, of writing compared with other writers, and memory.

    .venv/bin/python tests/benchmarks/prepare.py whole [--rounds 7] [--images 4000]
    .venv/bin/python tests/benchmarks/prepare.py writers [--rounds 7] [--images 1500]
    .venv/bin/python tests/benchmarks/prepare.py command [--rounds 3] [--images 60000]
    .venv/bin/python tests/benchmarks/prepare.py memory [--images 1000 10000 100000] [--folder DIR]

whole: CPU-seconds of a bare loop over the same libraries (read, decode, hash; then read again in random order, write
Parquet) over those of the whole job, its child process included; bar 0.8. writers: wall seconds of webdataset's
ShardWriter on the same bytes over ours (bar 1.7), and of Ray Data's read_binary_files + write_parquet over our gather on
the same Ray (bar 2). command: images a CPU-second of the whole machine, which must be quiet, from the start of
`vitline data prepare` to its end, of small photographs, over those of a loop of Pillow, sha256 and pyarrow; with Ray and
without. Rounds are interleaved; median and 95 % interval. memory: unique memory of driver and workers while
Ray Data prepares corpora of growing size. Needs webdataset beside the project.
"""

import argparse
import contextlib
import hashlib
import io
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from input import interval, jpeg, photograph
from PIL import Image

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, ImageNet21k, ShardingConfig
from vitline.data_prep.examine.images import perceptual_hashes, pixel_sha256
from vitline.data_prep.executors import InProcess, OnRay
from vitline.data_prep.plan.sort_records import ROW_SCHEMA
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import shard_schema
from vitline.data_prep.shards.write_shards import HashingSink, ensure_shard, shard_table, shard_writer
from vitline.infra.storage import open_store

_CLASSES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("whole", "writers", "command", "memory"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, nargs="+", default=[])
    parser.add_argument("--folder", type=Path, default=None, help="where there is room: 25 GB for 100,000 images")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if asked.what == "whole":
            whole(Path(folder), asked.rounds, (asked.images or [4000])[0])
        elif asked.what == "command":
            command(Path(folder), asked.rounds, (asked.images or [60_000])[0])
        elif asked.what == "writers":
            writers(Path(folder), asked.rounds, (asked.images or [1500])[0])
        else:
            memory(Path(folder), asked.images or [1000, 10_000, 100_000])


def photographs(number: int, seed: int = 0) -> Iterator[bytes]:
    """JPEGs of about 93 KB, all different: every hundredth is new, the others are it with its rows moved."""
    image = photograph(seed)
    for i in range(number):
        if i % 100 == 0:
            image = photograph(seed + i)
        yield jpeg(np.roll(image, 3 * i, axis=0))


def class_folder(folder: Path, number: int) -> list[Path]:
    files = []
    for i, data in enumerate(photographs(number)):
        file = folder / f"class-{i % _CLASSES:02d}" / f"{i:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        files.append(file)
    return files


def whole(folder: Path, rounds: int, number: int) -> None:
    files = class_folder(folder / "pictures", number)
    # Row groups as in a corpus 16 times as large: with few images each would have one row.
    recipe = CorpusRecipe(sharding=ShardingConfig(min_row_groups=16))
    request = CorpusConfig(name="photos", source=ClassFolders(path=str(folder / "pictures")), recipe=recipe)
    prepare([request], "memory://warm-up")
    ratios, wall_ratios = [], []
    sides = {"bare loop": lambda: bare_loop(files, folder / "bare"), "vitline": lambda: job(request, folder / "store")}
    for i in range(rounds):
        names = list(sides) if i % 2 else list(sides)[::-1]
        spent = {name: costs(sides[name]) for name in names}
        (bare, bare_wall), (ours, our_wall) = spent["bare loop"], spent["vitline"]
        ratios.append(bare / ours)
        wall_ratios.append(bare_wall / our_wall)
        print(
            f"  round {i + 1}: bare {1e3 * bare / number:.2f} ms, vitline {1e3 * ours / number:.2f} ms an image of "
            f"one core: {ratios[-1]:.3f} (wall {wall_ratios[-1]:.3f})"
        )
    print("whole job, bare loop over ours, CPU: {:.3f} [{:.3f}, {:.3f}]; bar 0.8".format(*interval(ratios)))
    print("                              wall: {:.3f} [{:.3f}, {:.3f}]".format(*interval(wall_ratios)))
    images = sum(file.stat().st_size for file in files)
    shards = [path for path in (folder / "store").rglob("part-*.parquet") if "_work" not in path.parts]
    print(f"bytes out over bytes in: {sum(path.stat().st_size for path in shards) / images:.5f}; bar 1.001 at 93 KB")


def command(folder: Path, rounds: int, number: int) -> None:
    files = []
    for i in range(number):
        if i % 100 == 0:
            image = photograph(i)
        file = folder / f"pictures/class-{i % _CLASSES:02d}/{i:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(np.roll(image, 3 * i, axis=0)[:150, :150]))
        files.append(file)
    print(f"{number:,} JPEGs of {sum(file.stat().st_size for file in files) / number / 1e3:.1f} KB")
    prep = [
        sys.executable,
        "-m",
        "vitline.flows.cli.main",
        "data",
        "prepare",
        "--source",
        str(folder / "pictures"),
        "--name",
        "small",
    ]
    sides: dict[str, Callable[[], object]] = {
        "plain loop": lambda: plain_loop(files, folder / "plain"),
        "vitline": lambda: new_store(folder / "a", prep),
        "vitline on Ray": lambda: new_store(folder / "b", [*prep, "--set", "execution.small_images=0"]),
    }
    for i in range(rounds):
        for name in list(sides) if i % 2 else list(sides)[::-1]:
            before, started = machine_seconds(), time.perf_counter()
            sides[name]()
            cpu, wall = machine_seconds() - before, time.perf_counter() - started
            print(
                f"  round {i + 1}: {name:15} {cpu:6.1f} CPU-s, {wall:6.1f} s, {cpu / wall:.2f} cores, {number / cpu:6,.0f}/s"
            )


def new_store(root: Path, prep: Sequence[str]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([*prep, "--root", str(root)], check=True, capture_output=True)


def plain_loop(files: Sequence[Path], out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for start in range(0, len(files), 1000):
        rows = []
        for file in files[start : start + 1000]:
            data = file.read_bytes()
            with Image.open(io.BytesIO(data)) as image:
                image.convert("RGB").tobytes()
            rows.append({"id": str(file), "sha256": hashlib.sha256(data).digest(), "image": data})
        pq.write_table(pa.Table.from_pylist(rows), out / f"{start}.parquet")


def machine_seconds() -> float:
    spent = psutil.cpu_times()
    return spent.user + spent.nice + spent.system


def costs(call: Callable[[], object]) -> tuple[float, float]:
    """CPU-seconds of this process and its children, and wall seconds."""
    started, before = time.perf_counter(), cpu_seconds()
    call()
    return cpu_seconds() - before, time.perf_counter() - started


def cpu_seconds() -> float:
    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            spent = child.cpu_times()
            total += spent.user + spent.system
    return total


def job(request: CorpusConfig, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    prepare([request], str(root))


def bare_loop(files: Sequence[Path], out: Path) -> None:
    """What cannot be left out: each image read, decoded and hashed once, then read again and written."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    rows = []
    for file in files:
        data = file.read_bytes()
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
        phash, mirror = perceptual_hashes(pixels)
        sha256 = hashlib.sha256(data).digest()
        rows.append((file, sha256, pixel_sha256(pixels), phash, mirror, *pixels.shape[:2]))
    random.Random(0).shuffle(rows)
    schema = shard_schema(single_label=True, has_weights=False)
    with pq.ParquetWriter(out / "shard.parquet", schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            columns = {
                "image": [{"bytes": row[0].read_bytes(), "path": row[0].name} for row in part],
                "labels": [[0]] * len(part),
                "label": [0] * len(part),
                "example_id": [row[0].name for row in part],
                "group": [None] * len(part),
                "sha256": [row[1] for row in part],
                "pixel_sha256": [row[2] for row in part],
                "phash": [row[3] for row in part],
                "phash_mirror": [row[4] for row in part],
                "width_px": [row[6] for row in part],
                "height_px": [row[5] for row in part],
                "source": ["bare"] * len(part),
            }
            writer.write_table(pa.table(columns, schema=schema))


def writers(folder: Path, rounds: int, number: int) -> None:
    import webdataset

    images = list(photographs(number))
    rows = planned_rows(images)
    schema = shard_schema(single_label=True, has_weights=False)
    store = open_store(str(folder / "ours"))

    # Each side gets images in its own form: gather reads those of a row group into one buffer.
    parts = [pa.array(images[start : start + 64]) for start in range(0, number, 64)]
    mean_bytes = sum(map(len, images)) / number

    def ours() -> None:
        with store.writer("shard.parquet") as file:
            sink = HashingSink(file)
            with shard_writer(sink, schema, mean_bytes) as writer:
                for i, part in enumerate(parts):
                    table = shard_table(rows.slice(64 * i, 64), part, "bench", schema)
                    writer.write_table(table, row_group_size=64)
            assert sink.sha256

    def shard_writer_of_webdataset() -> None:
        pattern = str(folder / "wds-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=10**9, maxsize=1e12, verbose=0) as sink:
            for i, image in enumerate(images):
                sink.write({"__key__": f"{i:06d}", "jpg": image, "cls": 0})

    report("writing, webdataset's ShardWriter over ours, wall", ours, shard_writer_of_webdataset, rounds, 1.7)
    size = (folder / "ours/shard.parquet").stat().st_size
    print(f"  bytes out over bytes in: {size / sum(map(len, images)):.5f}; bar 1.001")
    with a_ray():
        against_ray_data(folder, number, rounds)


def planned_rows(images: Sequence[bytes]) -> pa.Table:
    rows = [
        {
            "example_id": f"class/{i:06d}.jpg",
            "labels": [0],
            "split": "train",
            "base": "",
            "key": "",
            "offset": 0,
            "order_key": i,
            "num_bytes": len(data),
            **{name: hashlib.sha256(data).digest() for name in ("sha256", "pixel_sha256", "phash", "phash_mirror")},
            "width_px": 500,
            "height_px": 375,
            "format": "JPEG",
            "mode": "RGB",
        }
        for i, data in enumerate(images)
    ]
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def against_ray_data(folder: Path, number: int, rounds: int) -> None:
    """Our gather, which reads files in random order, writes and reads back, and Ray Data's own read and write."""
    import ray.data

    class_folder(folder / "pictures", number)
    root = str(folder / "gathered")
    request = CorpusConfig(name="photos", source=ClassFolders(path=str(folder / "pictures")))
    tasks = []

    class KeepTasks(InProcess):
        def run(self, work, given, **how):
            if work is ensure_shard:
                tasks.extend(given)
            return super().run(work, given)

    prepare([request], root, KeepTasks())

    def ours() -> None:
        for path in Path(root).rglob("_work/gather"):
            shutil.rmtree(path)
        list(OnRay().run(ensure_shard, tasks))

    def ray_datas_own() -> None:
        shutil.rmtree(folder / "ray", ignore_errors=True)
        ray.data.read_binary_files(str(folder / "pictures"), include_paths=True).write_parquet(str(folder / "ray"))

    report("gather on Ray, Ray Data's own over ours, wall", ours, ray_datas_own, rounds, 2.0)


@contextlib.contextmanager
def a_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, object_store_memory=500_000_000, include_dashboard=False, logging_level=30)
    try:
        yield
    finally:
        ray.shutdown()


def report(what: str, ours: Callable[[], None], peer: Callable[[], None], rounds: int, bar: float) -> None:
    ours(), peer()  # warm-up
    ratios = []
    for i in range(rounds):
        sides = [ours, peer] if i % 2 else [peer, ours]
        spent = {}
        for side in sides:
            started = time.perf_counter()
            side()
            spent[side] = time.perf_counter() - started
        ratios.append(spent[peer] / spent[ours])
        print(f"  round {i + 1}: ours {spent[ours]:.3f} s, peer {spent[peer]:.3f} s: {ratios[-1]:.2f}")
    print("{}: {:.2f} [{:.2f}, {:.2f}]; bar {}".format(what, *interval(ratios), bar))


def memory(folder: Path, sizes: Sequence[int]) -> None:
    """Class folders would make this a test of the file system, so the source is tars as in ImageNet-21k."""
    for number in sizes:
        made = folder / f"source-{number}"
        make_tars(made, number)
        with a_ray(), Sampler() as sampler:
            recipe = CorpusRecipe(duplicates="keep")
            request = CorpusConfig(name="photos", source=ImageNet21k(path=str(made)), recipe=recipe)
            started = time.perf_counter()
            (manifest,) = prepare([request], str(folder / f"store-{number}"), OnRay())
            seconds = time.perf_counter() - started
        print(
            f"{number:,} images, {manifest.counts.num_bytes / 1e9:.2f} GB: {seconds:.0f} s "
            f"({seconds / number * 1e3:.2f} ms an image); unique memory, driver {sampler.driver / 1e6:.0f} MB, largest "
            f"worker {sampler.worker / 1e6:.0f} MB, largest decoder {sampler.decoder / 1e6:.0f} MB"
        )
        shutil.rmtree(made)
        shutil.rmtree(folder / f"store-{number}")


def make_tars(folder: Path, number: int) -> None:
    folder.mkdir()
    per_tar = 500
    for first in range(0, number, per_tar):
        name = f"n{first // per_tar:08d}"
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for i, data in enumerate(photographs(min(per_tar, number - first), seed=first)):
                info = tarfile.TarInfo(f"{name}_{i}.JPEG")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


class Sampler:
    """Largest unique memory of this process, of a Ray worker and of a decoding process, twice a second."""

    def __enter__(self) -> "Sampler":
        self.driver = self.worker = self.decoder = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            own = psutil.Process()
            self.driver = max(self.driver, own.memory_full_info().uss)
            for process in own.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    words = " ".join(process.cmdline())
                    if "decode_server" in words:
                        self.decoder = max(self.decoder, process.memory_full_info().uss)
                    elif words.startswith("ray::"):
                        self.worker = max(self.worker, process.memory_full_info().uss)


if __name__ == "__main__":
    main()
