"""Small real folders of images, and corpora prepared from them in this process."""

import os
import uuid

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, ShardingConfig
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.storage import open_store

from ..pictures import blurred


@pytest.fixture(scope="session")
def picture():
    """Bytes of a small image; every seed gives a different one."""
    return blurred


@pytest.fixture(scope="session")
def fill_folder(picture):
    """Writes `per_class` images, with seeds from `first` on, into each of some class folders."""

    def fill(folder, per_class=40, classes=("cat", "dog", "bird/owl"), first=0):
        for c, label in enumerate(classes):
            (folder / label).mkdir(parents=True, exist_ok=True)
            for i in range(per_class):
                (folder / label / f"{i:03d}.jpg").write_bytes(picture(first + 1000 * c + i))
        return folder

    return fill


@pytest.fixture(scope="session")
def request_for():
    """A request for a folder, with shards so small that there are several."""

    def make(folder, *, links="follow", examples_per_chunk=16, max_refused_fraction=0.1, sort_bytes=1 << 20, **recipe):
        sharding = ShardingConfig(row_group_bytes=4_000, min_row_groups=8, shard_bytes=16_000)
        return CorpusConfig(
            name="folder",
            source=ClassFolders(path=str(folder), links=links),
            recipe=CorpusRecipe(**{"sharding": sharding, **recipe}),
            execution={
                "examples_per_chunk": examples_per_chunk,
                "max_refused_fraction": max_refused_fraction,
                "sort_bytes": sort_bytes,
            },
        )

    return make


@pytest.fixture
def memory_root():
    return f"memory://test-{os.getpid()}-{uuid.uuid4().hex}"


@pytest.fixture
def prepared(request_for):
    """Prepares a folder in this process and gives the store of the corpus."""

    def make(folder, root, **options):
        request = request_for(folder, **options)
        prepare([request], root)
        return corpus_store(open_store(root), request)

    return make


@pytest.fixture(scope="session")
def shared_corpus(fill_folder, request_for, tmp_path_factory):
    """A corpus of 120 images in 3 classes, in memory, for tests that only read."""
    request = request_for(fill_folder(tmp_path_factory.mktemp("pictures")))
    root = f"memory://shared-{uuid.uuid4().hex}"
    prepare([request], root)
    return corpus_store(open_store(root), request)
