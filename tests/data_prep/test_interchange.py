"""Other tools read the shards: Hugging Face datasets, DuckDB, Polars and Ray Data."""

import json

import pyarrow.parquet as pq
import pytest

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.data_prep.pages.dataset_card import dataset_card
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import Counts, Manifest, ShardReader, load_class_names, load_manifest, segment_keys
from vitline.infra.config import replace
from vitline.infra.storage import open_store


@pytest.fixture
def shards(fill_folder, prepared, tmp_path):
    """Paths of the training shards of a corpus on disk."""
    corpus = prepared(fill_folder(tmp_path / "pictures", per_class=15), str(tmp_path / "store"))
    keys = segment_keys(load_manifest(corpus).splits["train"].segments[0])
    return [corpus.uri_of(key).removeprefix("file://") for key in keys]


@pytest.fixture
def without_images(shards, tmp_path):
    """The same shards with every byte of the image column overwritten, so that reading the column fails."""
    spoiled = []
    for path in shards:
        with open(path, "rb") as file:
            data = bytearray(file.read())
        metadata = pq.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
            (image,) = (column for column in columns if column.path_in_schema == "image.bytes")
            start = image.data_page_offset
            data[start : start + image.total_compressed_size] = b"\xff" * image.total_compressed_size
        spoiled.append(str(tmp_path / f"spoiled-{len(spoiled)}.parquet"))
        with open(spoiled[-1], "wb") as file:
            file.write(data)
    with pytest.raises(OSError, match=r"\w"):
        pq.read_table(spoiled[0], columns=["image"])
    return spoiled


def expected(shards):
    tables = [pq.read_table(path, columns=["label", "width_px", "example_id"]) for path in shards]
    return [row for table in tables for row in table.to_pylist()]


@pytest.fixture
def load_dataset(tmp_path, monkeypatch):
    """`datasets.load_dataset` of the folder of a corpus, without network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    return lambda corpus: datasets.load_dataset(corpus.uri.removeprefix("file://"), cache_dir=str(tmp_path / "cache"))


def rows_by_split(corpus):
    manifest = load_manifest(corpus)
    rows = {}
    for split in ("train", "val", "test"):
        with ShardReader(corpus, manifest, split) as reader:
            tables = [reader.row_group(i, ["example_id", "label"]) for i in range(reader.split.num_row_groups)]
        rows[split] = [tuple(row.values()) for table in tables for row in table.to_pylist()]
    return rows


@pytest.mark.slow
def test_load_dataset_reads_a_corpus_folder_with_its_class_names(
    fill_folder, prepared, request_for, tmp_path, load_dataset
):
    names = ("cat", "bird: owl", '"dog" é', "#5 \\ fox")
    root = str(tmp_path / "store")
    folder = fill_folder(tmp_path / "pictures", per_class=30, classes=names)
    (folder / "cat" / "broken.jpg").write_bytes(b"no picture")
    corpus = prepared(folder, root)
    found = load_dataset(corpus)
    assert {split: list(zip(f["example_id"], f["label"], strict=True)) for split, f in found.items()} == rows_by_split(
        corpus
    )
    label = found["train"].features["label"]
    assert label.names == sorted(names) == load_class_names(corpus)
    assert found["train"].features["labels"].feature == label
    row = found["val"][0]
    assert row["example_id"].startswith(label.int2str(row["label"]))
    assert row["image"].size == (24, 20)
    more = fill_folder(tmp_path / "more", per_class=20, classes=("cat", "zebra"), first=5_000)
    for path in [*more.rglob("*.jpg")]:
        path.rename(path.with_name(f"more{path.name}"))
    request = replace(request_for(more), add_to=f"folder/{load_manifest(corpus).version}")
    prepare([request], root)
    added = corpus_store(open_store(root), request)
    found = load_dataset(added)
    assert found["train"].features["label"].names == [*sorted(names), "zebra"]
    assert {split: list(zip(f["example_id"], f["label"], strict=True)) for split, f in found.items()} == rows_by_split(
        added
    )


def test_classes_with_equal_names_are_distinguished_by_their_ids():
    classes = [ClassInfo(name=name, source_id=i) for name, i in (("crane", "n1"), ("crane", "n2"), ("owl\x85", "n3"))]
    manifest = Manifest(
        name="x", version="v", digest="d", class_map_digest="c", num_classes=3, single_label=False, order_seed=0, splits={},
        decode_policy=DecodePolicy(), provenance={"origin": "here", "credit": ""},
        counts=Counts(num_found=0, num_accepted=0, num_refused=0, num_bytes=0, refused={}),
    )  # fmt: skip
    card = dataset_card(manifest, ClassMap.of(classes))
    assert """'0': "crane (n1)"\n""" in card
    assert """'1': "crane (n2)"\n""" in card
    assert """'2': "owl\\U00000085"\n""" in card


def test_duckdb_queries_columns_without_images(shards, without_images):
    import duckdb

    found = duckdb.sql(
        f"select label, count(*), max(width_px) from read_parquet({without_images}) group by 1 order by 1"
    )
    rows = expected(shards)
    counts = [(k, sum(row["label"] == k for row in rows), 24) for k in (0, 1, 2)]
    assert found.fetchall() == counts
    images = duckdb.sql(f"select image.path, octet_length(image.bytes) from read_parquet({shards}) limit 3").fetchall()
    assert all(path.endswith(".jpg") and size > 500 for path, size in images)


def test_polars_queries_columns_without_images(shards, without_images):
    import polars

    found = polars.scan_parquet(without_images).select("label", "width_px", "example_id").collect()
    assert found.to_dicts() == expected(shards)
    assert polars.read_parquet(shards)["image"].struct.field("bytes").bin.size().min() > 500


READ_WITH_RAY = """
import json, pathlib, sys
import ray.data
from vitline.data_prep.decode import decode
out, *shards = sys.argv[1:]
rows = ray.data.read_parquet(shards).take_all()
shape = decode(rows[0]["image"]["bytes"]).shape
pathlib.Path(out).write_text(json.dumps([sorted(row["example_id"] for row in rows), shape]))
"""


@pytest.mark.slow
def test_ray_data_reads_shards(shards, ray_jobs, tmp_path):
    ray_jobs.submit("read-shards", ["python", "-c", READ_WITH_RAY, str(tmp_path / "read.json"), *shards], {}, {})
    ended = ray_jobs.follow("read-shards", lambda _: None, poll_s=0.2)
    assert ended.state == "succeeded", ray_jobs.logs("read-shards")
    example_ids, shape = json.loads((tmp_path / "read.json").read_text())
    assert example_ids == sorted(row["example_id"] for row in expected(shards))
    assert shape == [20, 24, 3]
