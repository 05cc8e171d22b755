"""Evaluation images among training images: found whatever was changed, reported, and left out on request."""

import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.executors import InProcess
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.plan import confirm, leakage, locate_images, near
from vitline.data_prep.prepare import job
from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import replace
from vitline.infra.storage import open_store

CHANGES = {
    "half": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "mirror": ImageOps.mirror,
    "jpeg": lambda image: image,
}


@pytest.fixture(scope="module")
def pieces():
    """Twelve different parts of two photographs."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    return [p.crop((x, y, x + 200, y + 200)) for p in photos for x in (0, 210, 420) for y in (0, 210)]


def save(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def corpora(pieces, tmp_path):
    """An evaluation set of twelve images, and a training corpus that contains changed copies of four of them."""
    for i, piece in enumerate(pieces):
        split = "test" if i < 6 else "val" if i < 8 else "train"
        save(piece, tmp_path / "pets" / split / "cat" / f"{i}.png")
    for i, (name, change) in enumerate(CHANGES.items()):
        picture = change(pieces[i])
        save(picture, tmp_path / f"web/{i % 2}/{name}.jpg", quality=50 if name == "jpeg" else 90)
    noise = np.random.default_rng(0)
    for i in range(20):
        coarse = Image.fromarray(noise.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((90, 90))
        save(coarse, tmp_path / f"web/{i % 2}/other-{i}.png")

    def request(name, **recipe):
        splits = {"val_fraction": 0.0, "test_fraction": 0.0}
        return CorpusConfig(
            name=name, source=ClassFolders(path=str(tmp_path / name)), recipe=CorpusRecipe(**splits, **recipe)
        )

    return request("pets"), request("web")


def prepared(request, root):
    job.prepare([request], root)
    return corpus_store(open_store(root), request)


def leaks_of(corpus):
    return {
        row["example_id"].partition("/")[2]: row for row in pq.read_table(corpus.open("leakage.parquet")).to_pylist()
    }


def test_leaks_are_found_in_prepared_and_in_concurrent_evaluation_sets(corpora, memory_root):
    pets, web = corpora
    together = f"{memory_root}-together"
    job.prepare([web, pets], together)
    alone = prepared(web, f"{memory_root}-alone")
    assert leaks_of(alone) == {}
    prepared(pets, memory_root)
    for corpus in (corpus_store(open_store(together), web), prepared(web, memory_root)):
        leaks = leaks_of(corpus)
        assert {name: row["evaluation_id"] for name, row in leaks.items()} == {
            "half.jpg": "test/cat/0.png",
            "brighter.jpg": "test/cat/1.png",
            "mirror.jpg": "test/cat/2.png",
            "jpeg.jpg": "test/cat/3.png",
        }
        assert {row["corpus"].partition("/")[0] for row in leaks.values()} == {"pets"}
        manifest = load_manifest(corpus)
        assert manifest.counts.num_accepted == 24  # reported, not left out
        assert "leak" in corpus.read("report.html").decode()
        (found,) = corpus.read_json("stats.json")["leakage"].values()
        assert found["count"] == 4
        assert all(pair["other"]["base"] for pair in found["first"])  # the page shows both images


def test_pairs_are_compared_in_batches_by_workers_and_counted(corpora, memory_root, monkeypatch):
    pets, web = corpora
    prepared(pets, memory_root)
    expected = leaks_of(prepared(web, memory_root))
    monkeypatch.setattr(confirm, "PAIRS_PER_TASK", 1)
    passes, shown, begin = {}, [], job.StageProgress.begin

    class Counting(InProcess):
        def run(self, work, tasks, **how):
            passes[work.__name__] = len(tasks)
            return super().run(work, tasks)

    def watched(self, corpus, total=1, unit="corpus", **more):
        shown.append((self._stage, total, unit))
        begin(self, corpus, total, unit, **more)

    monkeypatch.setattr(job.StageProgress, "begin", watched)
    request = replace(web, **{"recipe.order_seed": 1})
    job.prepare([request], memory_root, Counting())
    assert leaks_of(corpus_store(open_store(memory_root), request)) == expected
    assert passes["compare_pairs"] >= 4
    assert ("leakage", passes["compare_pairs"], "pairs compared") in shown


def test_pairs_in_one_row_group_share_its_reading(corpora, memory_root, monkeypatch):
    pets, web = corpora
    prepared(pets, memory_root)
    groups, made = [], locate_images._ShardGroup.__init__
    monkeypatch.setattr(locate_images._ShardGroup, "__init__", lambda *a: groups.append(a[1:]) or made(*a))
    found = load_manifest(prepared(web, memory_root))
    splits = load_manifest(corpus_store(open_store(memory_root), pets)).splits
    assert found.provenance.get("leak_pairs_not_compared") is None
    assert 0 < len(groups) <= sum(splits[name].num_row_groups for name in ("test", "val"))


def test_pairs_beyond_the_limit_are_counted_and_reported(corpora, memory_root, monkeypatch):
    pets, web = corpora
    prepared(pets, memory_root)
    monkeypatch.setattr(leakage, "MAX_PAIRS", 1)
    corpus = prepared(web, memory_root)
    assert len(leaks_of(corpus)) == 1
    assert load_manifest(corpus).provenance["leak_pairs_not_compared"] >= 3


def test_leaks_are_left_out_on_request(corpora, memory_root):
    pets, web = corpora
    clean = replace(web, **{"recipe.decontaminate": ("pets",)})
    with pytest.raises(ValueError, match="There is no corpus 'pets'"):
        prepared(clean, memory_root)
    prepared(pets, memory_root)
    corpus = prepared(clean, memory_root)
    assert corpus.uri != prepared(web, memory_root).uri
    manifest = load_manifest(corpus)
    assert manifest.counts.refused == {"leakage": 4}
    assert manifest.counts.num_accepted == 20
    assert leaks_of(corpus) == {}
    rejects = pq.read_table(corpus.open("rejects.parquet")).to_pylist()
    assert {row["kept_id"] for row in rejects} == {f"test/cat/{i}.png" for i in range(4)}
    assert all("of split test of pets/" in row["detail"] for row in rejects)


def test_a_corpus_without_leaks_is_decontaminated(corpora, tmp_path, memory_root):
    pets, web = corpora
    prepared(pets, memory_root)
    for name in CHANGES:
        next(tmp_path.glob(f"web/*/{name}.jpg")).unlink()
    manifest = load_manifest(prepared(replace(web, **{"recipe.decontaminate": ("pets",)}), memory_root))
    assert (manifest.counts.num_accepted, manifest.counts.refused) == (20, {})


def test_val_split_of_the_source_is_compared_if_there_is_no_test(corpora, tmp_path, memory_root):
    pets, web = corpora
    (tmp_path / "pets/test").rename(tmp_path / "pets/val/moved")
    together = f"{memory_root}-together"
    job.prepare([web, pets], together)
    prepared(pets, memory_root)
    for corpus in (corpus_store(open_store(together), web), prepared(web, memory_root)):
        assert {row["split"] for row in leaks_of(corpus).values()} == {"val"}
        assert len(leaks_of(corpus)) == 4
    clean = prepared(replace(web, **{"recipe.decontaminate": ("pets",)}), memory_root)
    assert load_manifest(clean).counts.refused == {"leakage": 4}


def test_val_split_drawn_from_train_is_not_an_evaluation_set(corpora, tmp_path, memory_root):
    pets, web = corpora
    for split in ("val", "test"):
        for file in (tmp_path / "pets" / split / "cat").iterdir():
            file.rename(tmp_path / "pets/train/cat" / file.name)
    for folder in ("val/cat", "val", "test/cat", "test"):
        (tmp_path / "pets" / folder).rmdir()
    hashed = prepared(replace(pets, **{"recipe.val_fraction": 0.7}), memory_root)
    assert set(load_manifest(hashed).splits) == {"train", "val", "trainval"}
    assert prepared(web, memory_root).read_json("stats.json")["compared"] == []
    asked = prepared(replace(web, **{"recipe.decontaminate": ("pets",)}), memory_root)
    assert load_manifest(asked).counts.refused["leakage"] > 0


def test_newest_version_is_compared_and_older_ones_are_listed(corpora, memory_root):
    pets, web = corpora
    titles = []
    for seed in (0, 1):
        manifest = load_manifest(prepared(replace(pets, **{"recipe.order_seed": seed}), memory_root))
        titles.append(f"pets/{manifest.version}")
        time.sleep(1.1 * (1 - seed))  # versions are in order of whole seconds
    corpus = prepared(web, memory_root)
    stats = corpus.read_json("stats.json")
    assert {name for name, _ in stats["compared"]} == {titles[1]}
    assert stats["older_versions"] == [titles[0]]
    assert f"Older versions were not compared: {titles[0]}" in corpus.read("report.html").decode()


def test_near_duplicates_within_a_corpus_are_dropped_on_request(corpora, pieces, tmp_path, memory_root, monkeypatch):
    _, web = corpora
    for i, piece in enumerate(pieces[:4]):
        save(piece, tmp_path / "web/0" / f"original-{i}.png")
    request = replace(web, **{"recipe.near_duplicates": "drop"})
    found = []
    for i, (sort_bytes, pairs_per_task) in enumerate(((1 << 20, 512), (1, 512), (1, 1))):
        monkeypatch.setattr(confirm, "PAIRS_PER_TASK", pairs_per_task)
        asked = replace(request, **{"execution.sort_bytes": sort_bytes, "execution.examples_per_chunk": 7})
        corpus = prepared(asked, f"{memory_root}-{i}")
        assert load_manifest(corpus).counts.refused == {"near_duplicate": 4}
        rejects = pq.read_table(corpus.open("rejects.parquet")).to_pylist()
        pairs = {frozenset((row["example_id"], row["kept_id"])) for row in rejects}
        changed = {f"{i % 2}/{name}.jpg": f"0/original-{i}.png" for i, name in enumerate(CHANGES)}
        assert pairs == {frozenset(pair) for pair in changed.items()}
        found.append(load_manifest(corpus).digest)
        assert "near_pairs_not_compared" not in load_manifest(corpus).provenance
    assert len(set(found)) == 1


def test_of_similar_images_the_one_in_the_test_split_is_kept(corpora, pieces, tmp_path, memory_root):
    pets, _ = corpora
    for i, piece in enumerate(pieces[:8]):
        save(CHANGES["half"](piece), tmp_path / f"pets/train/cat/small-{i}.png")
    corpus = prepared(replace(pets, **{"recipe.near_duplicates": "drop"}), memory_root)
    left_out = {row["example_id"] for row in pq.read_table(corpus.open("rejects.parquet")).to_pylist()}
    assert left_out == {f"train/cat/small-{i}.png" for i in range(8)}


def test_pairs_that_exceed_the_limit_are_counted(corpora, pieces, tmp_path, memory_root, monkeypatch):
    monkeypatch.setattr(near, "NEAREST", 0)
    _, web = corpora
    for i, piece in enumerate(pieces[:4]):
        save(piece, tmp_path / "web/0" / f"original-{i}.png")
    manifest = load_manifest(prepared(replace(web, **{"recipe.near_duplicates": "drop"}), memory_root))
    assert manifest.provenance["near_pairs_not_compared"] >= 4
    assert manifest.counts.refused == {}
