"""ImageNet-21k in each of its layouts, in miniature."""

import gzip
import io
import uuid

import pytest
from PIL import Image

from vitline.data_prep.config import CorpusRecipe, ImageNet21k
from vitline.data_prep.decode import decode
from vitline.data_prep.sources.imagenet.imagenet21k import ImageNet21kCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ....tars import tar_of


def opened(path, **recipe):
    return ImageNet21kCorpus(ImageNet21k(path=str(path)), CorpusRecipe(**recipe))


def listed(path, **recipe):
    """Parts, and examples by id, read part by part by workers of their own."""
    work = WorkFolder(open_store("memory://root"), open_store(f"memory://{uuid.uuid4().hex}"), 100)
    parts = list(opened(path, **recipe).parts(work))
    assert len({part.name for part in parts}) == len(parts)
    found = [example for part in parts for example in opened(path, **recipe).examples(part, work)]
    assert len({example.example_id for example in found}) == len(found)
    return parts, {example.example_id: example for example in found}


def located(example):
    return open_store(example.base).read(example.key, example.offset, example.offset + example.length)


def synset_tar(wnid, num_images=2):
    return tar_of({f"{wnid}_{i}.JPEG": jpeg((int(wnid[1:]) + i) % 251) for i in range(num_images)})


def jpeg(level):
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (level, 255 - level, 7)).save(out, "JPEG")
    return out.getvalue()


WNIDS = [f"n{1440764 + i * 7919:08d}" for i in range(1000)]


@pytest.fixture(scope="session")
def synsets():
    """1,000 tars of two images each, by name."""
    return {f"{wnid}.tar": synset_tar(wnid) for wnid in WNIDS}


def test_tar_of_a_thousand_synset_tars_is_read_by_synset(synsets, tmp_path):
    (tmp_path / "fall11_whole.tar").write_bytes(tar_of(synsets))
    parts, found = listed(tmp_path / "fall11_whole.tar", val_fraction=0.1, test_fraction=0.1)
    assert [part.name for part in parts] == WNIDS
    assert len(found) == 2000
    assert {i: e.labels for i, e in found.items()} == {
        f"{wnid}.tar!{wnid}_{i}.JPEG": (wnid,) for wnid in WNIDS for i in range(2)
    }
    for example in found.values():
        assert example.refused is None
        assert located(example) == example.data  # the locator refers to the outer file
    assert decode(located(found[f"{WNIDS[0]}.tar!{WNIDS[0]}_0.JPEG"])).shape == (8, 8, 3)
    shares = [sum(e.split == split for e in found.values()) / 2000 for split in ("train", "val", "test")]
    assert [round(share, 1) for share in shares] == [0.8, 0.1, 0.1]


def test_every_layout_gives_the_same_examples(synsets, tmp_path):
    some = dict(list(synsets.items())[:20])
    below = {f"winter21_whole/{name}": data for name, data in some.items()}
    (tmp_path / "whole.tar").write_bytes(tar_of(some))
    (tmp_path / "winter21_whole.tar").write_bytes(tar_of(below))
    (tmp_path / "winter21_whole.tar.gz").write_bytes(gzip.compress(tar_of(below), 1))
    (tmp_path / "folder").mkdir()
    store = f"memory://{uuid.uuid4().hex}"
    for name, data in some.items():
        (tmp_path / "folder" / name).write_bytes(data)
        open_store(store).write(f"deeper/{name}", data)
    paths = [tmp_path / name for name in ("whole.tar", "winter21_whole.tar", "winter21_whole.tar.gz", "folder")]
    seen = [
        {i: (e.labels, e.split, e.refused, e.data, located(e)) for i, e in listed(path)[1].items()}
        for path in (*paths, store)
    ]
    assert len(seen[0]) == 40
    assert all(other == seen[0] for other in seen[1:])
    prints = [opened(path).fingerprint() for path in (*paths, store)]
    assert prints == [opened(path).fingerprint() for path in (*paths, store)]
    (tmp_path / "folder" / WNIDS[0]).with_suffix(".tar").write_bytes(b"other")
    assert opened(tmp_path / "folder").fingerprint() != prints[3]


@pytest.mark.parametrize("layout", ["tar", "tar.gz", "folder"])
def test_members_that_are_not_synset_tars_are_refused(tmp_path, layout):
    good = synset_tar("n00000001")
    files = {
        "n00000001.tar": good,
        "n00000002.tar": tar_of({}),
        "n00000003.tar": b"",
        "n00000004.tar": good[:700] + b"x" * 400,
        "n00000005.tar": tar_of({"../up.JPEG": b"x", "n00000005_1.JPEG": b"", "readme.txt": b"x", "d/._1.JPEG": b"x"}),
        "n123.tar": good,
        "more/n00000001.tar": good,
        "readme.txt": b"x",
    }
    path = tmp_path / ("folder" if layout == "folder" else f"whole.{layout}")
    for name, data in files.items() if layout == "folder" else ():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    if layout != "folder":
        path.write_bytes(tar_of(files) if layout == "tar" else gzip.compress(tar_of(files)))
    _, found = listed(path)
    kept = "more/n00000001.tar" if layout == "folder" else "n00000001.tar"  # the first, in the order of the source
    second = ({"n00000001.tar", "more/n00000001.tar"} - {kept}).pop()
    refused = {i.split(" ")[0]: e.refused[0] for i, e in found.items() if e.refused}
    assert refused == {
        "n00000002.tar": "damaged_archive",
        "n00000003.tar!(damaged": "uncounted_loss",
        "n00000004.tar!(damaged": "uncounted_loss",
        "n00000005.tar!../up.JPEG": "unsafe_path",
        "n00000005.tar!readme.txt": "ignored_file",
        "n00000005.tar!d/._1.JPEG": "ignored_file",
        "n123.tar": "no_label",
        "readme.txt": "ignored_file",
        second: "damaged_archive",
    }
    assert {i for i, e in found.items() if not e.refused} == {
        *(f"n00000001.tar!n00000001_{i}.JPEG" for i in range(2)),
        "n00000005.tar!n00000005_1.JPEG",
    }


@pytest.mark.parametrize("layout", ["tar", "tar.gz"])
def test_a_truncated_archive_gives_the_synsets_before_the_cut(synsets, tmp_path, layout):
    whole = tar_of({name: synsets[name] for name in list(synsets)[:3]})
    cut = whole[: len(synsets[f"{WNIDS[0]}.tar"]) * 2 + 512 * 3 + 700]  # within the third synset
    (tmp_path / f"a.{layout}").write_bytes(cut if layout == "tar" else gzip.compress(cut))
    _, found = listed(tmp_path / f"a.{layout}")
    good = {i for i, e in found.items() if not e.refused}
    assert {f"{wnid}.tar!{wnid}_{i}.JPEG" for wnid in WNIDS[:2] for i in range(2)} <= good
    assert {e.refused[0] for e in found.values() if e.refused} == {"uncounted_loss"}


def test_a_path_that_is_not_a_source_is_an_error(tmp_path):
    (tmp_path / "pictures.tar").write_bytes(tar_of({"cat/1.jpg": b"x"}))
    with pytest.raises(ValueError, match=r"holds no n########.tar"):
        listed(tmp_path / "pictures.tar")
    with pytest.raises(ValueError, match="does not exist"):
        listed(tmp_path / "missing.tar")
    with pytest.raises(ValueError, match=r"must be a \.tar"):
        opened(tmp_path / "a.zip")
