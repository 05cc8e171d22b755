"""Shards of other corpora that a preparation reads: one that is not the listed shard ends the work, and nothing is published."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, ParquetImages
from vitline.data_prep.executors import InProcess
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardError, load_manifest, segment_keys
from vitline.infra.config import replace
from vitline.infra.storage import open_store

REWRITTEN = "states no identity, but was written with one: another program rewrote it"


def spoil(corpus, split):
    """Rewrites the first shard of a split with pyarrow: same columns, rows and row groups, but no identity. Returns the bytes
    that were there."""
    manifest = load_manifest(corpus)
    key = segment_keys(manifest.splits[split].segments[0])[0]
    good, sink = corpus.read(key), pa.BufferOutputStream()
    table = pq.read_table(pa.BufferReader(good))
    pq.write_table(table, sink, row_group_size=manifest.splits[split].rows_per_row_group, compression="none")
    corpus.write(key, sink.getvalue().to_pybytes())
    return key, good


def refused(corpus, split, work):
    """Asserts that `work` fails by the name of a rewritten shard, and succeeds once the shard is restored."""
    key, good = spoil(corpus, split)
    with pytest.raises(ShardError, match=REWRITTEN) as caught:
        work()
    assert corpus.uri_of(key) in str(caught.value)
    corpus.write(key, good)
    work()


@pytest.mark.parametrize("unlisted", [False, True], ids=["listed ids", "read ids"])
def test_a_segment_is_not_added_to_a_rewritten_shard(
    fill_folder, prepared, request_for, memory_root, tmp_path, unlisted
):
    base = prepared(fill_folder(tmp_path / "pictures", per_class=12), memory_root)
    fill_folder(tmp_path / "more", per_class=12, first=50_000)
    for path in [*(tmp_path / "more").rglob("*.jpg")]:
        path.rename(path.with_name(f"more{path.name}"))
    more = tmp_path / "more"
    if unlisted:  # the ids of a Parquet file without a column of ids are known only once it was read
        rows = [{"image": path.read_bytes(), "label": path.parent.name} for path in sorted(more.rglob("*.jpg"))]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "more.parquet")
    source = ParquetImages(path=f"{more}.parquet") if unlisted else ClassFolders(path=str(more))
    request = replace(request_for(more), source=source, add_to=f"folder/{load_manifest(base).version}")
    refused(base, "train", lambda: prepare([request], memory_root))


def pets_and_web(tmp_path, evaluation="test"):
    """Requests of an evaluation set, and of a training corpus that contains its images at half the size."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    pieces = [p.crop((x, y, x + 200, y + 200)) for p in photos for x in (0, 210, 420) for y in (0, 210)]
    for i, piece in enumerate(pieces):
        split = evaluation if i < 6 else "train"
        for path in (tmp_path / f"pets/{split}/cat/{i}.png", tmp_path / f"web/{i % 2}/{i}.jpg"):
            path.parent.mkdir(parents=True, exist_ok=True)
            (piece if "pets" in path.parts else piece.resize((100, 100))).save(path)

    def request(name):
        recipe = CorpusRecipe(val_fraction=0.0, test_fraction=0.0)
        return CorpusConfig(name=name, source=ClassFolders(path=str(tmp_path / name)), recipe=recipe)

    return request("pets"), request("web")


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", ["test", "val"])
@pytest.mark.parametrize("decontaminate", [False, True])
def test_leaks_are_not_looked_for_in_a_rewritten_shard(tmp_path, memory_root, evaluation, decontaminate):
    pets, web = pets_and_web(tmp_path, evaluation)
    prepare([pets], memory_root)
    request = replace(web, **{"recipe.decontaminate": ("pets",)}) if decontaminate else web
    corpus = corpus_store(open_store(memory_root), pets)
    refused(corpus, evaluation, lambda: prepare([request], memory_root))
    counts = load_manifest(corpus_store(open_store(memory_root), request)).counts
    assert counts.num_accepted == (12 - 6 * decontaminate)


def test_images_are_not_compared_with_a_shard_that_changed_since_its_hashes_were_read(tmp_path, memory_root):
    pets, web = pets_and_web(tmp_path)
    prepare([pets], memory_root)
    corpus, spoiled = corpus_store(open_store(memory_root), pets), []

    class Spoiling(InProcess):
        def run(self, work, tasks, **how):
            if work.__name__ == "compare_pairs":
                spoiled.append(spoil(corpus, "test"))
            return super().run(work, tasks)

    with pytest.raises(ShardError, match=REWRITTEN):
        prepare([web], memory_root, Spoiling())
    assert len(spoiled) == 1
    corpus.write(*spoiled[0])
    assert len(prepare([web], memory_root)) == 1


def test_a_shard_of_the_source_that_changed_since_it_was_listed_is_not_examined(fill_folder, request_for, tmp_path):
    root = str(tmp_path / "store")
    request = request_for(fill_folder(tmp_path / "pictures", per_class=12))
    prepare([request], root)
    source, spoiled = corpus_store(open_store(root), request), []

    class Spoiling(InProcess):
        def run(self, work, tasks, **how):
            if work.__name__ == "examine_chunk":
                spoiled.append(spoil(source, "train"))
            return super().run(work, tasks)

    again = replace(request, name="again", source=ParquetImages(path=source.uri))
    with pytest.raises(ShardError, match=REWRITTEN):
        prepare([again], root, Spoiling())
    source.write(*spoiled[0])
    (manifest,) = prepare([again], root)
    assert manifest.counts.num_accepted == load_manifest(source).counts.num_accepted
