"""Links in sources: an image belongs to where its file is, a link is a copy of it, and none leads out of the source."""

import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusConfig, LabelTable, ParquetImages, WebDataset
from vitline.data_prep.find_corpus import corpus_version
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.sources.open_source import open_source
from vitline.infra.config import replace
from vitline.infra.storage import open_store


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_an_image_belongs_to_where_it_is(kind, fill_folder, prepared, memory_root, tmp_path):
    source = fill_folder(tmp_path / "src", per_class=8, classes=("a", "b"))
    (source / "a/tob").symlink_to("../b")
    (source / "a/000-b.jpg").symlink_to("../b/000.jpg")
    (source / "a/only.jpg").symlink_to("../.kept.jpg")
    (source / "b/001.jpg").rename(source / ".kept.jpg")
    if kind == "tar":
        with tarfile.open(tmp_path / "src.tar", "w") as archive:
            archive.add(source, arcname=".")
        source = tmp_path / "src.tar"
    corpus = prepared(source, memory_root, val_fraction=0, test_fraction=0)
    assert [each["name"] for each in corpus.read_json("classes.json")["classes"]] == ["a", "b"]
    with corpus.open("rejects.parquet") as file:
        kept = {
            row["example_id"]: row["kept_id"] for row in pq.read_table(file).to_pylist() if row["reason"] == "duplicate"
        }
    copies = {f"a/tob/{i:03d}.jpg": f"b/{i:03d}.jpg" for i in (0, 2, 3, 4, 5, 6, 7)}
    assert kept == {**copies, "a/000-b.jpg": "b/000.jpg"}


def written(kind, folder, picture):
    """A file of a source of this kind with images, and the config of the source for a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "webdataset":
        with tarfile.open(folder / "a.tar", "w") as archive:
            for i in range(4):
                for ending, data in (("jpg", picture(i)), ("cls", b"1")):
                    (folder / "member").write_bytes(data)
                    archive.add(folder / "member", arcname=f"{i}.{ending}")
        return folder / "a.tar", WebDataset
    if kind == "table":
        (folder / "0.jpg").write_bytes(picture(0))
        (folder / "a.csv").write_text("image,labels\n0.jpg,x\n")
        return folder / "a.csv", LabelTable
    pq.write_table(pa.table({"image": [picture(i) for i in range(4)], "label": [0, 1, 0, 1]}), folder / "a.parquet")
    return folder / "a.parquet", ParquetImages


@pytest.mark.parametrize("kind", ["parquet", "webdataset", "table"])
def test_links_out_of_a_source_are_an_error(kind, picture, tmp_path, memory_root):
    (tmp_path / "src").mkdir()
    file, config = written(kind, tmp_path / "private", picture)
    (tmp_path / "src" / f"link{file.suffix}").symlink_to(file)
    request = CorpusConfig(name="x", source=config(path=str(tmp_path / "src")))
    with pytest.raises(
        ValueError, match=rf"is a link to {file}, outside of the source.*source.allowed_roots=\[.*private"
    ):
        prepare([request], memory_root)
    allowed = replace(request, **{"source.allowed_roots": (str(tmp_path / "private"),)})
    assert corpus_version(open_store(memory_root), allowed)
    (tmp_path / "src/more").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"'more' in .* is a link to .*Links to folders are not followed"):
        open_source(allowed).fingerprint()
    (tmp_path / f"named{file.suffix}").symlink_to(file)
    named = CorpusConfig(name="x", source=config(path=str(tmp_path / f"named{file.suffix}")))
    assert open_source(named).fingerprint()  # the request names the link itself
