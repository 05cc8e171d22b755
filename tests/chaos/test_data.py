"""Damaged corpora, odd pictures and wrong parameters: named and refused before they are trained on."""

import contextlib
import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep import parquet_files
from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, PrepareExecution
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.plan import check_refused
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.records import read_table
from vitline.data_prep.shard_format import REJECTS_KEY, ShardError, load_manifest, open_checked, segment_keys
from vitline.flows.forms.forms import PretrainRequest
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.infra.storage import Store

from .bench import Bench

pytestmark = pytest.mark.slow

NUM_GOOD = 30
FAILED = (AssertionError, pytest.fail.Exception)
LOOP = "loop.png"  # a link to itself


def test_swapped_shards(bench):
    """A training names a shard that stands in the place of another one, and trains on none of its rows."""
    corpus = bench.copied_corpus("swapped")
    first, second, *_ = train_shards(corpus)
    one, two = corpus.read(first), corpus.read(second)
    corpus.write(first, two)
    corpus.write(second, one)
    require_named(bench, corpus, "swapped", (first, second))


def test_damaged_shard(bench):
    """A training names a shard in which a bit has flipped, and trains on none of the damaged rows."""
    corpus = bench.copied_corpus("damaged")
    keys = train_shards(corpus)
    for key in keys:  # in each, so that the first batch meets one
        data = bytearray(corpus.read(key))
        data[data.index(b"IDAT") + 10] ^= 1
        corpus.write(key, bytes(data))
    require_named(bench, corpus, "damaged", keys)


def train_shards(corpus: Store) -> list[str]:
    return [key for segment in load_manifest(corpus).splits["train"].segments for key in segment_keys(segment)]


def require_named(bench: Bench, corpus: Store, name: str, keys: "tuple[str, ...] | list[str]") -> None:
    """Fails unless a training on a damaged corpus ends with an error that names one of the shards."""
    training = bench.training(name, corpus)
    with pytest.raises(ShardError, match="|".join(map(re.escape, keys))):
        training.train()
    found = {step: loss for step, loss in training.losses.items() if loss != bench.undisturbed.losses[step]}
    assert not found, f"the steps {sorted(found)} were trained on other rows before the shard was refused"


def test_odd_pictures(bench, tmp_path):
    """Each odd picture of a source is refused with its reason and counted, and the others are prepared."""
    unreadable = odd_files()
    request = request_of(tmp_path, "chaos-odd", unreadable, allowed_fraction=0.5)
    (manifest,) = prepare([request], bench.place.uri)
    corpus = corpus_store(bench.place, request)
    refused = {row["example_id"]: row["reason"] for row in read_table(corpus, REJECTS_KEY).to_pylist()}
    missing = {f"unreadable/{name}" for name in (*unreadable, LOOP)} ^ refused.keys()
    assert not missing, f"these are refused and should not be, or the other way round: {', '.join(sorted(missing))}"
    assert all(refused.values()), f"a refusal has no reason: {refused}"
    accepted = manifest.counts.num_accepted
    assert accepted == NUM_GOOD, f"{accepted} of {NUM_GOOD} good pictures were prepared"
    counted = manifest.counts.num_refused
    assert counted == len(refused), f"the manifest counts {counted} refused examples, not {len(refused)}"


def test_too_many_odd_pictures(bench, tmp_path):
    """A corpus of which more examples are refused than allowed is not published."""
    request = request_of(tmp_path, "chaos-too-odd", odd_files(), allowed_fraction=0.01)
    corpus = corpus_store(bench.place, request)
    with pytest.raises(ValueError, match="max_refused_fraction"):
        prepare([request], bench.place.uri)
    assert not corpus.exists("manifest.json"), f"{corpus.uri} was published all the same"


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


def request_of(folder: Path, name: str, unreadable: dict[str, bytes], allowed_fraction: float) -> CorpusConfig:
    """A request for class folders with good pictures and odd ones."""
    for label in ("unreadable", "plain"):
        (folder / label).mkdir()
        for number in range(NUM_GOOD // 2):
            (folder / label / f"good-{number}.png").write_bytes(picture(number + 500 * (label == "unreadable")))
    for file, data in unreadable.items():
        (folder / "unreadable" / file).write_bytes(data)
    (folder / "unreadable" / LOOP).symlink_to(LOOP)
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


def test_wrong_parameters(bench):
    """A wrong parameter is refused by its name before anything is written or started."""
    uri = bench.corpus.uri
    before = bench.place.list()
    for wrong, name in WRONG:
        with pytest.raises(ValueError, match=name):
            resolve_pretrain(bench.place.uri, PretrainRequest.model_validate({"corpus": uri, **wrong}))
    assert bench.place.list() == before, "a refused request has written to the store"


@contextlib.contextmanager
def unchecked_shards():
    with (
        patch.object(open_checked, "check_identity", lambda *_: None),
        patch.object(open_checked, "check_key", lambda *_: None),
    ):
        yield


def unverified_pages():
    real = parquet_files.pq.ParquetFile
    unchecked = {"page_checksum_verification": False}
    return patch.object(parquet_files.pq, "ParquetFile", lambda file, **options: real(file, **options | unchecked))


def limit_of_refusals(found):
    return patch.object(check_refused, "too_many", lambda *_: found)


@pytest.mark.parametrize(
    ("scenario", "broken"), [(test_swapped_shards, unchecked_shards), (test_damaged_shard, unverified_pages)]
)
def test_a_shard_that_is_not_checked_is_noticed(scenario, broken, fresh):
    with broken(), pytest.raises(FAILED):
        scenario(fresh)


def test_a_limit_of_refusals_that_is_not_kept_is_noticed(fresh, tmp_path):
    with limit_of_refusals(""), pytest.raises(FAILED, match="DID NOT RAISE"):
        test_too_many_odd_pictures(fresh, tmp_path)


def test_odd_pictures_that_stop_a_preparation_are_noticed(fresh, tmp_path):
    with limit_of_refusals("too many"), pytest.raises(ValueError, match="too many"):
        test_odd_pictures(fresh, tmp_path)


def test_a_wrong_parameter_that_is_accepted_is_noticed(fresh, monkeypatch):
    monkeypatch.setitem(globals(), "resolve_pretrain", lambda root, request: None)
    with pytest.raises(FAILED, match="DID NOT RAISE"):
        test_wrong_parameters(fresh)
