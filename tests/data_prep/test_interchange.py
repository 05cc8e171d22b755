"""Shards open without us: Hugging Face datasets, DuckDB, Polars and Ray Data read them as they are."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_prep.decode import decode
from data_prep.shard_format import load_manifest, segment_keys


@pytest.fixture
def shards(fill_folder, prepared, tmp_path):
    """Paths of the training shards of a corpus on disk."""
    corpus = prepared(fill_folder(tmp_path / "pictures", per_class=15), str(tmp_path / "store"))
    keys = segment_keys(load_manifest(corpus).splits["train"].segments[0])
    return [corpus.uri_of(key).removeprefix("file://") for key in keys]


@pytest.fixture
def without_images(shards, tmp_path):
    """The same shards with every byte of the image column overwritten: what reads those is found out."""
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


def test_hugging_face_datasets_show_pictures(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    found = datasets.load_dataset("parquet", data_files=shards, split="train", cache_dir=str(tmp_path / "cache"))
    rows = [row for path in shards for row in pq.read_table(path).to_pylist()]
    assert found["example_id"] == [row["example_id"] for row in rows]
    for row, picture in zip(rows[:5], found["image"][:5], strict=True):
        assert picture.size == (row["width_px"], row["height_px"])
        difference = np.asarray(picture.convert("RGB")).astype(int) - decode(row["image"]["bytes"])
        assert np.abs(difference).max() <= 2  # another JPEG decoder


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


@pytest.fixture
def a_ray():
    import ray

    ray.init(address="local", num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_data_reads_them(shards, a_ray):
    import ray.data

    rows = ray.data.read_parquet(shards).take_all()
    assert sorted(row["example_id"] for row in rows) == sorted(row["example_id"] for row in expected(shards))
    assert decode(rows[0]["image"]["bytes"]).shape == (20, 24, 3)
