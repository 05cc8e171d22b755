"""Damaged corpora, odd pictures and wrong parameters: named and refused before they are trained on."""

import io
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, PrepareExecution
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare import prepare
from vitline.data_prep.records import read_table
from vitline.data_prep.shard_format import REJECTS_KEY, ShardError, load_manifest, segment_keys
from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.promises import PromiseBroken, require
from vitline.flows.chaos.scenario import scenario
from vitline.flows.requests.forms import PretrainRequest
from vitline.flows.requests.training_config import resolve_pretrain
from vitline.infra.storage import Store

NUM_GOOD = 30
LOOP = "loop.png"  # a link to itself


@scenario("two shards of a corpus change places", "the store", about_s=4)
def swapped_shards(bench: Bench) -> str:
    """A training names a shard that stands in the place of another one, and trains on none of its rows."""
    corpus = bench.copied_corpus("swapped")
    first, second, *_ = train_shards(corpus)
    one, two = corpus.read(first), corpus.read(second)
    corpus.write(first, two)
    corpus.write(second, one)
    return require_named(bench, corpus, "swapped", (first, second))


@scenario("one bit of an image in a shard flips", "the store", about_s=4)
def damaged_shard(bench: Bench) -> str:
    """A training names a shard in which a bit has flipped, and trains on none of the damaged rows."""
    corpus = bench.copied_corpus("damaged")
    keys = train_shards(corpus)
    for key in keys:  # in each, so that the first batch meets one
        data = bytearray(corpus.read(key))
        data[data.index(b"IDAT") + 10] ^= 1
        corpus.write(key, bytes(data))
    return require_named(bench, corpus, "damaged", keys)


def train_shards(corpus: Store) -> list[str]:
    return [key for segment in load_manifest(corpus).splits["train"].segments for key in segment_keys(segment)]


def require_named(bench: Bench, corpus: Store, name: str, keys: "tuple[str, ...] | list[str]") -> str:
    """Raises PromiseBroken unless a training on a damaged corpus ends with an error that names one of the shards."""
    training = bench.training(name, corpus)
    try:
        ended = training.train()
    except ShardError as error:
        require(any(key in str(error) for key in keys), f"the error names none of the damaged shards: {error}")
        found = {step: loss for step, loss in training.losses.items() if loss != bench.undisturbed.losses[step]}
        require(not found, f"the steps {sorted(found)} were trained on other rows before the shard was refused")
        return str(error)
    raise PromiseBroken(f"the training ended as {ended} after {len(training.losses)} steps on the damaged corpus")


@scenario("a source holds broken, empty and huge pictures, a text and a link to itself", "the store", about_s=5)
def odd_pictures(bench: Bench) -> str:
    """Each odd picture of a source is refused with its reason and counted, and the others are prepared."""
    odd = odd_files()
    with tempfile.TemporaryDirectory(prefix="vitline-chaos-") as folder:
        request = request_of(Path(folder), "chaos-odd", odd, allowed_fraction=0.5)
        (manifest,) = prepare([request], bench.place.uri)
        corpus = corpus_store(bench.place, request)
    refused = {row["example_id"]: row["reason"] for row in read_table(corpus, REJECTS_KEY).to_pylist()}
    missing = {f"odd/{name}" for name in (*odd, LOOP)} ^ refused.keys()
    require(not missing, f"these are refused and should not be, or the other way round: {', '.join(sorted(missing))}")
    require(all(refused.values()), f"a refusal has no reason: {refused}")
    accepted = manifest.counts.num_accepted
    require(accepted == NUM_GOOD, f"{accepted} of {NUM_GOOD} good pictures were prepared")
    counted = manifest.counts.num_refused
    require(counted == len(refused), f"the manifest counts {counted} refused examples, not {len(refused)}")
    return ", ".join(f"{name.removeprefix('odd/')}: {reason}" for name, reason in sorted(refused.items()))


@scenario("more pictures of a source are broken than the request allows", "the store", about_s=3)
def too_many_odd_pictures(bench: Bench) -> str:
    """A corpus of which more examples are refused than allowed is not published."""
    with tempfile.TemporaryDirectory(prefix="vitline-chaos-") as folder:
        request = request_of(Path(folder), "chaos-too-odd", odd_files(), allowed_fraction=0.01)
        corpus = corpus_store(bench.place, request)
        try:
            prepare([request], bench.place.uri)
        except (RuntimeError, ValueError) as error:
            require("max_refused_fraction" in str(error), f"the error does not name the limit: {error}")
            require(not corpus.exists("manifest.json"), f"{corpus.uri} was published all the same")
            return str(error)
    raise PromiseBroken(f"{corpus.uri} was published with {len(odd_files())} refused examples")


def odd_files() -> dict[str, bytes]:
    good = picture(1000)
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(bytes(1000))), png_chunk(b"IEND", b""))
    huge = b"\x89PNG\r\n\x1a\n" + b"".join(bomb)
    return {"cut.png": good[: len(good) // 2], "empty.jpg": b"", "huge.png": huge, "text.png": b"no picture at all"}


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def request_of(folder: Path, name: str, odd: dict[str, bytes], allowed_fraction: float) -> CorpusConfig:
    """A request for class folders with good pictures and odd ones."""
    for label in ("odd", "plain"):
        (folder / label).mkdir()
        for number in range(NUM_GOOD // 2):
            (folder / label / f"good-{number}.png").write_bytes(picture(number + 500 * (label == "odd")))
    for file, data in odd.items():
        (folder / "odd" / file).write_bytes(data)
    (folder / "odd" / LOOP).symlink_to(LOOP)
    return CorpusConfig(
        name=name,
        source=ClassFolders(path=str(folder)),
        recipe=CorpusRecipe(),
        execution=PrepareExecution(max_refused_fraction=allowed_fraction),
    )


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"recipe": "vit-of-nobody"}, "recipe"),
    ({"seed": -1}, "seed"),
    ({"seeed": 1}, "seeed"),
    ({"corpus": "chaos-nowhere"}, "chaos-nowhere"),
    ({"overrides": {"recipe.optim.peak_lrr": 0.1}}, "peak_lrr"),
    ({"overrides": {"recipe.optim.warmup_steps": 10**6}}, "warmup_steps"),
)


@scenario("requests with a wrong recipe, seed, field, corpus, override and combination", "the store", about_s=1)
def wrong_parameters(bench: Bench) -> str:
    """A wrong parameter is refused by its name before anything is written or started."""
    uri = bench.corpus.uri
    before = bench.place.list()
    for wrong, name in WRONG:
        try:
            resolve_pretrain(bench.place.uri, PretrainRequest.model_validate({"corpus": uri, **wrong}))
        except (ValidationError, ValueError) as error:
            require(name in str(error), f"the refusal of {wrong} does not name {name}: {error}")
        else:
            require(False, f"{wrong} was accepted")
    require(bench.place.list() == before, "a refused request has written to the store")
    return f"{len(WRONG)} requests refused by name"
