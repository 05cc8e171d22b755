"""Verification names every defect, and nothing else."""

import functools
import io
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitline.data_prep.examine import examine
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.data_prep.executors import Threads
from vitline.data_prep.shard_format import load_manifest, segment_keys
from vitline.data_prep.shards.subsets import take
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.storage import open_store


@pytest.fixture
def corpus(fill_folder, prepared, tmp_path, memory_root):
    return prepared(fill_folder(tmp_path / "pictures"), memory_root)


def train_keys(corpus):
    return segment_keys(load_manifest(corpus).splits["train"].segments[0])


def problems_of(corpus):
    return {uri.removeprefix(corpus.uri + "/"): problem for uri, problem in verify_corpus(corpus).problems.items()}


def test_an_intact_corpus_has_no_problem(corpus):
    report = verify_corpus(corpus)
    manifest = load_manifest(corpus)
    assert report.problems == {}
    assert report.num_rows == manifest.counts.num_accepted == sum(report.label_counts.values()) == 120
    assert report.label_counts == {0: 40, 1: 40, 2: 40}
    assert report.num_shards == len([key for key in corpus.list() if "/part-" in key and not key.startswith("_work")])


@pytest.mark.slow
def test_a_flipped_byte_is_found_wherever_it_is(corpus):
    key = train_keys(corpus)[0]
    good = corpus.read(key)
    for position in [*range(0, len(good), len(good) // 40), len(good) - 1]:
        bad = bytearray(good)
        bad[position] ^= 0x10
        corpus.write(key, bytes(bad))
        assert problems_of(corpus).keys() == {key}, position
    corpus.write(key, good)
    assert problems_of(corpus) == {}


def test_missing_extra_truncated_and_swapped_shards_are_reported(corpus):
    first, second, *_ = train_keys(corpus)
    one, two = corpus.read(first), corpus.read(second)
    corpus.delete(first)
    assert problems_of(corpus) == {first: "is missing"}
    corpus.write(first, one[: len(one) * 2 // 3])
    assert "truncated" in problems_of(corpus)[first]
    corpus.write(first, two)
    corpus.write(second, one)
    swapped = problems_of(corpus)
    assert swapped.keys() == {first, second}
    assert all("swapped" in problem for problem in swapped.values())
    corpus.write(first, one)
    corpus.write(second, two)
    extra = first.replace("part-00000", "part-99999")
    corpus.write(extra, one)
    assert problems_of(corpus) == {extra: "is not listed in the manifest: an extra shard"}


def test_a_shard_rewritten_with_its_listing_contradicts_the_manifest(corpus):
    """Changing a label and the shard list as well is detected by the digest."""
    key = train_keys(corpus)[0]
    table = pq.read_table(pa.BufferReader(corpus.read(key)))
    labels = pa.array([[(row[0] + 1) % 3] for row in table["labels"].to_pylist()], table.schema.field("labels").type)
    changed = table.set_column(table.column_names.index("labels"), table.schema.field("labels"), labels)
    rows_per_group = load_manifest(corpus).splits["train"].rows_per_row_group
    sink = pa.BufferOutputStream()
    pq.write_table(changed, sink, row_group_size=rows_per_group)
    corpus.write(key, sink.getvalue().to_pybytes())
    assert "differ from the shard list" in problems_of(corpus)[key]
    listing = pq.read_table(pa.BufferReader(corpus.read("shards.parquet"))).to_pylist()
    for line in listing:
        line["content_digest"] = "0" * 64 if line["key"] == key else line["content_digest"]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(listing), sink)
    corpus.write("shards.parquet", sink.getvalue().to_pybytes())
    assert "shards.parquet" in problems_of(corpus)


def test_class_map_and_listing_are_checked_too(corpus):
    classes = corpus.read_json("classes.json")
    classes["classes"].reverse()
    corpus.write_json("classes.json", classes)
    corpus.delete("shards.parquet")
    assert problems_of(corpus) == {
        "classes.json": "does not match the class map digest in the manifest",
        "shards.parquet": "does not match the corpus digest in the manifest",
    }


def test_auxiliary_files_are_checked_too(corpus):
    corpus.delete("rejects.parquet")
    corpus.write("report.html", corpus.read("report.html")[:-100])
    corpus.write("stats.json", b"[]")
    report = verify_corpus(corpus)
    assert report.problems == {}
    found = {uri.rpartition("/")[2]: problem for uri, problem in report.auxiliary.items()}
    assert found.keys() == {"rejects.parquet", "report.html", "stats.json"}
    assert found["rejects.parquet"] == "is missing"
    assert "cannot be read" in found["report.html"]


def test_a_subset_has_its_own_rows_and_consistent_counts(corpus):
    manifest = take(corpus, 49)
    report = verify_corpus(open_store(f"{corpus.uri.rpartition('/')[0]}/{manifest.version}"))
    rows = 49 + manifest.splits["val"].num_rows + manifest.splits["test"].num_rows
    assert (report.num_rows, report.problems, report.auxiliary) == (rows, {}, {})
    assert rows <= report.num_rows_read < 120
    counts = manifest.counts
    assert counts.num_found == counts.num_accepted + counts.num_refused == rows
    assert sum(counts.refused.values()) == counts.num_refused == 0


TAKEN_FOR_BLACK = """
import hashlib, io
from PIL import Image
from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.examine.images import examine_image

def examine(data, policy):
    try:
        return examine_image(data, policy)
    except ImageRejected:
        black = io.BytesIO()
        Image.new("RGB", (64, 64)).save(black, "PNG")
        found = examine_image(black.getvalue(), policy)
        return {**found, "sha256": hashlib.sha256(data).digest()}
"""


@pytest.fixture
def with_corrupt_picture(fill_folder, prepared, tmp_path, memory_root, monkeypatch):
    """A corpus as older versions wrote it: 20 bytes of the pixels of one of three PNGs are zeroed, and it decoded to black."""
    (tmp_path / "taken_for_black.py").write_text(TAKEN_FOR_BLACK)
    monkeypatch.syspath_prepend(tmp_path)
    folder = fill_folder(tmp_path / "pictures", per_class=4)
    for seed in range(3):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, "PNG")
        data = file.getvalue()
        hole = data.index(b"IDAT") + 1_000
        holed = data[:hole] + bytes(20) + data[hole + 20 :]
        (folder / "cat" / f"noise{seed}.png").write_bytes(holed if seed == 1 else data)
    with monkeypatch.context() as older:
        older.setattr(
            examine, "SandboxedDecoder", functools.partial(SandboxedDecoder, function="taken_for_black.examine")
        )
        return prepared(folder, memory_root)


def test_a_stored_corrupt_image_is_found_if_pixels_are_checked(with_corrupt_picture):
    corpus = with_corrupt_picture
    report = verify_corpus(corpus)
    assert (report.num_rows, report.problems, report.images) == (15, {}, {})
    report = verify_corpus(corpus, Threads(), pixels=True)
    ((uri, problem),) = report.problems.items()
    assert re.fullmatch(r"holds 1 corrupt images among \d+", problem)
    ((example_id, wrong),) = report.images[uri].items()
    assert example_id == "cat/noise1.png"
    assert wrong.startswith("cannot be decoded: corrupt: ")


def test_unchanged_pixels_are_no_problem(corpus):
    report = verify_corpus(corpus, pixels=True)
    assert (report.problems, report.images) == ({}, {})
