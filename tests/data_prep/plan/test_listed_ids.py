"""Repeated ids are found in the listing, before an image is read and by a dry run; equal rows are merged."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable, ParquetImages
from vitline.data_prep.executors import InProcess
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.pages.dry_run import dry_run
from vitline.data_prep.pages.dry_run_report import Cores
from vitline.data_prep.plan import listed_ids
from vitline.data_prep.plan.check_refused import NothingNew
from vitline.data_prep.plan.plan_shards import Base
from vitline.data_prep.prepare.job import prepare
from vitline.infra.config import replace
from vitline.infra.storage import open_store

CORES = Cores(2, "this machine")


@pytest.fixture
def table(tmp_path, picture):
    """table(rows, **source) writes images and (image, labels, more columns) as JSON lines, and returns the request."""

    def make(rows, **source):
        for row in rows:
            (tmp_path / row["image"]).write_bytes(picture(int(row["image"].split(".")[0])))
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = LabelTable(path=str(tmp_path / "t.jsonl"), **source)
        return CorpusConfig(name="table", source=given, execution={"examples_per_chunk": 7})

    return make


class Unused(InProcess):
    def run(self, work, tasks, *, few=False, heavy=False):
        return map(work, tasks) if few else pytest.fail("an executor was used")


def not_examined(request, root, match, base=None):
    """Preparation and dry run report the ids without writing a record."""
    with pytest.raises(ValueError, match=match):
        dry_run(request, CORES, base)
    with pytest.raises(ValueError, match=match):
        prepare([request], root, Unused())
    assert not [key for key in corpus_store(open_store(root), request).list() if "/records-" in key]


def test_repeated_ids_are_reported_before_an_image_is_read(table, memory_root):
    rows = [{"image": f"{i}.jpg", "labels": ["a"]} for i in range(30)]
    rows += [{"image": f"{i}.jpg", "labels": ["b"]} for i in (21, 4)]
    not_examined(
        table(rows),
        memory_root,
        r"two examples have the id '4\.jpg': \S+/4\.jpg, labelled a; \S+/4\.jpg, labelled b\. 2 ids of \S+ repeat\. "
        r"A table has one row per image: .*source\.label_separator.*source\.id_column",
    )


@pytest.mark.parametrize("rows_per_task", [1 << 18, 5])
def test_rows_that_are_equal_in_every_field_are_merged_and_counted(table, memory_root, monkeypatch, rows_per_task):
    monkeypatch.setattr(listed_ids, "_ROWS_PER_TASK", rows_per_task)
    rows = [{"image": f"{i}.jpg", "labels": ["a", "b"][i % 2 :], "w": [1.0, 0.5][i % 2 :]} for i in range(30)]
    again = [rows[i] for i in (3, 3, 17, 29, 0)]
    once = table(rows, weights_column="w")
    (alone,) = prepare([once], f"{memory_root}-alone")
    request = table(rows + again, weights_column="w")
    found, _ = dry_run(request, CORES)
    assert "Rows that equal another one in every field and are merged with it: 5." in found.notes
    assert sum(found.splits.values()) == 30
    (manifest,) = prepare([request], memory_root)
    assert manifest.digest == alone.digest
    counts = manifest.counts
    assert (counts.num_found, counts.num_accepted, counts.num_refused, counts.num_merged) == (35, 30, 0, 5)


def test_an_id_column_of_parquet_is_checked_without_reading_images(tmp_path, picture, memory_root):
    images = [{"bytes": picture(i), "path": None} for i in range(12)]
    table = pa.table({"image": images, "label": [0] * 12, "id": [f"x{i % 11}" for i in range(12)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    source = ParquetImages(path=str(tmp_path / "a.parquet"), id_column="id")
    request = CorpusConfig(name="parquet", source=source)
    not_examined(request, memory_root, r"two examples have the id 'x0': \S+ row 0, .*row 11")


def test_ids_that_the_corpus_has_already_are_reported_before_reading(table, memory_root):
    first = table([{"image": f"{i}.jpg", "labels": ["a"]} for i in range(30)])
    (manifest,) = prepare([first], memory_root)
    base = Base(corpus_store(open_store(memory_root), first), manifest)
    second = table([{"image": f"{i}.jpg", "labels": ["a"]} for i in (40, 8, 41, 2)])
    request = replace(second, add_to=f"table/{manifest.version}")
    not_examined(request, memory_root, r"'8\.jpg' and others are in the corpus already", base)


def test_images_that_the_corpus_has_already_are_skipped_where_asked(table, memory_root):
    first = table([{"image": f"{i}.jpg", "labels": ["a"]} for i in range(30)])
    (manifest,) = prepare([first], memory_root)
    grown = table([{"image": f"{i}.jpg", "labels": ["a"]} for i in range(34)])
    request = replace(grown, add_to=f"table/{manifest.version}", **{"recipe.known_ids": "skip"})
    (after,) = prepare([request], memory_root)
    counts = after.counts
    assert (counts.num_accepted, counts.num_merged, counts.num_refused) == (34, 30, 0)
    same = replace(request, add_to=f"table/{after.version}")
    with pytest.raises(NothingNew, match=rf"t\.jsonl has no image whose id is not in table/{after.version} already"):
        prepare([same], memory_root)
    clashing = table([{"image": f"{i}.jpg", "labels": [label]} for i, label in ((3, "a"), (40, "a"), (40, "b"))])
    with pytest.raises(ValueError, match=r"two examples have the id '40\.jpg'"):
        prepare([replace(clashing, add_to=f"table/{after.version}", **{"recipe.known_ids": "skip"})], memory_root)
