"""Copies of an image do not affect its split: it is in val and test as often as others, and a new copy moves no image."""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.infra.config import replace
from vitline.infra.storage import open_store

NUM_PICTURES, COPIES = 120, (0, 1, 2, 5)
FRACTION = 0.2  # of val and of test


def splits_of(request, root):
    """The splits of every image, by its number in the table."""
    prepare([request], root)
    corpus, found = corpus_store(open_store(root), request), defaultdict(set)
    manifest = load_manifest(corpus)
    for split in manifest.splits.keys() & {"train", "val", "test"}:
        with ShardReader(corpus, manifest, split) as reader:
            for i in range(reader.split.num_row_groups):
                for example_id in reader.row_group(i, ["example_id"])["example_id"].to_pylist():
                    found[int(example_id.split("-")[0])].add(split)
    return found


@pytest.fixture
def table(tmp_path, picture):
    """table(copies) writes a table that contains image i 1 + copies(i) times, and returns the request for it."""

    def make(copies, duplicates="drop", fraction=FRACTION, **more):
        folder = tmp_path / "table"
        folder.mkdir(exist_ok=True)
        rows = []
        for i in range(NUM_PICTURES):
            (folder / f"{i}.jpg").write_bytes(picture(i, (8, 8)))
            rows += [
                {"image": f"{i}.jpg", "id": f"{i}-{copy}", "labels": ["a"]} | more for copy in range(1 + copies(i))
            ]
        (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = LabelTable(
            path=str(folder / "labels.jsonl"), id_column="id", **{f"{name}_column": name for name in more}
        )
        recipe = {"val_fraction": fraction, "test_fraction": fraction, "duplicates": duplicates}
        return CorpusConfig(name="copies", source=source, recipe=recipe)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_copies_do_not_change_splits(table, memory_root, duplicates):
    alone = splits_of(table(lambda i: 0, duplicates), f"{memory_root}-alone")
    bound = 4 * math.sqrt(NUM_PICTURES * FRACTION * (1 - FRACTION))
    for k in COPIES:
        found = splits_of(table(lambda i, k=k: k, duplicates), f"{memory_root}-{k}")
        assert found == alone
        assert len(found) == NUM_PICTURES
        for split in ("val", "test"):
            assert abs(sum(splits == {split} for splits in found.values()) - FRACTION * NUM_PICTURES) < bound
    mixed = splits_of(table(lambda i: COPIES[i % 4], duplicates), f"{memory_root}-mixed")
    assert mixed == alone


def test_train_is_not_empty_if_some_images_have_many_rows(table, memory_root):
    found = splits_of(table(lambda i: 39 if i < 10 else 0, fraction=0.45), memory_root)
    assert {"train"} in found.values()
    assert len(found) == NUM_PICTURES


def test_copy_in_a_new_segment_is_dropped_and_the_existing_image_kept(table, memory_root):
    first = table(lambda i: 0)
    before = splits_of(first, memory_root)
    version = load_manifest(corpus_store(open_store(memory_root), first)).version
    second = table(lambda i: 2)
    path = Path(second.source.path)
    path.write_text(path.read_text().replace("-", "-new-"))
    request = replace(second, add_to=f"copies/{version}")
    assert splits_of(request, memory_root) == before
    assert load_manifest(corpus_store(open_store(memory_root), request)).counts.refused == {
        "duplicate": 3 * NUM_PICTURES
    }


def test_val_per_class_counts_distinct_images(table, memory_root):
    found = []
    for i, copies in enumerate((lambda i: 0, lambda i: i % 3)):
        request = replace(table(copies, fraction=0.0), **{"recipe.val_per_class": 30})
        found.append(splits_of(request, f"{memory_root}-{i}"))
    assert found[0] == found[1]
    assert sum(splits == {"val"} for splits in found[0].values()) == 30


def test_copies_in_several_groups_join_the_first_group_and_its_split(table, memory_root):
    """Fifteen groups share each image with a neighbour: an image stays in the group that sorts first, in its split."""
    request = table(lambda i: 1, group="x")
    path = Path(request.source.path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        i, copy = map(int, row["id"].split("-"))
        row["group"] = f"g{(i + copy) % 15:02d}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([request], memory_root)
    corpus, groups = corpus_store(open_store(memory_root), request), defaultdict(set)
    manifest = load_manifest(corpus)
    for split in manifest.splits.keys() & {"train", "val", "test"}:
        with ShardReader(corpus, manifest, split) as reader:
            for i in range(reader.split.num_row_groups):
                for row in reader.row_group(i, ["example_id", "group"]).to_pylist():
                    number = int(row["example_id"].split("-")[0])
                    assert row["group"] == min(f"g{(number + copy) % 15:02d}" for copy in (0, 1))
                    groups[row["group"]].add(split)
    assert all(len(splits) == 1 for splits in groups.values())
    assert manifest.counts.num_accepted == NUM_PICTURES
