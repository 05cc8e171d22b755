"""Reasons for not publishing a corpus, and their messages: losses of unknown size, too many refused images, nothing left."""

import gzip
import io
import tarfile

import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare import job
from vitline.infra.config import replace
from vitline.infra.storage import open_store

from ...tars import tar_of


@pytest.fixture
def tar_of_classes(picture):
    """The bytes of a tar with `per_class` images in each of four class folders."""

    def make(per_class=10):
        return tar_of({f"{'abcd'[c]}/{i:02d}.jpg": picture(100 * c + i) for c in range(4) for i in range(per_class)})

    return make


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_a_truncated_archive_is_published_only_on_request(kind, tar_of_classes, request_for, tmp_path, memory_root):
    whole = tar_of_classes()
    cut = {"tar": whole[: len(whole) // 2], "tar.gz": gzip.compress(whole, 0)[: len(whole) // 2], "zip": b""}[kind]
    if kind == "zip":
        cut = zip_without_its_last_entries(whole)
    (tmp_path / f"a.{kind}").write_bytes(cut)
    request = request_for(tmp_path / f"a.{kind}", max_refused_fraction=0.5)
    with pytest.raises(
        ValueError,
        match=rf"unknown number of images is missing.*/a\.{kind} at byte .*execution.uncounted_losses=accept",
    ):
        job.prepare([request], memory_root)
    accepting = replace(request, **{"execution.uncounted_losses": "accept"})
    (manifest,) = job.prepare([accepting], memory_root)
    assert manifest.counts.refused == {"uncounted_loss": 1}
    report = corpus_store(open_store(memory_root), request).read("report.html").decode()
    assert "1 file could not be read to its end" in report
    with pytest.raises(ValueError, match=r"is prepared already.*execution.uncounted_losses=accept"):
        job.prepare([request], memory_root)


def zip_without_its_last_entries(tar):
    """A zip of the members of a tar, with one entry fewer in its directory than the directory states."""
    import zipfile

    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive, zipfile.ZipFile(out, "w") as packed:
        for member in archive:
            packed.writestr(member.name, archive.extractfile(member).read())
    data = bytearray(out.getvalue())
    data[-22 + 10] -= 1
    return bytes(data)


def test_too_many_refused_images_are_an_error_with_reasons_list_and_option(
    fill_folder, request_for, tmp_path, memory_root
):
    folder = fill_folder(tmp_path / "p", per_class=8)
    for i in range(6):
        (folder / f"cat/x{i}.jpg").write_bytes(b"")
        (folder / f"dog/y{i}.jpg").write_bytes(b"no picture" * (i + 1))
    request = request_for(folder)
    with pytest.raises(ValueError, match="nothing is published") as raised:
        job.prepare([request], memory_root)
    message = str(raised.value)
    assert "12 of 36 images are refused (empty 6, not_an_image 6)" in message
    assert "empty (" in message
    assert "not_an_image (" in message
    assert "--set execution.max_refused_fraction=0.34" in message
    assert all(key.startswith("_work/") for key in corpus_store(open_store(memory_root), request).list())
    where = message.partition("All are listed in ")[2].partition("/*.parquet")[0]
    listed = [key for key in open_store(where).list() if key.endswith(".parquet")]
    assert sum(len(pq.read_table(open_store(where).open(key))) for key in listed) == 12


def test_wrong_label_column_is_reported_instead_of_bad_images(picture, tmp_path, memory_root):
    for i in range(10):
        (tmp_path / f"{i}.jpg").write_bytes(picture(i))
    lines = ["image,labels,other", *(f"{i}.jpg,,x" for i in range(10))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    request = CorpusConfig(name="t", source=LabelTable(path=str(tmp_path / "t.csv")))
    with pytest.raises(ValueError, match=r"Most have no label. Correct source.labels_column \('labels'\)"):
        job.prepare([request], memory_root)


def test_a_stricter_limit_applies_to_a_prepared_corpus(fill_folder, request_for, tmp_path, memory_root):
    folder = fill_folder(tmp_path / "p", per_class=10)
    for i in range(2):
        (folder / f"cat/x{i}.jpg").write_bytes(b"")
    job.prepare([request_for(folder)], memory_root)
    job.prepare([request_for(folder, max_refused_fraction=0.07)], memory_root)
    with pytest.raises(
        ValueError, match=r"is prepared already, but 2 of 32 .*empty 2.*0\.01.*max_refused_fraction=0\.07"
    ):
        job.prepare([request_for(folder, max_refused_fraction=0.01)], memory_root)


@pytest.mark.parametrize(
    ("recipe", "cause"),
    [
        (
            {"min_images_per_class": 100},
            r"small_class 36.*min_images_per_class is 100, but the largest class, '\S+', has 12 images",
        ),
        ({"class_map": "MAP"}, r"unknown_class 36.*classes\.txt contains none of their labels: .*'wolf'.*'cat'"),
        (
            {"val_fraction": 0.5, "test_fraction": 0.499999},
            r"All 36 remaining images are in val and test.*lower val_fraction",
        ),
    ],
)
def test_error_names_the_cause_if_no_image_is_left(recipe, cause, fill_folder, request_for, tmp_path, memory_root):
    (tmp_path / "classes.txt").write_text("wolf\nlynx\n")
    given = {name: str(tmp_path / "classes.txt") if value == "MAP" else value for name, value in recipe.items()}
    folder = fill_folder(tmp_path / "p", per_class=12)
    with pytest.raises(ValueError, match=cause):
        job.prepare([request_for(folder, **given)], memory_root)
