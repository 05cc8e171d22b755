import uuid
from typing import ClassVar

import pytest

from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import OfficialFile, OfficialFiles
from vitline.data_prep.benchmarks.vtab_data import Found
from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store


class Birds(LabelledArchive):
    """A folder of images, which are texts here."""

    official = OfficialFiles(title="Birds", home="birds.org", terms="none", files=(OfficialFile(name="birds/"),))
    listed: ClassVar = {"train": {"owl": 1, "ibis": 0}, "test": {"auk": 1}}

    def class_names(self):
        return ["small", "large"]

    def labels(self):
        return self.listed

    def key_of(self, path):
        return path.removeprefix("birds/").removesuffix(".jpg") if path.endswith(".jpg") else None

    def made(self, data):
        if data == b"bad":
            raise ImageRejected("corrupt", "bad bytes")
        return data.upper() if data == b"grey" else data


@pytest.fixture
def birds():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for name, data in {
        "owl.jpg": b"Owl",
        "ibis.jpg": b"grey",
        "auk.jpg": b"bad",
        "emu.jpg": b"x",
        "list.txt": b"",
    }.items():
        store.write(f"birds/{name}", data)
    return Birds(store, "birds", 1 << 20)


def test_labelled_images_are_found_with_their_split_and_others_are_left_out(birds):
    work = WorkFolder(birds.store, birds.store.child("work"), 10)
    (part,) = birds.parts(work)
    assert [*Birds(birds.store, "birds", 1 << 20).images(part, work)] == [
        Found("test", "auk", refused=("corrupt", "bad bytes")),
        Found("train", "ibis", 0, b"GREY"),  # another image than the file, so without a place in the store
        Found("train", "owl", 1, b"Owl", ("birds/owl.jpg", 0, 3)),
    ]
    assert birds.keys() == {"train": ["owl", "ibis"], "test": ["auk"]}


def test_a_key_in_two_splits_is_refused(birds):
    birds.listed = {"train": {"owl": 1}, "test": {"owl": 1}}
    with pytest.raises(
        ValueError, match=r"Birds at memory.*: owl is in train and in test\. Download .* from birds\.org"
    ):
        birds.keys()
