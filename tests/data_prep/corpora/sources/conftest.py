"""Stores in which sources are tested: on disk and in memory."""

import uuid

import pytest

from vitline.data_prep.sources.raw import FetchUnavailable
from vitline.infra.storage import Store, open_store


@pytest.fixture
def memory() -> Store:
    """An empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["file", "memory"])
def folder(request, tmp_path) -> Store:
    """An empty store for the source."""
    return open_store(tmp_path / "source") if request.param == "file" else request.getfixturevalue("memory")


@pytest.fixture(scope="session")
def drawn_cache(request):
    """Gives the URI of a cache that holds the real images of a drawn corpus: pytest's cache, filled by npm at first use."""
    uri = str(request.config.cache.mkdir("vitline-sources"))

    def cache_of(corpus) -> str:
        try:
            corpus.files(open_store(uri))
        except FetchUnavailable as error:
            pytest.skip(f"the {corpus.name} cannot be fetched: {error}")
        return uri

    return cache_of
