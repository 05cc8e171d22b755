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


def test_what_was_listed_or_read_is_not_asked_for_again(two_corpora, read, monkeypatch):
    root, listed = open_store(two_corpora), []
    list_keys = type(root).list
    monkeypatch.setattr(type(root), "list", lambda store, prefix="": listed.append(prefix) or list_keys(store, prefix))
    corpora = find_corpus.Corpora(root)
    found = [corpora.find("city"), corpora.find("city")]
    found += [corpora.find(f"city/{found[0].manifest.version}"), corpora.at(found[0].store.uri)]
    assert {id(each) for each in found} == {id(corpora.opened[found[0].store.uri])}
    assert read == ["city"]
    assert listed == ["corpora/city/", f"corpora/city/{found[0].manifest.version}/"]
    assert [each.manifest.name for each in corpora.all(pytest.fail)] == ["birds", "city"]
    assert read == ["city", "birds"]


@pytest.mark.parametrize("name", ["citty", "../birds", "/etc", ".", ""])
def test_an_unknown_name_lists_what_there_is(two_corpora, name):
    with pytest.raises(ValueError, match=r"There is no corpus .* `vitline data prepare` prepares one"):
        find_corpus.prepared_corpus(open_store(two_corpora), name)
