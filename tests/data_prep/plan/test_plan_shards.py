"""Decisions of planning besides the order of rows: val images of every class, class maps, labels and groups."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare import job
from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.infra.config import replace
from vitline.infra.storage import open_store


def rows_of(corpus, split):
    manifest, rows = load_manifest(corpus), []
    with ShardReader(corpus, manifest, split) as reader:
        for i in range(reader.split.num_row_groups):
            rows += reader.row_group(i).to_pylist()
    return rows


def test_val_per_class_does_not_depend_on_buckets(fill_folder, prepared, tmp_path, memory_root):
    folder = fill_folder(tmp_path / "p", per_class=20)
    fill_folder(folder, per_class=9, classes=("newt",))
    ids = []
    for i, sort_bytes in enumerate((1 << 20, 1)):
        options = {"test_fraction": 0.0, "val_per_class": 5, "sort_bytes": sort_bytes}
        corpus = prepared(folder, f"{memory_root}-{i}", **options)
        val = rows_of(corpus, "val")
        # A class of 9 has fewer than twice 5 images: all of them stay in train.
        assert Counter(row["example_id"].rpartition("/")[0] for row in val) == {"cat": 5, "dog": 5, "bird/owl": 5}
        ids.append([row["example_id"] for row in val])
    assert ids[0] == ids[1]


def test_val_per_class_has_no_effect_if_the_source_has_a_val_split(
    fill_folder, picture, prepared, tmp_path, memory_root
):
    fill_folder(tmp_path / "p/train", per_class=20)
    for i, label in enumerate(("cat", "dog", "cat")):
        (tmp_path / "p/val" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"p/val/{label}/{i}.jpg").write_bytes(picture(9000 + i))
    corpus = prepared(tmp_path / "p", memory_root, val_per_class=2)
    assert {row["example_id"] for row in rows_of(corpus, "val")} == {"val/cat/0.jpg", "val/dog/1.jpg", "val/cat/2.jpg"}
    assert len(rows_of(corpus, "train")) == 60


def test_a_class_map_fixes_the_ids_and_leaves_the_rest_out(fill_folder, prepared, tmp_path, memory_root):
    folder = fill_folder(tmp_path / "p", per_class=10)
    names = tmp_path / "classes.txt"
    names.write_text("dog\nwolf\ncat\n")
    corpus = prepared(folder, memory_root, class_map=str(names), test_fraction=0.0)
    assert load_class_names(corpus) == ["dog", "wolf", "cat"]
    labels = {(row["example_id"].partition("/")[0], row["label"]) for row in rows_of(corpus, "train")}
    assert labels == {("dog", 0), ("cat", 2)}
    rejects = pq.read_table(corpus.open("rejects.parquet")).to_pylist()
    assert Counter((row["reason"], row["example_id"][:8]) for row in rejects) == {("unknown_class", "bird/owl"): 10}


@pytest.fixture
def table(tmp_path, picture):
    """table(rows) writes JSON lines and an image for each, and returns the request for them."""

    def make(rows, **source):
        (tmp_path / "jft").mkdir(exist_ok=True)
        for i, row in enumerate(rows):
            row["image"] = f"{i}.jpg"
            (tmp_path / "jft" / row["image"]).write_bytes(picture(300 + i))
        (tmp_path / "jft/labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = LabelTable(path=str(tmp_path / "jft/labels.jsonl"), **source)
        return CorpusConfig(name="jft", source=given, recipe={"val_fraction": 0.2, "test_fraction": 0.0})

    return make


def test_image_with_several_labels_also_gets_the_labels_of_its_copies(table, tmp_path, memory_root):
    rows = [{"labels": ["a", "b"], "w": [1.0, 0.25]} for _ in range(40)]
    rows += [
        {"labels": ["d", "c"], "w": [0.25, 0.5]},
        {"labels": ["e", "d"], "w": [0.125, 0.75]},
        {"labels": ["c"], "w": [0.0]},
    ]
    request = table(rows, weights_column="w")
    for copy in ("41.jpg", "42.jpg"):
        (tmp_path / "jft" / copy).write_bytes((tmp_path / "jft/40.jpg").read_bytes())
    digests = []
    for i, sort_bytes in enumerate((1 << 20, 1)):
        root = f"{memory_root}-{i}"
        execution = {"execution.sort_bytes": sort_bytes, "execution.examples_per_chunk": 8}
        (manifest,) = job.prepare([replace(request, **execution)], root)
        corpus = corpus_store(open_store(root), request)
        assert load_class_names(corpus) == ["a", "b", "c", "d", "e"]
        (row,) = [row for row in rows_of(corpus, "train") + rows_of(corpus, "val") if row["example_id"] == "40.jpg"]
        assert (row["labels"], row["weights"]) == ([3, 2, 4], [0.75, 0.5, 0.125])
        assert manifest.counts.refused == {"duplicate": 2}
        details = {
            row["example_id"]: row["detail"] for row in pq.read_table(corpus.open("rejects.parquet")).to_pylist()
        }
        assert "labelled ['d', 'c'] (this copy: ['e', 'd'], which are merged into it)" in details["41.jpg"]
        digests.append(manifest.digest)
    assert digests[0] == digests[1]


def test_a_group_in_two_splits_is_an_error(table, memory_root):
    rows = [{"labels": ["a"], "group": f"g{i // 2}", "split": "test" if i == 7 else "train"} for i in range(10)]
    request = table(rows, group_column="group", split_column="split")
    with pytest.raises(ValueError, match="1 groups are in more than one split, for example 'g3'"):
        job.prepare([request], memory_root)


def test_groups_stay_together_if_splits_are_drawn(table, memory_root):
    rows = [{"labels": ["a"], "group": f"g{i // 4}"} for i in range(80)]
    request = table(rows, group_column="group")
    job.prepare([request], memory_root)
    corpus = corpus_store(open_store(memory_root), request)
    groups = [{row["group"] for row in rows_of(corpus, split)} for split in ("train", "val")]
    assert len(groups[0]) + len(groups[1]) == 20
    assert not groups[0] & groups[1]
