"""What a shard states about itself: equal everywhere, compared at no further request, and absent from older corpora."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import SHARDS_KEY, ShardError, ShardReader, load_manifest, segment_keys
from vitline.data_prep.shards.subsets import take
from vitline.data_prep.shards.verify_shards import file_sha256, verify_corpus
from vitline.data_prep.shards.write_shards import HashingSink, shard_writer
from vitline.infra.config import replace
from vitline.infra.storage import open_store

from ..shard_lists import with_shard_list


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


def without_identity(corpus, key):
    """A shard with the same rows, as vitline wrote it before shards had identities."""
    table, sink = pq.read_table(pa.BufferReader(corpus.read(key))), pa.BufferOutputStream()
    size = load_manifest(corpus).splits[key.partition("/")[0]].rows_per_row_group
    with shard_writer(HashingSink(sink), load_manifest(corpus).arrow_schema(), 500) as writer:
        writer.write_table(table, row_group_size=size)
    return sink.getvalue().to_pybytes()


def as_older_version(corpus):
    """Writes the corpus anew as vitline did before shards had identities."""
    manifest = corpus.read_json("manifest.json")
    for key in [key for key in corpus.list() if "/part-" in key and key.endswith(".parquet") and key[0] != "_"]:
        corpus.write(key, without_identity(corpus, key))
        record = f"_work/gather/{key.removesuffix('.parquet')}.json"
        info = corpus.read_json(record) | {"num_bytes": corpus.size(key), "sha256": file_sha256(corpus, key)}
        del info["schema_version"]
        corpus.write_json(record, info)
    with_shard_list(corpus, load_manifest(corpus))
    manifest["schema_version"] = 1
    for split in manifest["splits"].values():
        for segment in split["segments"]:
            assert segment.pop("schema_version") == 2
    corpus.write_json("manifest.json", manifest)


@pytest.fixture
def older(corpus):
    digest, rows = load_manifest(corpus).digest, read_all(corpus)
    as_older_version(corpus)
    assert (load_manifest(corpus).digest, read_all(corpus)) == (digest, rows)
    assert verify_corpus(corpus).problems == {}
    return corpus


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
    """All of these have the size of the finished shard."""
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


@pytest.mark.slow
def test_shards_of_an_older_version_are_read_and_their_sizes_compared(older):
    first, second, *_ = keys_of(older)
    one, two = older.read(first), older.read(second)
    assert len(one) != len(two)
    for key, bad in ((first, two), (second, one)):
        good = older.read(key)
        older.write(key, bad)
        with pytest.raises(ShardError, match=r"bytes, but the shard list says .* swapped or rewritten"):
            read_all(older)
        older.write(key, good)
    read_all(older)


@pytest.mark.slow
def test_added_segments_and_subsets_of_an_older_corpus_say_which_shards_state_an_identity(
    older, fill_folder, request_for, memory_root, tmp_path
):
    more = fill_folder(tmp_path / "more", first=50_000)
    for path in [*more.rglob("*.jpg")]:
        path.rename(path.with_name(f"more{path.name}"))
    request = replace(request_for(more), add_to=f"folder/{load_manifest(older).version}")
    prepare([request], memory_root)
    grown = corpus_store(open_store(memory_root), request)
    subset = open_store(f"{memory_root}/corpora/folder/{take(older, 20).version}")
    for corpus, versions in ((grown, [1, 2]), (subset, [1])):
        manifest = load_manifest(corpus)
        assert manifest.schema_version == 2
        assert [segment.schema_version for segment in manifest.splits["train"].segments] == versions
        assert verify_corpus(corpus).problems == {}
        assert len(read_all(corpus)) == sum(split.num_rows for split in manifest.splits.values())
    new = segment_keys(load_manifest(grown).splits["train"].segments[1])[0]
    good = grown.read(new)
    grown.write(new, without_identity(grown, new))
    with pytest.raises(ShardError, match="states no identity, but was written with one"):
        read_all(grown)
    grown.write(new, good)
    older.write(keys_of(older)[0], good)
    with pytest.raises(ShardError, match="states that it is train/s001/part-00000"):
        read_all(older)


@pytest.mark.slow
def test_a_restart_keeps_shards_of_an_older_version_and_says_so(older, request_of_folder, memory_root):
    lost = {keys_of(older)[0], *keys_of(older, "test")}
    before = {key: older.read(key) for split in ("train", "val", "test") for key in keys_of(older, split)}
    digest = load_manifest(older).digest
    for key in (*lost, "manifest.json"):
        older.delete(key)
    prepare([request_of_folder], memory_root)
    manifest = load_manifest(older)
    assert manifest.digest == digest
    assert {key for key, data in before.items() if older.read(key) != data} == lost
    versions = {name: manifest.splits[name].segments[0].schema_version for name in ("train", "val", "test")}
    assert versions == {"train": 1, "val": 1, "test": 2}
    assert verify_corpus(older).problems == {}
    read_all(older)
