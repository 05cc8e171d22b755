"""Corpora of two pipelines: what the page says of versions that differ."""

from pathlib import Path

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.reports.comparison import corpora
from vitline.flows.reports.comparison.corpora import corpora_by_digest, corpus_changes
from vitline.infra.storage import open_store

from ....pictures import blurred


@pytest.fixture
def versions(root, tmp_path):
    """Pipelines on two versions of the corpus `birds`: of two images, one is gone, and one has come; one is of another class."""
    folder: Path = tmp_path / "birds"

    def record(key):
        request = CorpusConfig(name="birds", source=ClassFolders(path=str(folder)))
        prepare([request], root)
        digest = load_manifest(corpus_store(open_store(root), request)).digest
        corpora = {"birds": digest, "task": "0" * 64}
        return PipelineRecord(key=key, name=key, request={}, started_at=0, updated_at=0, corpora=corpora)

    for label, number in (("jay", 1), ("jay", 2), ("jay", 3), ("owl", 4), ("owl", 5)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{number}.jpg").write_bytes(blurred(number))
    first = record("first")
    (folder / "jay" / "1.jpg").unlink()
    (folder / "owl" / "6.jpg").write_bytes(blurred(6))
    (folder / "wren").mkdir()
    (folder / "wren" / "7.jpg").write_bytes(blurred(7))
    return first, record("second")


def test_examples_and_classes_that_differ_are_named_once_for_each_corpus(root, versions, monkeypatch):
    store, (first, second) = open_store(root), versions
    assert not [*corpus_changes(corpora_by_digest(store), first, first)]
    (change,) = corpus_changes(corpora_by_digest(store), first, second)
    assert "4 examples are in both, 2 added, 1 removed" in change.sentence
    assert ["classes", "2", "3"] in change.rows
    assert "digest" not in [row[0] for row in change.rows]
    monkeypatch.setattr(corpora, "MAX_ROWS", 3)
    (change,) = corpus_changes(corpora_by_digest(store), first, second)
    assert "5 rows are in shards of one of both; `vitline data diff birds/" in change.sentence


def test_a_corpus_that_is_gone_or_damaged_is_said_so(root, versions):
    store, (first, second) = open_store(root), versions
    for key in store.list("corpora/birds/"):
        if key.endswith("stats.json"):
            store.delete(key)
    (change,) = corpus_changes(corpora_by_digest(store), first, second)
    assert "they cannot be compared." in change.sentence
    assert "has no stats.json" in change.sentence
    for key in store.list("corpora/birds/"):
        if key.endswith("manifest.json"):
            store.delete(key)
    (change,) = corpus_changes(corpora_by_digest(store), first, second)
    assert change.sentence == "birds: another version, but one of both is no longer there to compare."
