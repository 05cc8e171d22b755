"""Stores in which sources are tested: on disk and in memory."""

import uuid

import pytest

from infra.storage import Store, open_store


@pytest.fixture
def memory() -> Store:
    """An empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["file", "memory"])
def folder(request, tmp_path) -> Store:
    """An empty store for the source."""
    return open_store(tmp_path / "source") if request.param == "file" else request.getfixturevalue("memory")
