"""Prepared corpora by name."""

import pytest

from vitline.data_prep import find_corpus
from vitline.infra.storage import open_store


@pytest.fixture
def read(monkeypatch):
    """The names of the corpora whose manifests were read."""
    names, load = [], find_corpus.load_manifest

    def noted(store):
        names.append(store.uri.split("/")[-2])
        return load(store)

    monkeypatch.setattr(find_corpus, "load_manifest", noted)
    return names


def test_a_corpus_is_found_by_name_and_version_without_reading_others(two_corpora, read):
    root = open_store(two_corpora)
    city = find_corpus.prepared_corpus(root, "city").store
    name, version = city.uri.split("/")[-2:]
    assert name == "city"
    assert find_corpus.prepared_corpus(root, f"city/{version}").store.uri == city.uri
    assert read == ["city", "city"]


@pytest.mark.parametrize("name", ["citty", "../birds", "/etc", ".", ""])
def test_an_unknown_name_lists_what_there_is(two_corpora, name):
    with pytest.raises(ValueError, match=r"There is no corpus .* `vitline data prep` prepares one"):
        find_corpus.prepared_corpus(open_store(two_corpora), name)
