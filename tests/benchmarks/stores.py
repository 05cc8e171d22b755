"""Clients of S3 for what vitline does there: s3fs, pyarrow's S3FileSystem and obstore, on a real service behind a proxy with latency.
Command: python tests/benchmarks/stores.py [--latency-ms 20] [--rounds 7]

Reads: ranges of 8 MiB, 64 in flight, each in a thread, as the loader makes them; seconds of the wall, and CPU-seconds of the process
of the client. Writes: objects of 1 KB, one after the other, created if absent and then swapped by their tag. pyarrow has no
conditional writes; its files are opened beforehand, because opening one costs a request. `vitline` is `S3Store`, which is s3fs with 32
connections and back-off. The clients take turns, each round begins with another one. obstore is not a dependency of vitline: install it in
a folder beside, and name that in PYTHONPATH.
"""

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import obstore
import pyarrow.fs
import s3fs
from distant_s3 import distant_s3
from input import interval
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store as ObstoreS3

from vitline.infra.storage import open_store
from vitline.infra.stores.store import PreconditionFailed, Store

MIB = 2**20
RANGE_BYTES, IN_FLIGHT, OBJECT_BYTES, NUM_OBJECTS = 8 * MIB, 64, 32 * MIB, 8
Read = Callable[[str, int], int]
"""Key and first byte of a range -> bytes read."""


class Clients:
    """The same bucket and prefix through each client: how to read a range, and how to create and swap an object."""

    def __init__(self, root: str) -> None:
        self.root, endpoint = root.removeprefix("s3://"), os.environ["AWS_ENDPOINT_URL"]
        bucket, _, prefix = self.root.partition("/")
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.vitline: Store = open_store(root)
        self.s3fs = s3fs.S3FileSystem(
            endpoint_url=endpoint,
            config_kwargs={"max_pool_connections": IN_FLIGHT, "s3": {"addressing_style": "path"}},
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        scheme, _, address = endpoint.partition("://")
        self.arrow = pyarrow.fs.S3FileSystem(endpoint_override=address, scheme=scheme, region="us-east-1")
        self.opened: dict[str, pyarrow.NativeFile] = {}
        self.obstore = ObstoreS3(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )

    def readers(self) -> dict[str, Read]:
        return {
            "vitline": lambda key, at: len(self.vitline.read(key, at, at + RANGE_BYTES)),
            "s3fs": lambda key, at: len(self.s3fs.cat_file(f"{self.root}/{key}", start=at, end=at + RANGE_BYTES)),
            "pyarrow": lambda key, at: len(self.opened[key].read_at(RANGE_BYTES, at)),
            "obstore": lambda key, at: len(
                obstore.get_range(self.obstore, self.prefix + key, start=at, length=RANGE_BYTES)
            ),
        }

    def writers(self) -> dict[str, Callable[[str], None]]:
        return {"vitline": self._write_vitline, "s3fs": self._write_s3fs, "obstore": self._write_obstore}

    def open_all(self, keys: list[str]) -> None:
        self.opened = {key: self.arrow.open_input_file(f"{self.root}/{key}") for key in keys}

    def _write_vitline(self, key: str) -> None:
        tag = self.vitline.create(key, b"a" * 1000)
        self.vitline.compare_and_swap(key, b"b" * 1000, tag)

    def _write_s3fs(self, key: str) -> None:
        at = {"Bucket": self.bucket, "Key": self.prefix + key}
        tag = self.s3fs.call_s3("put_object", **at, Body=b"a" * 1000, IfNoneMatch="*")["ETag"]
        self.s3fs.call_s3("put_object", **at, Body=b"b" * 1000, IfMatch=tag)

    def _write_obstore(self, key: str) -> None:
        made = obstore.put(self.obstore, self.prefix + key, b"a" * 1000, mode="create")
        obstore.put(self.obstore, self.prefix + key, b"b" * 1000, mode={"e_tag": made["e_tag"]})

    def check_refusals(self) -> None:
        """A second create and a stale tag must fail through each client that has conditional writes."""
        tag = self.vitline.create("refused", b"a")
        refused = {
            "s3fs": lambda: self._write_s3fs("refused"),
            "obstore create": lambda: self._write_obstore("refused"),
            "vitline": lambda: self._write_vitline("refused"),
        }
        self.vitline.compare_and_swap("refused", b"b", tag)
        path = f"{self.prefix}refused"
        refused["obstore swap"] = lambda: obstore.put(self.obstore, path, b"c", mode={"e_tag": tag})
        for name, write in refused.items():
            try:
                write()
            except (PreconditionFailed, AlreadyExistsError, PreconditionError, OSError):
                continue
            raise AssertionError(f"{name} was not refused")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU-seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def read_all(read: Read, ranges: list[tuple[str, int]], pool: ThreadPoolExecutor) -> None:
    sizes = set(pool.map(lambda place: read(*place), ranges))
    assert sizes == {RANGE_BYTES}, sizes


def report(what: str, rounds: dict[str, list[float]], base: str) -> None:
    for name, seconds in rounds.items():
        ratios = [b / s for b, s in zip(rounds[base], seconds, strict=True)]
        middle, low, high = interval(ratios)
        print(
            f"{what}, {name}: {statistics.median(seconds):.3f} s; {base} over it {middle:.2f} [{low:.2f}, {high:.2f}]"
        )
        print("    every round: " + ", ".join(f"{s:.3f}" for s in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--reads", type=int, default=128)
    parser.add_argument("--writes", type=int, default=10)
    given = parser.parse_args()
    with distant_s3(given.latency_ms / 1e3) as (root, _), ThreadPoolExecutor(IN_FLIGHT) as pool:
        clients = Clients(f"{root}/bench")
        clients.check_refusals()
        keys, data = [f"object-{i}" for i in range(NUM_OBJECTS)], os.urandom(OBJECT_BYTES)
        for key in keys:
            clients.vitline.write(key, data)
        clients.open_all(keys)
        ranges = [(key, at) for at in range(0, OBJECT_BYTES, RANGE_BYTES) for key in keys]
        ranges = (ranges * -(-given.reads // len(ranges)))[: given.reads]
        walls, cpus, writes = ({name: [] for name in clients.readers()} for _ in range(3))
        del writes["pyarrow"]
        for number in range(given.rounds + 1):  # the first, which also opens connections, does not count
            order = list(clients.readers().items())
            for name, read in order[number % 4 :] + order[: number % 4]:
                wall, cpu = timed(lambda read=read: read_all(read, ranges, pool))
                if number:
                    walls[name].append(wall)
                    cpus[name].append(cpu)
            for name, write in clients.writers().items():
                places = [f"w/{uuid.uuid4().hex}" for _ in range(given.writes)]
                wall, _ = timed(lambda write=write, places=places: [write(key) for key in places])
                if number:
                    writes[name].append(wall / given.writes)
        print(f"latency {given.latency_ms:g} ms, {given.reads} reads of 8 MiB, {IN_FLIGHT} in flight")
        report("reads, wall", walls, "s3fs")
        report("reads, CPU", cpus, "s3fs")
        report("create and swap, wall", writes, "s3fs")


if __name__ == "__main__":
    main()
