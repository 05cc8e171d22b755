"""What a shard states about itself: equal everywhere, and compared at no further request."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import SHARDS_KEY, ShardError, ShardReader, load_manifest, segment_keys
from vitline.data_prep.shards.subsets import take
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.storage import open_store


@pytest.fixture
def request_of_folder(fill_folder, request_for, tmp_path):
    return request_for(fill_folder(tmp_path / "pictures"))


@pytest.fixture
def corpus(request_of_folder, memory_root):
    prepare([request_of_folder], memory_root)
    return corpus_store(open_store(memory_root), request_of_folder)


def keys_of(corpus, split="train"):
    return segment_keys(load_manifest(corpus).splits[split].segments[0])


def read_all(corpus):
    manifest, rows = load_manifest(corpus), []
    for split in manifest.splits:
        with ShardReader(corpus, manifest, split) as reader:
            for group in range(reader.split.num_row_groups):
                rows += reader.row_group(group, ["example_id", "labels"]).to_pylist()
    return rows


def test_a_shard_states_corpus_place_and_digest_and_its_bytes_are_equal_on_every_store(
    corpus, request_of_folder, tmp_path
):
    listed = {line["key"]: line for line in pq.read_table(pa.BufferReader(corpus.read(SHARDS_KEY))).to_pylist()}
    for key, line in listed.items():
        file = pq.ParquetFile(pa.BufferReader(corpus.read(key)))
        last = file.metadata.row_group(file.metadata.num_row_groups - 1)
        column = last.column(last.num_columns - 1)
        assert json.loads(file.metadata.metadata[b"vitline"]) == {
            "corpus": "folder",
            "key": key,
            "content_digest": line["content_digest"],
            "data_bytes": column.data_page_offset + column.total_compressed_size,
        }
    prepare([request_of_folder], str(tmp_path / "store"))
    on_disk = corpus_store(open_store(str(tmp_path / "store")), request_of_folder)
    assert {key: on_disk.read(key) for key in listed} == {key: corpus.read(key) for key in listed}


def test_comparing_opens_the_shard_list_once_and_each_shard_once(corpus, monkeypatch):
    opened, real = [], type(corpus).open
    monkeypatch.setattr(type(corpus), "open", lambda self, key: opened.append(key) or real(self, key))
    manifest = load_manifest(corpus)
    with ShardReader(corpus, manifest, "train") as reader:
        for _ in range(2):
            for group in range(reader.split.num_row_groups):
                reader.row_group(group, ["label"])
    assert opened == [SHARDS_KEY, *keys_of(corpus)]


def test_a_shard_list_that_contradicts_the_manifest_is_refused(corpus):
    good = corpus.read(SHARDS_KEY)
    table = pq.read_table(pa.BufferReader(good))
    lines = table.to_pylist()
    lines[0]["content_digest"], lines[1]["content_digest"] = lines[1]["content_digest"], lines[0]["content_digest"]
    for bad, expected in (
        (pa.Table.from_pylist(lines, table.schema), "whose digest differs from that in the manifest"),
        (table.slice(1), "does not list every shard of split"),
        (table.drop_columns(["num_bytes"]), "cannot be read as the shard list"),
        (None, "shards.parquet is missing"),
    ):
        corpus.delete(SHARDS_KEY)
        if bad:
            sink = pa.BufferOutputStream()
            pq.write_table(bad, sink)
            corpus.write(SHARDS_KEY, sink.getvalue().to_pybytes())
        for reads in (read_all, lambda corpus: take(corpus, 10)):
            with pytest.raises(ShardError, match=expected):
                reads(corpus)
        assert corpus.uri_of(SHARDS_KEY) in verify_corpus(corpus).problems
    corpus.write(SHARDS_KEY, good)
    read_all(corpus)


def test_a_damaged_identity_is_refused_by_name(corpus):
    key = keys_of(corpus)[0]
    corpus.write(key, corpus.read(key).replace(b'{"content_digest"', b'["content_digest"'))
    with pytest.raises(ShardError, match="states an identity that cannot be read"):
        read_all(corpus)
    assert verify_corpus(corpus).problems.keys() == {corpus.uri_of(key)}


def test_a_restart_writes_a_finished_shard_again_if_it_is_not_the_planned_one(corpus, request_of_folder, memory_root):
    """One is gone; all others have the size of the finished shard."""
    key, manifest = keys_of(corpus)[0], load_manifest(corpus)
    good = corpus.read(key)
    for bad in (
        good.replace(key.encode(), key.replace("part-00000", "part-00001").encode()),
        good.replace(b'"corpus": "folder"', b'"corpus": "holder"'),
        good.replace(b'"content_digest": "', b'"content_digest": "0')[: len(good)],
    ):
        assert bad != good
        assert len(bad) == len(good)
        corpus.write(key, bad)
        corpus.delete("manifest.json")
        prepare([request_of_folder], memory_root)
        assert corpus.read(key) == good
        assert load_manifest(corpus).digest == manifest.digest
    corpus.delete("manifest.json")
    corpus.delete(key)
    prepare([request_of_folder], memory_root)
    assert corpus.read(key) == good
