"""Every example that differs is found, whatever the corpora's order, buckets and segments; equal shards are not read."""

import shutil

import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.pages import diff_corpora
from vitline.data_prep.pages.diff_corpora import Change, diff_examples
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.data_prep.shards.subsets import take
from vitline.infra.config import replace
from vitline.infra.storage import open_store


def counts(diff):
    return {kind: changes.count for kind, changes in diff.changes.items() if changes.count}


@pytest.fixture
def folder(fill_folder, tmp_path):
    return fill_folder(tmp_path / "first", per_class=20)


@pytest.fixture
def changed(folder, picture, tmp_path):
    """A copy of the folder with one image removed, one renamed, one moved to another class and one with other bytes."""
    other = tmp_path / "second"
    shutil.copytree(folder, other)
    (other / "cat/000.jpg").unlink()
    (other / "cat/001.jpg").rename(other / "cat/one.jpg")
    (other / "dog/002.jpg").rename(other / "cat/dog-002.jpg")
    (other / "dog/003.jpg").write_bytes(picture(9999))
    return other


@pytest.mark.slow
@pytest.mark.parametrize("rows_at_once", [7, 1000])
@pytest.mark.parametrize("order_seed", [0, 1])
def test_added_removed_and_changed_examples_are_found(folder, changed, prepared, memory_root, order_seed, rows_at_once):
    a, b = prepared(folder, memory_root), prepared(changed, memory_root, order_seed=order_seed)
    diff = diff_examples(a, b, rows_at_once=rows_at_once)
    assert diff.num_common == 57
    assert counts(diff) == {"added": 2, "removed": 3, "changed_bytes": 1}
    assert set(diff.changes["added"].first) == {
        Change("cat/one.jpg", None, "cat"),
        Change("cat/dog-002.jpg", None, "cat"),
    }
    assert {change.example_id for change in diff.changes["removed"].first} == {
        "cat/000.jpg",
        "cat/001.jpg",
        "dog/002.jpg",
    }
    (change,) = diff.changes["changed_bytes"].first
    assert change.example_id == "dog/003.jpg"
    assert len(change.a) == len(change.b) == 12
    back = diff_examples(b, a, rows_at_once=rows_at_once)
    assert counts(back) == {"added": 3, "removed": 2, "changed_bytes": 1}


def test_other_fractions_move_examples_but_new_classes_do_not_relabel_them(folder, prepared, memory_root):
    a, b = prepared(folder, memory_root), prepared(folder, memory_root, val_fraction=0.3)
    moved = diff_examples(a, b).changes["moved"]
    assert moved.count > 0
    assert {(change.a, change.b) for change in moved.first} == {("train", "val")}
    # With one more class, label ids differ, but the labels do not.
    (folder / "a-class").mkdir()
    shutil.copy(folder / "cat/000.jpg", folder / "a-class/new.jpg")
    assert counts(diff_examples(a, prepared(folder, memory_root, duplicates="keep"))) == {"added": 1}


def test_several_labels_and_weights_are_compared_without_their_order(folder, tmp_path, memory_root):
    def corpus(lines):
        (tmp_path / "t.csv").write_text("image,labels,weights\n" + "".join(f"first/cat/{line}\n" for line in lines))
        source = LabelTable(path=str(tmp_path / "t.csv"), label_separator=" ", weights_column="weights")
        request = CorpusConfig(name="table", source=source)
        prepare([request], memory_root)
        return corpus_store(open_store(memory_root), request)

    rest = [f"{i:03d}.jpg,cat,0.5" for i in range(3, 20)]
    a = corpus(["000.jpg,cat dog,0.5 0.25", "001.jpg,cat dog,0.5 0.25", "002.jpg,cat,0.5", *rest])
    b = corpus(["000.jpg,dog cat,0.25 0.5", "001.jpg,cat dog,0.5 0.75", "002.jpg,dog,0.5", *rest])
    diff = diff_examples(a, b)
    assert counts(diff) == {"relabelled": 2}
    assert {change[1:] for change in diff.changes["relabelled"].first} == {
        ("cat:0.5, dog:0.25", "cat:0.5, dog:0.75"),
        ("cat:0.5", "dog:0.5"),
    }


def test_shards_that_both_list_are_not_read(folder, picture, prepared, request_for, memory_root, tmp_path, monkeypatch):
    read = []

    class Counting(ShardReader):
        def row_group(self, index, columns=None):
            table = super().row_group(index, columns)
            read.append(table.num_rows)
            return table

    monkeypatch.setattr(diff_corpora, "ShardReader", Counting)
    base = prepared(folder, memory_root)
    (tmp_path / "more/newt").mkdir(parents=True)
    for i in range(10):
        (tmp_path / f"more/newt/{i}.jpg").write_bytes(picture(7000 + i))
    request = replace(request_for(tmp_path / "more"), add_to=f"folder/{load_manifest(base).version}")
    prepare([request], memory_root)
    grown = corpus_store(open_store(memory_root), request)
    diff = diff_examples(base, grown)
    assert (diff.num_common, counts(diff)) == (60, {"added": 10})
    assert sum(read) == 10
    rows = load_manifest(base).splits["train"].num_rows
    take(base, rows - 1)
    view = open_store(f"{base.uri.rpartition('/')[0]}/{take(base, rows - 1).version}")
    diff = diff_examples(base, view, num_named=0)
    assert (diff.num_common, counts(diff)) == (59, {"removed": 1})
    assert diff.changes["removed"].first == ()


def test_diff_names_a_limited_deterministic_selection(folder, prepared, memory_root, fill_folder, tmp_path):
    a = prepared(folder, memory_root)
    b = prepared(fill_folder(tmp_path / "x", per_class=20, classes=("ant", "bee")), memory_root)
    few, many = (diff_examples(a, b, num_named=5, rows_at_once=n) for n in (9, 1000))
    assert few == many
    assert [len(few.changes[kind].first) for kind in ("added", "removed")] == [5, 5]
