"""Segments and subsets: a corpus grows without being rewritten, and a subset copies no shards."""

import tarfile

import pyarrow.parquet as pq
import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.data_prep.shards.subsets import take
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.infra.config import replace
from vitline.infra.storage import open_store


def ids_of(corpus, split):
    manifest, ids = load_manifest(corpus), []
    with ShardReader(corpus, manifest, split) as reader:
        for i in range(reader.split.num_row_groups):
            table = reader.row_group(i, ["example_id"])
            assert table.num_rows == reader.split.place(i).num_rows
            ids += table["example_id"].to_pylist()
    return ids


@pytest.fixture
def base(fill_folder, prepared, tmp_path, memory_root):
    return prepared(fill_folder(tmp_path / "first"), memory_root)


@pytest.fixture
def grown(base, fill_folder, picture, request_for, tmp_path, memory_root):
    """The corpus with a second segment: 20 new images of old classes, 10 of a new one, 2 that the corpus has already."""
    folder = fill_folder(tmp_path / "second", per_class=0, classes=("cat", "newt"))
    for i in range(30):
        (folder / ("cat" if i < 20 else "newt") / f"new-{i}.jpg").write_bytes(picture(7000 + i))
    for i in range(2):
        (folder / "newt" / f"old-{i}.jpg").write_bytes((tmp_path / "first/dog" / f"{i:03d}.jpg").read_bytes())
    request = replace(request_for(folder), add_to=f"folder/{load_manifest(base).version}")
    prepare([request], memory_root)
    return corpus_store(open_store(memory_root), request)


def test_adding_a_segment_leaves_the_old_segments_unchanged(base, grown):
    before, after = load_manifest(base), load_manifest(grown)
    assert after.digest != before.digest
    assert [c["source_id"] for c in grown.read_json("classes.json")["classes"]] == ["bird/owl", "cat", "dog", "newt"]
    assert not [key for key in grown.list() if "/s000/" in key and not key.startswith("_work")]
    for split in ("train", "val", "test"):
        old = ids_of(base, split)
        assert ids_of(grown, split)[: len(old)] == old
        assert after.splits[split].rows_per_row_group == before.splits[split].rows_per_row_group
    new = ids_of(grown, "train") + ids_of(grown, "val") + ids_of(grown, "test")
    assert sum("new-" in example_id for example_id in new) == 30
    assert len(new) == len(set(new)) == after.counts.num_accepted == 150
    rejects = pq.read_table(grown.open("rejects.parquet")).to_pylist()
    assert {row["example_id"]: row["kept_id"] for row in rejects} == {
        "newt/old-0.jpg": "dog/000.jpg",
        "newt/old-1.jpg": "dog/001.jpg",
    }
    assert verify_corpus(grown).problems == {}


@pytest.mark.slow
def test_subsets_of_two_versions_with_equal_digests_are_distinct(base, request_for, tmp_path, memory_root):
    request = request_for(tmp_path / "first")
    request = replace(request, **{"recipe.decode.exif_orientation": "ignore"})
    prepare([request], memory_root)
    other = corpus_store(open_store(memory_root), request)
    assert load_manifest(other).digest == load_manifest(base).digest
    subsets_of_both = [take(base, 10), take(other, 10)]
    assert [subset.provenance["view_of"]["version"] for subset in subsets_of_both] == [
        load_manifest(c).version for c in (base, other)
    ]
    assert [subset.decode_policy.exif_orientation for subset in subsets_of_both] == ["apply", "ignore"]
    assert subsets_of_both[0].version != subsets_of_both[1].version
    assert [take(base, 10), take(other, 10)] == subsets_of_both
    assert verify_corpus(open_store(f"{memory_root}/corpora/folder/{subsets_of_both[1].version}")).problems == {}


@pytest.mark.slow
def test_adding_the_same_images_twice_is_refused(base, request_for, tmp_path, memory_root):
    request = replace(request_for(tmp_path / "first"), add_to="folder")
    with pytest.raises(ValueError, match=r"'.*\.jpg' and others are in the corpus already"):
        prepare([request], memory_root)
    with pytest.raises(ValueError, match=r"recipe.order_seed: the request has 1, but .* has 0"):
        prepare([replace(request, recipe=replace(request.recipe, order_seed=1))], memory_root)


@pytest.mark.slow
def test_subset_is_the_first_rows_with_its_own_digest_and_no_copied_shard(base, grown, memory_root):
    for corpus in (base, grown):
        whole = ids_of(corpus, "train")
        digests = {load_manifest(corpus).digest}
        for number in (1, 17, 40, len(whole) - 1):
            manifest = take(corpus, number)
            subset = open_store(f"{memory_root}/corpora/folder/{manifest.version}")
            assert load_manifest(subset) == manifest == take(corpus, number)
            assert ids_of(subset, "train") == whole[:number]
            assert ids_of(subset, "val") == ids_of(corpus, "val")
            assert not [key for key in subset.list() if "/part-" in key]
            assert verify_corpus(subset).problems == {}
            assert "trainval" not in manifest.splits
            digests.add(manifest.digest)
        assert len(digests) == 5
        with pytest.raises(ValueError, match=f"has {len(whole)} rows. Ask for at least 1 and for fewer"):
            take(corpus, len(whole))
    with pytest.raises(
        ValueError, match=r"trainval of folder/.* joins train and val, .* Take a subset of train or val"
    ):
        take(base, 10, "trainval")
    assert take(base, 40).provenance["view_of"]["without"] == ["trainval"]
    taken = take(base, 40)
    subset = open_store(f"{memory_root}/corpora/folder/{taken.version}")
    again = take(subset, 17)
    assert ids_of(open_store(f"{memory_root}/corpora/folder/{again.version}"), "train") == ids_of(base, "train")[:17]


@pytest.mark.slow
def test_a_folder_that_has_grown_is_added_again_and_adds_what_is_new(
    base, fill_folder, request_for, tmp_path, memory_root
):
    before = load_manifest(base)
    fill_folder(tmp_path / "first", per_class=3, classes=("newt",), first=9000)
    request = replace(
        request_for(tmp_path / "first"), add_to=f"folder/{before.version}", **{"recipe.known_ids": "skip"}
    )
    (after,) = prepare([request], memory_root)
    assert after.counts.num_accepted == before.counts.num_accepted + 3
    new = {i for split in after.splits for i in ids_of(corpus_store(open_store(memory_root), request), split)}
    assert {i for i in new if i.startswith("newt")} == {f"newt/{i:03d}.jpg" for i in range(3)}
    archived = tmp_path / "archived.tar"
    with tarfile.open(archived, "w") as tar:
        tar.add(tmp_path / "first/cat/000.jpg", "cat/000.jpg")
    source = replace(request_for(archived), add_to=f"folder/{before.version}", **{"recipe.known_ids": "skip"})
    with pytest.raises(ValueError, match=r"not supported: recipe\.known_ids=skip for .*archived"):
        prepare([source], memory_root)
