"""WebDataset tars, as the webdataset library writes and reads them."""

import json
import tarfile
import uuid

import pytest

from vitline.data_prep.config import CorpusRecipe, WebDataset
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.sources import webdataset
from vitline.data_prep.sources.raw import WorkFolder
from vitline.data_prep.sources.webdataset import WebDatasetCorpus
from vitline.infra.storage import StoreFailed, open_store

from ....tars import tar_of


def corpus(folder, path="", recipe=None, **source):
    return WebDatasetCorpus(WebDataset(path=f"{folder.uri}/{path}".rstrip("/"), **source), recipe or CorpusRecipe())


def refusals(rows):
    return {row[0]: row[6] for row in rows if row[6]}


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_tars_written_by_webdataset_are_read_as_webdataset_reads_them(folder, tmp_path, ending, monkeypatch, read):
    wds = pytest.importorskip("webdataset")
    samples = [{"__key__": f"deep/{i:03d}", "jpg": bytes([i]) * (i * 100 + 1), "cls": i % 12} for i in range(20)]
    samples[3] |= {"json": {"a": 1}, "seg.png": b"no image of it"}
    for name, some in (("train/a", samples[:12]), ("train/b", samples[12:18]), ("val/c", samples[18:])):
        path = tmp_path / f"written.{ending}"
        with wds.TarWriter(str(path), encoder=True) as writer:
            for sample in some:
                writer.write(sample)
        folder.write(f"{name}.{ending}", path.read_bytes())
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path.rename(tmp_path / f"{name}.{ending}")
    rows = read(corpus(folder))
    reference = [
        (f"{name}.{ending}!{sample['__key__']}", sample["jpg"], int(sample["cls"]))
        for name in ("train/a", "train/b", "val/c")
        for sample in wds.WebDataset(str(tmp_path / f"{name}.{ending}"), shardshuffle=False)
    ]
    assert [(row[0], row[5], int(row[1][0])) for row in rows] == reference
    assert len(rows) == 20
    assert {row[7].startswith("spill/") for row in rows} == {ending == "tar.gz"}
    assert {row[0] for row in rows if row[4] == "val"} == {f"val/c.{ending}!deep/018", f"val/c.{ending}!deep/019"}
    assert corpus(folder).class_info("000011").name == "11"
    # divided into stretches, between examples
    monkeypatch.setattr(webdataset, "_LARGEST_WHOLE_BYTES", 0)
    for examples_per_part in (1, 5):
        assert read(corpus(folder), examples_per_part) == rows
    num_parts = len([*corpus(folder).parts(WorkFolder(folder, folder, 5))])
    assert num_parts == (6 if ending == "tar" else 3)


def test_labels_are_read_from_text_and_json(memory, read):
    metadata = {"meta": {"tags": ["ünï", "b", "ünï"]}, "label": 7, "a.b": "dotted"}
    data = tar_of(
        [("1.png", b"p"), ("1.JSON", json.dumps(metadata).encode()), ("1.txt", b" big cat\n"), ("1.cls", b"x")]
    )
    memory.write("x.tar", data)

    def labels(**source):
        return read(corpus(memory, "x.tar", **source))[0][1]

    assert labels(label_key="json", label_field="meta.tags", single_label=False) == ("ünï", "b")
    assert labels(label_key="json") == ("000007",)
    assert labels(label_key="json", label_field="a.b") == ("dotted",)
    assert labels(label_key="txt") == ("big cat",)
    assert labels() == ("x",)
    assert refusals(read(corpus(memory, label_key="json", label_field="meta.tags")))["x.tar!1.png"][0] == "no_label"


def test_files_that_are_not_examples_are_refused_with_a_reason(memory, read):
    link, folder = tarfile.TarInfo("7.jpg"), tarfile.TarInfo("dir")
    link.type, link.linkname, folder.type = tarfile.SYMTYPE, "1.jpg", tarfile.DIRTYPE
    members = [
        (folder, b""),
        ("__meta__/1.jpg", b""),
        ("._1.jpg", b""),
        ("README", b""),
        ("1.jpg", b"first"),
        ("1.JPG", b"second"),
        ("1.cls", b"1"),
        ("2.jpg", b"no label"),
        ("3.cls", b"1"),
        ("4.jpg", b"x"),
        ("4.cls", b"\xff"),
        ("5.v2.jpg", b"the key is 5.v2"),
        ("5.cls", b"1"),
        ("6.jpg", b"x" * 101),
        ("6.cls", b"1"),
        (link, b""),
        ("../8.jpg", b"x"),
        ("9.jpg", b"of a label that stands apart"),
        ("10.jpg", b"ok"),
        ("10.cls", b"2"),
        ("9.cls", b"1"),
        ("11.jpg", b"x"),
        ("11.cls", b"-1"),
    ]
    memory.write("x.tar", tar_of(members))
    recipe = CorpusRecipe(decode=DecodePolicy(max_bytes=100))
    rows = read(corpus(memory, recipe=recipe))
    assert [(row[0], row[5]) for row in rows if not row[6]] == [
        ("x.tar!1", b"first"),
        ("x.tar!10", b"ok"),
        ("x.tar!9", b"of a label that stands apart"),
    ]
    refused = {name.removeprefix("x.tar!"): reason for name, (reason, _) in refusals(rows).items()}
    assert refused == {
        **dict.fromkeys(("__meta__/1.jpg", "._1.jpg", "README", "1.JPG", "7.jpg"), "ignored_file"),
        **dict.fromkeys(("2.jpg", "4.jpg", "5.v2.jpg", "11.jpg"), "no_label"),
        **dict.fromkeys(("3.cls", "5.cls"), "unreadable"),
        "6.jpg": "too_many_bytes",
        "../8.jpg": "unsafe_path",
    }
    assert refusals(rows)["x.tar!5.v2.jpg"][1] == "no cls file: the example has jpg"


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_damaged_tar_loses_only_what_follows_the_damage(memory, ending, read):
    members = [(f"{i}.{kind}", b"%d" % i * size) for i in range(10) for kind, size in (("jpg", 3000), ("txt", 1))]
    data = tar_of(members, mode="w" if ending == "tar" else "w:gz")
    memory.write(f"x.{ending}", data[: len(data) // 2])
    memory.write(f"y.{ending}", tar_of({"1.jpg": b"x", "1.txt": b"y"}, mode="w" if ending == "tar" else "w:gz"))
    rows = read(corpus(memory, label_key="txt"))
    assert "uncounted_loss" in {reason for reason, _ in refusals(rows).values()}
    good = [row[0] for row in rows if not row[6]]
    assert good[-1] == f"y.{ending}!1"
    if ending == "tar":
        assert good[:-1] == [f"x.tar!{i}" for i in range(5)]


def test_an_unreadable_tar_is_refused_and_a_failing_store_raises(tmp_path, monkeypatch):
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(tar_of({"1.jpg": b"x", "1.cls": b"1"}))
    source, work = corpus(open_store(tmp_path)), open_store(f"memory://{uuid.uuid4().hex}")
    work = WorkFolder(work, work, 512)
    gone, there = source.parts(work)
    (tmp_path / "a.tar").unlink()
    assert [e.refused[0] for e in source.examples(gone, work)] == ["uncounted_loss"]
    assert [e.refused for e in source.examples(there, work)] == [None]

    def fail(*_):
        raise StoreFailed("503")

    monkeypatch.setattr(type(open_store(tmp_path)), "read", fail)
    with pytest.raises(StoreFailed, match="503"):
        list(source.examples(there, work))


def test_sources_that_are_not_webdatasets_are_errors_with_the_next_step(memory, read):
    with pytest.raises(ValueError, match=r"patterns in braces are not supported\. Give the folder"):
        corpus(memory, "train-{0000..0012}.tar")
    with pytest.raises(ValueError, match=r"with files named \*\.tar"):
        list(corpus(memory).parts(WorkFolder(memory, memory, 1)))
    memory.write("a.tar", tar_of({"1.jpg": b"x"}))
    first = corpus(memory).fingerprint()
    memory.write("b.tar", tar_of({}))
    assert corpus(memory).fingerprint() != first
    assert [row[0] for row in read(corpus(memory))] == ["a.tar!1.jpg"]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_keys_have_dots_and_their_files_stand_apart(memory, read, mode, monkeypatch):
    keys = [f"cam.{i:03d}" for i in range(20)] + ["2024.01.05", "v1", "v1.2", "v1.10"]
    images = [(f"{key}.png", key.encode()) for key in keys] + [
        ("v1.mask.png", b"m"),
        ("v1.seg.jpg", b"s"),
        ("v1.3.png", b"?"),
    ]
    labels = [(f"{key}.cls", b"%d" % (number % 2)) for number, key in enumerate(keys)]
    name = "x.tar" if mode == "w" else "x.tar.gz"
    together = sorted([*images, *labels, ("v1.jpg", b"preferred"), ("v1.json", b"{}")])
    for members in (images + labels, labels + images, together):
        memory.write(name, tar_of(members, mode=mode))
        rows = read(corpus(memory, name))
        found = {row[0].partition("!")[2]: (row[5], row[1][0]) for row in rows if not row[6]}
        assert found.keys() == {*keys}
        assert found["cam.007"] == (b"cam.007", "000001")
        refused = {key.partition("!")[2]: reason for key, (reason, _) in refusals(rows).items()}
        assert refused == {"v1.3.png": "no_label"} | ({"v1.png": "ignored_file"} if members is together else {})
    monkeypatch.setattr(webdataset, "_LARGEST_WHOLE_BYTES", 0)
    assert read(corpus(memory, name), 5) == rows
    memory.write(name, tar_of([*images, *labels], mode))
    assert len([row for row in read(corpus(memory, name), 5) if not row[6]]) == len(keys)
    if mode == "w:gz":  # bytes that cannot be read again are held up to a limit
        monkeypatch.setattr(webdataset, "_MOST_WAITING_BYTES", 60)
        assert {row[6][0] for row in read(corpus(memory, name)) if row[6]} == {"no_label", "unreadable"}
