"""The contract of the shards: row locations, every row exactly once, and errors that name a bad shard."""

import json
import random
import struct
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitline.data_prep.decode import decode
from vitline.data_prep.shard_format import (
    SegmentInfo,
    ShardError,
    ShardReader,
    SplitInfo,
    load_class_names,
    load_manifest,
    read_row_group,
    segment_store,
    shard_key,
    shard_schema,
)
from vitline.data_prep.shards.content_digest import content_digest
from vitline.infra.storage import open_store


def split_of(segments, rows_per_group, groups_per_shard):
    shard_rows = rows_per_group * groups_per_shard
    return SplitInfo(
        num_rows=sum(segments),
        rows_per_row_group=rows_per_group,
        row_groups_per_shard=groups_per_shard,
        segments=[
            SegmentInfo(split="train", name=f"s{i:03d}", num_rows=n, num_shards=-(-n // shard_rows))
            for i, n in enumerate(segments)
        ],
        digest="d",
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 4))
def test_row_locations_equal_those_from_assigning_rows_one_by_one(segments, rows_per_group, groups_per_shard):
    split = split_of(segments, rows_per_group, groups_per_shard)
    assigned, first_row = [], 0
    for segment in split.segments:
        shards = [[]]
        left = segment.num_rows
        while left:
            if len(shards[-1]) == groups_per_shard:
                shards.append([])
            shards[-1].append(min(rows_per_group, left))
            left -= shards[-1][-1]
        assert len(shards) == segment.num_shards
        for s, groups in enumerate(shards):
            assert split.shard_rows(segment, s) == sum(groups)
            for g, rows in enumerate(groups):
                assigned.append((segment.name, s, g, first_row, rows))
                first_row += rows
    places = [split.place(i) for i in range(split.num_row_groups)]
    assert [(p.segment.name, p.shard, p.group_in_shard, p.first_row, p.num_rows) for p in places] == assigned
    for outside in (-1, split.num_row_groups):
        with pytest.raises(IndexError):
            split.place(outside)


def test_shard_keys_name_split_segment_and_part():
    assert shard_key("train", "s000", 0, 4) == "train/s000/part-00000-of-00004.parquet"
    place = split_of([100], 10, 5).place(7)
    assert place.key == "train/s000/part-00001-of-00002.parquet"


@pytest.mark.parametrize("version", ["..", "../../private", "/etc"])
def test_a_segment_outside_of_the_folder_of_its_corpus_is_an_error(version):
    segment = SegmentInfo(split="train", name="s000", num_rows=1, num_shards=1, version=version)
    with pytest.raises(ValueError, match="is not a valid key"):
        segment_store(open_store("memory://x/corpora/birds/0123456789ab"), segment)


def test_content_digest_of_one_row_equals_a_hand_computed_sha256():
    import hashlib

    row = struct.pack("<I", 5) + b"a/1.j" + struct.pack("<I", 2) + b"\1\2" + struct.pack("<IiiIf", 2, 7, 9, 1, 0.5)
    assert content_digest([("a/1.j", b"\1\2", [7, 9], [0.5])]) == hashlib.sha256(row).hexdigest()
    rows = [("ab", b"", [], None), ("a", b"b", [], None), ("a", b"", [0], None), ("a", b"", [], [0.0])]
    assert len({content_digest([row]) for row in rows}) == len(rows)


def test_every_example_is_read_exactly_once_in_the_order_of_the_shards(shared_corpus):
    manifest = load_manifest(shared_corpus)
    seen = []
    for name, split in manifest.splits.items():
        with ShardReader(shared_corpus, manifest, name) as reader:
            tables = [reader.row_group(i) for i in range(split.num_row_groups)]
        assert [len(t) for t in tables] == [split.place(i).num_rows for i in range(split.num_row_groups)]
        rows = pa.concat_tables(tables).to_pylist()
        assert len(rows) == split.num_rows
        if name != "trainval":  # a joined split, which lists the shards of train and val
            seen += rows
    assert len(seen) == len({row["example_id"] for row in seen}) == manifest.counts.num_accepted == 120
    names = load_class_names(shared_corpus)
    assert names == ["bird/owl", "cat", "dog"]
    for row in seen:
        assert row["example_id"].startswith(names[row["label"]] + "/")
        assert row["labels"] == [row["label"]]
        assert row["image"]["path"] == row["example_id"].rpartition("/")[2]
        assert decode(row["image"]["bytes"]).shape == (row["height_px"], row["width_px"], 3)


def test_threads_that_share_a_reader_read_correct_rows(shared_corpus):
    manifest = load_manifest(shared_corpus)
    num_groups = manifest.splits["train"].num_row_groups
    order = [i % num_groups for i in range(4 * num_groups)]
    random.Random(0).shuffle(order)
    with ShardReader(shared_corpus, manifest, "train", footer_bytes=20_000) as reader, ThreadPoolExecutor(8) as threads:
        tables = list(threads.map(lambda i: reader.row_group(i, ["example_id", "image"]), order))
    for i, table in zip(order, tables, strict=True):
        assert table.equals(read_row_group(shared_corpus, "train", manifest, i).select(table.column_names))


def test_image_column_is_uncompressed_and_the_schema_declares_its_features(shared_corpus):
    key = load_manifest(shared_corpus).splits["train"].place(0).key
    file = pq.ParquetFile(shared_corpus.open(key))
    image = file.metadata.row_group(0).column(0)
    assert image.path_in_schema == "image.bytes"
    assert (image.compression, image.statistics) == ("UNCOMPRESSED", None)
    assert not any("DICTIONARY" in encoding for encoding in image.encodings)
    compressions = {file.metadata.row_group(0).column(i).compression for i in range(1, file.metadata.num_columns)}
    assert compressions == {"ZSTD"}
    features = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert features.keys() == set(file.schema_arrow.names)
    assert file.schema_arrow.equals(shard_schema(single_label=True, has_weights=False))


@pytest.fixture
def scratch_corpus(fill_folder, prepared, tmp_path, memory_root):
    return prepared(fill_folder(tmp_path / "pictures"), memory_root)


def read_all(corpus, split="train"):
    manifest = load_manifest(corpus)
    with ShardReader(corpus, manifest, split) as reader:
        for i in range(reader.split.num_row_groups):
            reader.row_group(i)


def first_and_last(corpus):
    segment = load_manifest(corpus).splits["train"].segments[0]
    assert segment.num_shards >= 2
    return [shard_key("train", "s000", i, segment.num_shards) for i in (0, segment.num_shards - 1)]


def test_a_bad_shard_is_refused_with_its_name(scratch_corpus):
    first, last = first_and_last(scratch_corpus)
    good = scratch_corpus.read(first)
    flipped = bytearray(good)
    # Inside an image: not every bit of a page header matters, and only `verify` checks all of them.
    flipped[good.index(b"\xff\xd8\xff") + 200] ^= 1
    for bad, complaint in (
        (bytes(flipped), "damaged page"),
        (good[: len(good) // 2], "truncated or not Parquet"),
        (scratch_corpus.read(last), "rows, but the manifest lists"),
    ):
        scratch_corpus.write(first, bad)
        with pytest.raises(ShardError, match=complaint) as caught:
            read_all(scratch_corpus)
        assert scratch_corpus.uri_of(first) in str(caught.value)
        assert "vitline data verify" in str(caught.value)
    scratch_corpus.delete(first)
    with pytest.raises(ShardError, match="is missing"):
        read_all(scratch_corpus)
    scratch_corpus.write(first, good)
    read_all(scratch_corpus)


def test_other_columns_and_other_row_groups_are_refused(scratch_corpus):
    first, _ = first_and_last(scratch_corpus)
    table = pq.read_table(pa.BufferReader(scratch_corpus.read(first)))
    for changed, size, complaint in (
        (table.drop_columns(["phash"]), None, "columns that differ"),
        (table, len(table), "row groups"),
    ):
        sink = pa.BufferOutputStream()
        pq.write_table(changed, sink, row_group_size=size)
        scratch_corpus.write(first, sink.getvalue().to_pybytes())
        with pytest.raises(ShardError, match=complaint):
            read_all(scratch_corpus)


def test_a_missing_corpus_is_an_error_with_the_next_step(memory_root, shared_corpus):
    with pytest.raises(RuntimeError, match="vitline data prepare"):
        load_manifest(open_store(memory_root))
    with pytest.raises(ValueError, match="has no split 'dev'; it has test, train, trainval, val"):
        load_manifest(shared_corpus).split("dev")
    later = shared_corpus.read_json("manifest.json") | {"schema_version": 99}
    open_store(memory_root).write_json("manifest.json", later)
    with pytest.raises(RuntimeError, match="schema version 99"):
        load_manifest(open_store(memory_root))
