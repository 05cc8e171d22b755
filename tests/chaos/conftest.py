"""Benches to try faults on: a folder or a place on S3 with the tiny corpus, and what the training gives undisturbed."""

import itertools

import pytest

from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from .bench import Bench

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("chaos"))
    return Bench(Settings(root=root), open_store(root))


@pytest.fixture
def fresh(bench):
    """The bench with a place of its own, and the corpus and undisturbed result of the shared one."""
    fresh = Bench(bench.settings, bench.place.child(f"broken-{next(_NUMBERS)}"))
    fresh.__dict__ |= {"corpus": bench.corpus, "undisturbed": bench.undisturbed}
    return fresh


@pytest.fixture
def s3_bench(s3_uri):
    return Bench(Settings(root=s3_uri), open_store(s3_uri))
