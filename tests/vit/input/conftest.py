"""A tiny corpus written directly from the schema, so that readers are checked against rows that the test knows."""

import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo, shard_key
from vitline.infra.storage import open_store

from ...shard_lists import with_shard_list


@dataclass
class TinyCorpus:
    store: object
    manifest: Manifest
    pixels: list
    labels: list


def make_corpus(
    folder,
    segments=(37, 10),
    rows_per_group=4,
    groups_per_shard=3,
    *,
    digest="tiny",
    labels=None,
    weights=None,
    undecodable=frozenset(),
    encoded=None,
):
    """PNG images of many sizes, or the files given; row i has class i mod 5, or the lists and weights given. `undecodable` rows are no
    images."""
    store, rng = open_store(str(folder)), np.random.default_rng(len(digest))
    num_rows = sum(segments)
    pixels = [rng.integers(0, 256, (*rng.integers(9, 40, 2), 3), dtype=np.uint8) for _ in range(num_rows)]
    infos, per_shard = [], rows_per_group * groups_per_shard
    for number, size in enumerate(segments):
        infos.append(SegmentInfo(split="train", name=f"s{number:03d}", num_rows=size, num_shards=-(-size // per_shard)))
    split = SplitInfo(
        num_rows=num_rows,
        rows_per_row_group=rows_per_group,
        row_groups_per_shard=groups_per_shard,
        segments=tuple(infos),
        digest="",
    )
    manifest = Manifest(
        name="tiny",
        version="0",
        digest=digest,
        class_map_digest=f"classes of {digest}",
        num_classes=5,
        single_label=labels is None,
        has_weights=weights is not None,
        order_seed=0,
        splits={"train": split},
        decode_policy=DecodePolicy(),
        counts=Counts(num_found=num_rows, num_accepted=num_rows, num_refused=0, num_bytes=1, refused={}),
        provenance={},
    )
    start = 0
    for info in infos:
        for shard in range(info.num_shards):
            first = start + shard * per_shard
            stop = min(first + per_shard, start + info.num_rows)
            rows = [_row(i, pixels[i], labels, weights) for i in range(first, stop)]
            schema = manifest.arrow_schema()
            for i, row in enumerate(rows, start=first):
                row["image"] |= {"bytes": b"no image"} if i in undecodable else {}
                row["image"] |= {"bytes": encoded[i]} if encoded else {}
                row |= {name: f"{name}-{row['example_id']}".encode() for name in _byte_columns(schema)}
            table = pa.Table.from_pylist(rows, schema=schema)
            with store.writer(shard_key("train", info.name, shard, info.num_shards)) as file:
                pq.write_table(table, file, row_group_size=rows_per_group, write_page_checksum=True, compression="none")
        start += info.num_rows
    return TinyCorpus(store, with_shard_list(store, manifest), pixels, labels or [i % 5 for i in range(num_rows)])


def _row(i, pixels, labels, weights):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    row = {
        "image": {"bytes": buffer.getvalue(), "path": f"{i}.png"},
        "labels": [i % 5] if labels is None else labels[i],
        "label": i % 5,
        "example_id": str(i),
        "width_px": pixels.shape[1],
        "height_px": pixels.shape[0],
        "source": "noise",
    }
    return row | ({"weights": weights[i]} if weights else {})


def _byte_columns(schema):
    return [field.name for field in schema if pa.types.is_binary(field.type)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def corpus_maker():
    return make_corpus
