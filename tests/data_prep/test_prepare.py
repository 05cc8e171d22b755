"""Properties of preparation: every example once, one digest however it is computed, and a killed job resumes."""

import os
import shutil
import threading
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, LabelTable, ShardingConfig
from vitline.data_prep.examine import examine
from vitline.data_prep.executors import InProcess, Threads
from vitline.data_prep.find_corpus import corpus_store, corpus_version
from vitline.data_prep.plan import listed_ids
from vitline.data_prep.prepare import job
from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.data_prep.shards import write_shards
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.infra.stores import s3_store


def own_splits(manifest):
    """The splits with shards of their own; joined splits list the shards of other splits."""
    return [name for name, split in manifest.splits.items() if all(s.split == name for s in split.segments)]


def rows_of(corpus, *splits):
    manifest = load_manifest(corpus)
    rows = []
    for split in splits or own_splits(manifest):
        with ShardReader(corpus, manifest, split) as reader:
            for i in range(reader.split.num_row_groups):
                rows += reader.row_group(i).to_pylist()
    return rows


def rejects_of(corpus):
    return pq.read_table(corpus.open("rejects.parquet")).to_pylist()


@pytest.fixture
def folder(fill_folder, tmp_path):
    return fill_folder(tmp_path / "pictures", per_class=25)


def add_bad_files(folder, picture):
    """Six files that cannot be read as images, and two that are not images by name."""
    whole = picture(9999, size=(200, 200))
    bad = {
        "cat/empty.jpg": (b"", "empty"),
        "cat/page.jpg": (b"<html>not found</html>", "not_an_image"),
        "dog/half.jpg": (whole[: len(whole) // 2], "truncated"),
        "dog/long.png": (picture(1, size=(400, 2), kind="PNG"), "aspect_ratio"),
        "bird/owl/notes.txt": (b"seen in May", "ignored_file"),
        "bird/owl/._000.jpg": (b"\0\5\26\7", "ignored_file"),
        "top.jpg": (picture(2), "no_label"),
    }
    for name, (data, _) in bad.items():
        (folder / name).write_bytes(data)
    (folder / "dog/gone.jpg").symlink_to(folder / "nowhere.jpg")
    return {name: reason for name, (_, reason) in bad.items()} | {"dog/gone.jpg": "unreadable"}


@pytest.mark.slow
def test_every_file_is_in_one_shard_or_refused_with_its_reason(folder, picture, prepared, memory_root):
    reasons = add_bad_files(folder, picture)
    (folder / "cat/odd name ü.JPEG").write_bytes(picture(3, kind="PNG"))
    corpus = prepared(folder, memory_root)
    rows, rejects = rows_of(corpus), rejects_of(corpus)
    assert {row["example_id"]: row["reason"] for row in rejects} == reasons
    assert all(row["source"].startswith("file://") and row["detail"] for row in rejects)
    ids = [row["example_id"] for row in rows]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    assert len(ids) == len(set(ids))
    assert set(ids) == files - reasons.keys()
    for row in rows:
        assert row["image"]["bytes"] == (folder / row["example_id"]).read_bytes()
    counts = load_manifest(corpus).counts
    assert (counts.num_found, counts.num_accepted, counts.num_refused) == (len(files), len(ids), len(reasons))
    assert counts.refused == Counter(reasons.values())
    assert load_class_names(corpus) == ["bird/owl", "cat", "dog"]


def test_rows_of_a_segment_are_in_hash_order_for_any_source_order(folder, prepared, memory_root):
    corpus = prepared(folder, memory_root)
    ids = [row["example_id"] for row in rows_of(corpus, "train")]
    assert ids != sorted(ids)
    other = prepared(folder, memory_root, order_seed=1)
    assert load_manifest(other).digest != load_manifest(corpus).digest
    assert sorted(ids) == sorted(row["example_id"] for row in rows_of(other, "train"))  # the same splits


class Elsewhere(InProcess):
    """An executor that gives all but small work to a function."""

    def __init__(self, execute):
        self._execute = execute

    def run(self, work, tasks, *, few=False, heavy=False):
        return map(work, tasks) if few or not tasks else self._execute(work, tasks)


def in_reverse_order(work, tasks):
    return iter([work(task) for task in reversed(tasks)])


@pytest.mark.slow
def test_the_digest_does_not_depend_on_chunks_buckets_parallelism_or_store(folder, request_for, memory_root, tmp_path):
    digests, files = set(), set()
    for root, chunk, sort_bytes, executor in (
        (memory_root, 16, 1 << 20, InProcess()),
        (f"{memory_root}-2", 1, 30_000, Elsewhere(in_reverse_order)),
        (f"file://{tmp_path}/store", 1000, 1, InProcess()),
        (str(tmp_path / "other store"), 7, 1, Elsewhere(in_reverse_order)),
        (f"{memory_root}-3", 2, 1 << 20, Threads()),
    ):
        request = request_for(folder, examples_per_chunk=chunk, sort_bytes=sort_bytes)
        (manifest,) = job.prepare([request], root, executor)
        digests.add(manifest.digest)
        files.add(corpus_store(open_store(root), request).read("shards.parquet"))
    assert len(digests) == len(files) == 1


def test_several_corpora_share_one_execution_per_stage(folder, fill_folder, request_for, memory_root, tmp_path):
    passes = []

    def counting(work, tasks):
        passes.append(len(tasks))
        return map(work, tasks)

    requests = [request_for(folder), request_for(fill_folder(tmp_path / "more", 5)), request_for(folder)]
    first, second, again = job.prepare(requests, memory_root, Elsewhere(counting))
    assert first == again != second
    assert len(passes) == 2
    assert job.prepare(requests, memory_root, Elsewhere(counting)) == [first, second, again]
    assert len(passes) == 2  # finished corpora are only looked up
    assert load_manifest(corpus_store(open_store(memory_root), requests[1])) == second


class Killed(BaseException):
    """Simulates kill -9: no code under test catches this exception."""


def killed_after(num_tasks):
    """An executor that finishes `num_tasks` tasks of all stages together, and dies in the next."""
    left = [num_tasks]

    def execute(work, tasks):
        for task in tasks:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            yield work(task)

    return Elsewhere(execute)


def test_a_killed_job_redoes_only_what_was_not_finished(folder, request_for, memory_root, monkeypatch):
    """Counted: examples handed to the decoder, and writes of shards."""
    work = Counter()
    write = write_shards.write_shard

    class CountingExaminer(examine.SandboxedDecoder):  # not that of the report, which decodes the images that it shows
        def run(self, images):
            def counting():
                for image in images:
                    work["decoded"] += 1
                    yield image

            return super().run(counting())

    def counted_write(*arguments):
        work["written"] += 1
        return write(*arguments)

    monkeypatch.setattr(examine, "SandboxedDecoder", CountingExaminer)
    monkeypatch.setattr(write_shards, "write_shard", counted_write)
    request = request_for(folder, examples_per_chunk=10)
    (whole,) = job.prepare([request], f"{memory_root}-whole")
    once = dict(work)
    num_shards = sum(whole.splits[name].segments[0].num_shards for name in own_splits(whole))
    assert once == {"decoded": 75, "written": num_shards}
    assert num_shards >= 4

    work.clear()
    for kill_after in (3, 4, 2, 1):  # first among the 8 chunks, then among the shards
        with pytest.raises(Killed):
            job.prepare([request], memory_root, killed_after(kill_after))
        assert not corpus_store(open_store(memory_root), request).exists("manifest.json")
    (resumed,) = job.prepare([request], memory_root)
    assert resumed.digest == whole.digest
    assert dict(work) == once


def test_a_task_that_is_repeated_after_it_finished_decodes_nothing(folder, request_for, memory_root, monkeypatch):
    """Ray repeats a task if its result was lost with its node."""
    answers = []

    def repeating(work, tasks):
        results = [work(task) for task in tasks]
        with monkeypatch.context() as patch:
            patch.setattr(examine, "examine_examples", pytest.fail)
            patch.setattr(write_shards, "write_shard", pytest.fail)
            answers.append((results, [work(task) for task in tasks]))
        return iter(results)

    job.prepare([request_for(folder)], memory_root, Elsewhere(repeating))
    assert len(answers) == 2
    assert all(first == again for first, again in answers)


def test_a_kill_while_a_shard_is_written_leaves_no_partial_shard(folder, request_for, tmp_path, monkeypatch):
    request, root = request_for(folder), str(tmp_path / "store")

    def dying(images, row, space):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(write_shards._Images, "_read_one", dying)
        with pytest.raises(Killed):
            job.prepare([request], root)
    corpus = corpus_store(open_store(root), request)
    assert not [key for key in corpus.list() if key.startswith(("train/", "val/", "test/"))]
    (manifest,) = job.prepare([request], root)
    assert len(rows_of(corpus)) == manifest.counts.num_accepted


def test_two_concurrent_preparations_give_the_same_corpus(folder, request_for, memory_root):
    request = request_for(folder)
    manifests = []
    threads = [threading.Thread(target=lambda: manifests.extend(job.prepare([request], memory_root))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(manifests) == 3
    assert len({manifest.digest for manifest in manifests}) == 1
    assert len(rows_of(corpus_store(open_store(memory_root), request))) == 75


def test_preparation_overtaken_by_another_one_gives_the_same_corpus(folder, request_for, memory_root, monkeypatch):
    """The faster preparation has deleted the files that the slower one is about to read."""
    request, find_repeats = request_for(folder), listed_ids.find_repeats
    faster = []

    def overtaken(task):
        if not faster:
            monkeypatch.setattr(listed_ids, "find_repeats", find_repeats)
            faster.extend(job.prepare([request], memory_root))
        return find_repeats(task)

    monkeypatch.setattr(listed_ids, "find_repeats", overtaken)
    slower = job.prepare([request], memory_root)
    assert [manifest.digest for manifest in slower] == [manifest.digest for manifest in faster]


def test_small_classes_are_left_out(folder, picture, prepared, memory_root):
    (folder / "rare").mkdir()
    for i in range(3):
        (folder / "rare" / f"{i}.jpg").write_bytes(picture(500 + i))
    corpus = prepared(folder, memory_root, min_images_per_class=4)
    assert load_class_names(corpus) == ["bird/owl", "cat", "dog"]
    assert {row["example_id"]: row["reason"] for row in rejects_of(corpus)} == {
        f"rare/{i}.jpg": "small_class" for i in range(3)
    }
    assert len(load_class_names(prepared(folder, memory_root, min_images_per_class=3))) == 4


def test_one_of_equal_images_is_kept(fill_folder, picture, prepared, tmp_path, memory_root):
    folder = fill_folder(tmp_path / "splits/train", per_class=10).parent
    same, pixels = picture(77, kind="PNG"), picture(77, kind="BMP")
    (folder / "test/cat").mkdir(parents=True)
    for name, data in {
        "train/cat/a.png": same,
        "train/cat/b.png": same,
        "train/dog/c.bmp": pixels,
        "test/cat/d.png": same,
    }.items():
        (folder / name).write_bytes(data)
    corpus = prepared(folder, memory_root, val_fraction=0.0)
    kept = {row["example_id"]: row["kept_id"] for row in rejects_of(corpus) if row["reason"] == "duplicate"}
    assert kept == dict.fromkeys(["train/cat/a.png", "train/cat/b.png", "train/dog/c.bmp"], "test/cat/d.png")
    details = {row["example_id"]: row["detail"] for row in rejects_of(corpus)}
    assert "labelled ['cat'] (this copy: ['dog'])" in details["train/dog/c.bmp"]
    # With either policy, an image of the test split is in no other split.
    assert {row["example_id"] for row in rejects_of(prepared(folder, memory_root, duplicates="keep"))} == set(kept)
    (folder / "test/cat/d.png").write_bytes(picture(78))
    corpus = prepared(folder, memory_root, duplicates="keep")
    assert not rejects_of(corpus)


def test_a_source_that_changes_during_the_preparation_is_an_error(folder, picture, request_for, memory_root):
    def changing(work, tasks):
        results = [work(task) for task in tasks]
        (folder / "cat/000.jpg").write_bytes(picture(4242))
        return iter(results)

    with pytest.raises(RuntimeError, match=r"cat/000.jpg.*changed after it was examined"):
        job.prepare([request_for(folder)], memory_root, Elsewhere(changing))


def test_a_folder_without_images_is_an_error(tmp_path, request_for, memory_root):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "empty" / "notes.txt").write_text("nothing here")
    with pytest.raises(ValueError, match="no labelled image among the 1 files"):
        job.prepare([request_for(tmp_path / "empty")], memory_root)


@pytest.mark.parametrize("kind", ["folder", "tar", "gztar", "zip"])
def test_file_above_the_size_limit_is_refused_with_its_size(tmp_path, picture, request_for, memory_root, kind):
    sizes, tree = {}, tmp_path / "tree"
    for i in range(12):
        data = picture(i, (400, 300)) if i == 7 else picture(i)
        (tree / "cat").mkdir(exist_ok=True, parents=True)
        (tree / "cat" / f"{i}.jpg").write_bytes(data)
        sizes[i] = len(data)
    decode = {"max_bytes": max(size for i, size in sizes.items() if i != 7)}
    source = tree if kind == "folder" else shutil.make_archive(str(tmp_path / "packed"), kind, tree)
    request = request_for(source, decode=decode)
    (manifest,) = job.prepare([request], memory_root)
    assert manifest.counts.refused == {"too_many_bytes": 1}
    corpus = corpus_store(open_store(memory_root), request)
    (refused,) = pq.read_table(corpus.open("rejects.parquet")).to_pylist()
    assert refused["detail"] == f"{sizes[7]:,} bytes, limit {decode['max_bytes']:,}"


def test_the_version_depends_on_the_content_of_the_corpus(folder, picture, request_for, memory_root):
    request = request_for(folder)
    root = open_store(memory_root)
    assert corpus_version(root, request) == corpus_version(root, request_for(folder, examples_per_chunk=3))
    assert corpus_version(root, request) != corpus_version(root, request_for(folder, val_fraction=0.2))
    before = corpus_version(root, request)
    (folder / "cat/new.jpg").write_bytes(picture(6))
    assert corpus_version(root, request) != before


def test_new_setting_at_its_default_does_not_change_the_version(tmp_path, request_for, memory_root):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"x")
    os.utime(tmp_path / "cat/1.jpg", ns=(1, 1))
    request, root = request_for(tmp_path), open_store(memory_root)
    assert corpus_version(root, request) == "2504299a8799"
    assert corpus_version(root, replace(request, **{"source.top_folders": "classes"})) != "2504299a8799"


@pytest.mark.parametrize(
    ("row_group_bytes", "rows", "groups_per_shard"),
    [
        # 16 groups allow no more than 90 // 16 = 5 rows; 5 rows are 3,500 to 4,000 bytes, so 4 groups fit in 16,000.
        (100_000, 5, 4),
        # 2,300 bytes hold 2 rows; 2 rows are 1,400 to 1,600 bytes, so 10 or 11 groups fit in 16,000.
        (2_300, 2, (10, 11)),
    ],
)
def test_row_group_and_shard_sizes_match_hand_computed_values(
    fill_folder, prepared, tmp_path, memory_root, row_group_bytes, rows, groups_per_shard
):
    folder = fill_folder(tmp_path / "p", per_class=30)
    sharding = ShardingConfig(row_group_bytes=row_group_bytes, min_row_groups=16, shard_bytes=16_000)
    corpus = prepared(folder, memory_root, val_fraction=0.0, test_fraction=0.0, sharding=sharding)
    manifest = load_manifest(corpus)
    assert 700 < manifest.counts.num_bytes / 90 < 800
    (train,) = manifest.splits.values()
    assert (train.num_rows, train.rows_per_row_group, train.num_row_groups) == (90, rows, 90 // rows)
    assert train.row_groups_per_shard in np.atleast_1d(groups_per_shard)
    keys = corpus.list("train/")
    assert len(keys) == train.segments[0].num_shards == -(-train.num_row_groups // train.row_groups_per_shard)
    for i, key in enumerate(keys):
        metadata = pq.ParquetFile(corpus.open(key)).metadata
        assert metadata.num_rows == train.shard_rows(train.segments[0], i)
        assert {metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)} == {rows}


def test_progress_and_report_are_written_to_the_store(folder, picture, prepared, memory_root):
    add_bad_files(folder, picture)
    (folder / "cat" / "<script>.jpg").write_bytes(b"no picture")
    corpus = prepared(folder, memory_root)
    progress = corpus.read_json("_work/progress.json")
    assert (progress["stage"], progress["done"], progress["total"]) == ("publish", 1, 1)
    assert progress["refused"] == 9
    assert progress.keys() >= {"unit", "rate", "images_per_s", "bytes_per_s", "started_at"}
    report = corpus.read("report.html").decode()
    assert report.startswith("<!doctype html>")
    assert report.count("data:image/") >= 3 * 6
    assert "truncated" in report
    assert "dog/half.jpg" in report
    assert "&lt;script&gt;.jpg" in report
    for outside in ("<script", "http://", "https://", "<link"):
        assert outside not in report


@pytest.mark.slow
@pytest.mark.parametrize(("left_over", "known"), [(1, False), (20, True)])
def test_the_time_of_examining_is_not_extrapolated_from_few_chunks(folder, request_for, memory_root, left_over, known):
    request = request_for(folder, examples_per_chunk=1)
    (manifest,) = job.prepare([request], memory_root)
    corpus = corpus_store(open_store(memory_root), request)
    records = sorted(key for key in corpus.list() if "/records-" in key)
    assert len(records) > 40
    for key in ["manifest.json", *records[:left_over]]:
        corpus.delete(key)
    assert job.prepare([request], memory_root)[0].digest == manifest.digest
    assert (corpus.read_json("_work/progress.json")["examine_s"] is not None) == known


@pytest.fixture
def table_with(tmp_path, picture):
    """table_with(n, *locations, roots): a request for a table of n images on this disk and of images at other locations, which
    are read below `roots`."""

    def make(num_local, *other_locations, roots):
        for i in range(num_local):
            (tmp_path / f"{i}.jpg").write_bytes(picture(i))
        locations = [*(f"{i}.jpg" for i in range(num_local)), *other_locations]
        rows = "".join(f"{location},{'ab'[i % 2]}\n" for i, location in enumerate(locations))
        (tmp_path / "table.csv").write_text(f"image,labels\n{rows}")
        return CorpusConfig(
            name="table",
            source=LabelTable(path=str(tmp_path / "table.csv"), single_label=True, allowed_roots=roots),
            recipe=CorpusRecipe(val_fraction=0, test_fraction=0),
            execution={"max_refused_fraction": 0.5},
        )

    return make


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3_store._filesystem.cache_clear()
    yield
    s3_store._filesystem.cache_clear()


def test_a_row_without_access_is_refused_and_the_others_are_prepared(table_with, memory_root, no_credentials):
    locations = ("s3://somebody-elses/x.jpg", "s3:///no-bucket.jpg", "s3://Not a bucket!/x.jpg", "/etc/passwd")
    request = table_with(6, *locations, roots=("s3://somebody-elses", "/etc"))
    (manifest,) = job.prepare([request], memory_root)
    assert manifest.counts.num_accepted == 6
    details = {row["example_id"]: row["detail"] for row in rejects_of(corpus_store(open_store(memory_root), request))}
    assert details["s3://somebody-elses/x.jpg"].startswith(
        "no access to s3://somebody-elses/x.jpg: Unable to locate cred"
    )
    assert "is not a valid bucket name" in " ".join(details.values())
    assert details["/etc/passwd"].endswith("bytes in no known image format")


def test_job_without_access_to_any_image_fails_and_the_next_one_reads_them_again(
    table_with, memory_root, no_credentials, monkeypatch, picture
):
    request = table_with(0, *(f"s3://bucket/{i}.jpg" for i in range(3)), roots=("s3://bucket",))
    with pytest.raises(
        ValueError, match=r"no image could be read; 3 are unreadable.*no access to s3://bucket.*credentials"
    ):
        job.prepare([request], memory_root)
    monkeypatch.setattr(s3_store.S3Store, "read", lambda self, key, *_: picture(int(key[0])))
    monkeypatch.setattr(s3_store.S3Store, "read_into", _read_into)
    (manifest,) = job.prepare([request], memory_root)
    assert (manifest.counts.num_accepted, manifest.counts.num_refused) == (3, 0)


def _read_into(self, key, start, buffer):
    data = self.read(key)[start:]
    buffer[: len(data)] = data
    return len(data)
