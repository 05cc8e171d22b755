"""A dry run predicts the preparation: exactly where it counts, approximately where it estimates."""

import shutil
import threading

import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.pages import dry_run as module
from vitline.data_prep.pages import sample_source
from vitline.data_prep.pages.dry_run import dry_run
from vitline.data_prep.pages.dry_run_report import Cores, Estimate
from vitline.data_prep.pages.expected_rows import shares
from vitline.data_prep.pages.sample_source import Budget
from vitline.data_prep.plan.plan_shards import Base
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import ImageSource, SourcePart
from vitline.infra.config import replace
from vitline.infra.storage import open_store

CORES = Cores(2, "this machine")


@pytest.fixture
def folder(fill_folder, tmp_path):
    """120 images in 3 classes, 6 broken ones, a text and a hidden file."""
    folder = fill_folder(tmp_path / "source")
    for i in range(6):
        (folder / "cat" / f"broken-{i}.jpg").write_bytes(b"no picture")
    (folder / "cat/notes.txt").write_text("x")
    (folder / "dog/.hidden").write_text("x")
    return folder


def test_a_dry_run_of_a_folder_matches_its_preparation(folder, request_for, memory_root):
    request = request_for(folder, duplicates="keep")
    found, page = dry_run(request, CORES)
    (made,) = prepare([request], memory_root)
    assert found.found == Estimate(made.counts.num_found, True)
    assert found.classes_exact
    assert found.classes == {"cat": 40, "dog": 40, "bird/owl": 40}
    assert found.refused == {"ignored_file": Estimate(2, True), "not_an_image": Estimate(6, True)}
    assert found.structure == "<class> (3 classes, 126 files); no folder is a split"
    assert ("read as", found.structure) in found.rows()
    assert found.complete
    assert found.splits == {name: made.splits[name].num_rows for name in ("train", "val", "test")}
    assert found.mean_bytes == pytest.approx(made.counts.num_bytes / made.counts.num_accepted)
    assert found.num_shards == pytest.approx(sum(s.num_shards for s in made.splits["trainval"].segments), abs=2)
    assert found.mean_pixels == 24 * 20
    assert found.hours > 0
    assert found.to_json()["formats"] == {"JPEG RGB": 120}
    assert page.count("data:image/webp") == 18
    assert "not an image by its extension .txt" in page
    assert "<script" not in page


def test_a_small_sample_is_spread_over_the_parts(folder, request_for):
    found, _ = dry_run(request_for(folder, examples_per_chunk=8), CORES, budget=Budget(num_images=32))
    assert found.num_parts == 16
    assert 32 <= found.num_sampled <= 40
    assert {info.source_id for info in found.class_map.classes} == {"cat", "dog", "bird/owl"}
    assert found.found == Estimate(128, True)
    assert not found.complete
    assert found.classes == {"cat": 46, "dog": 40, "bird/owl": 40}
    assert sum(found.splits.values()) == pytest.approx(120, abs=8)


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "zip"])
def test_archives_are_estimated(folder, request_for, tmp_path, ending, memory_root):
    kind = {"tar": "tar", "tar.gz": "gztar", "zip": "zip"}[ending]
    archive = shutil.make_archive(str(tmp_path / "pictures"), kind, folder.parent, folder.name)
    found, page = dry_run(request_for(archive, examples_per_chunk=16), CORES)
    assert found.found.value == pytest.approx(128, rel=0.1)
    assert set(found.classes) == {"cat", "dog", "bird/owl"}
    assert found.stats.num_rows == pytest.approx(120, abs=20)
    assert page.count("data:image/webp") == 18
    assert found.splits["train"] == pytest.approx(96, abs=15)


def test_a_source_without_images_is_an_error(tmp_path, request_for):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="holds no example"):
        dry_run(request_for(tmp_path), CORES)
    (tmp_path / "a/b.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"none of the 1 sampled files is a labelled image \(not_an_image 1\)"):
        dry_run(request_for(tmp_path), CORES)


def test_requests_that_would_publish_nothing_are_reported(folder, request_for):
    notes = " ".join(dry_run(request_for(folder, max_refused_fraction=0.01), CORES)[0].notes)
    assert "6 of 126 images are refused (not_an_image 6), more than the share 0.01 that" in notes
    with pytest.raises(
        ValueError, match=r"no image would be left for train. Of 120 images 120 .* is 41, .* has 40 images"
    ):
        dry_run(request_for(folder, min_images_per_class=41), CORES)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [Budget(), Budget(num_images=32)])
@pytest.mark.parametrize("recipe", [{"min_images_per_class": 20}, {"val_per_class": 5}, {"class_map": "list"}, {}])
def test_expected_rows_exclude_what_the_recipe_leaves_out(
    fill_folder, request_for, tmp_path, memory_root, recipe, budget
):
    folder = fill_folder(tmp_path / "source")
    fill_folder(folder, per_class=9, classes=("cat", "dog", "bird/owl", "small", "tiny"))
    if "class_map" in recipe:
        (tmp_path / "list").write_text("small\ncat\nnone")
        recipe = {"class_map": str(tmp_path / "list")}
    request = request_for(folder, duplicates="keep", **recipe)
    found, _ = dry_run(request, CORES, budget=budget)
    (made,) = prepare([request], memory_root)
    rows = {name: made.splits[name].num_rows for name in ("train", "val", "test")}
    assert sum(found.splits.values()) == sum(rows.values())
    assert found.train_at_most >= rows["train"]
    assert found.splits_exact == found.complete
    if found.complete:
        assert found.splits == rows
        assert found.train_at_most == rows["train"]
    assert {reason: number.value for reason, number in found.refused.items()} == made.counts.refused


def test_options_that_an_estimate_ignores_are_listed(folder, request_for, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "pictures"), "tar", folder.parent, folder.name)
    request = request_for(archive, min_images_per_class=41, val_per_class=5)
    found, _ = dry_run(request, CORES, budget=Budget(num_images=16))
    notes = " ".join(found.notes)
    assert "recipe.min_images_per_class is not considered in the expected rows" in notes
    assert "recipe.val_per_class is not considered in the expected rows" in notes
    assert not found.complete
    with pytest.raises(ValueError, match="no image would be left for train"):
        dry_run(request, CORES)


def test_rounded_shares_add_up_to_the_total():
    assert shares({"train": 1, "val": 1, "test": 1}, 59) == {"train": 20, "val": 20, "test": 19}
    assert shares({"train": 5, "val": 0}, 3) == {"train": 3}


def test_dry_run_of_a_new_segment_uses_the_row_group_size_of_its_corpus(
    folder, fill_folder, request_for, tmp_path, memory_root
):
    request = request_for(folder)
    (manifest,) = prepare([request], memory_root)
    corpus = corpus_store(open_store(memory_root), request)
    more = request_for(fill_folder(tmp_path / "more", per_class=4, classes=("newt",)))
    more = replace(more, add_to=f"folder/{manifest.version}")
    found, _ = dry_run(more, CORES, base=Base(corpus, load_manifest(corpus)))
    assert found.rows_per_row_group["train"] == manifest.splits["train"].rows_per_row_group


class HalfStuck(ImageSource):
    """A source with an additional first part that returns nothing, like an archive that is read to its end for its first image."""

    def __init__(self, source):
        self._source, self.origin, self.over = source, source.origin, threading.Event()

    def fingerprint(self):
        return self._source.fingerprint()

    def parts(self, place):
        yield SourcePart(name="stuck", num_bytes=1000)
        yield from self._source.parts(place)

    def examples(self, part, place):
        if part.name == "stuck":
            self.over.wait()
        else:
            yield from self._source.examples(part, place)


def test_a_part_that_returns_nothing_in_time_is_left_out(monkeypatch, folder, request_for):
    request = request_for(folder, examples_per_chunk=1000)
    source = HalfStuck(open_source(request))
    monkeypatch.setattr(module, "open_source", lambda config: source)
    taking = sample_source._Taking
    join = taking.join  # the time of the stuck part alone passes quickly
    monkeypatch.setattr(taking, "join", lambda self, left_s: join(self, 0.1 if self.name.endswith("stuck") else left_s))
    try:
        found, _ = dry_run(request, CORES, budget=Budget(num_images=8, seconds=1000))
    finally:
        source.over.set()
    assert any("timed out: 1 (stuck)" in note for note in found.notes)
    assert not found.found.exact
    assert found.num_sampled >= 4
