import pytest

from vitline.data_prep.benchmarks import official_files as module
from vitline.data_prep.benchmarks.official_files import OfficialFile, official_files


def test_a_data_set_has_its_files_as_the_table_lists_them():
    pets = official_files("pets")
    assert (pets.title, pets.terms) == ("Oxford-IIIT Pet", "CC BY-SA 4.0")
    assert pets.files[1] == OfficialFile(
        name="annotations.tar.gz",
        num_bytes=19_173_078,
        sha256="52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
        other_names=("annotations/",),
    )


def test_every_table_is_valid_and_names_each_file_once():
    assert len(module._tables()) == 20
    for data_set in module._tables():
        names = [name for file in official_files(data_set).files for name in (file.name, *file.other_names)]
        assert len(set(names)) == len(names)


def test_a_data_set_without_a_table_is_refused_with_the_names_of_the_tables():
    with pytest.raises(ValueError, match=r"has no table \[dog\]; add it\. The data sets are caltech101, "):
        official_files("dog")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"files": [{"name": "a.zip", "sha256": "0f"}]}, "files.0.sha256"),
        ({"files": [{"name": "a.zip", "bytes": 1}]}, "files.0.bytes"),
        ({"files": []}, "files"),
        ({"files": [{"name": "a.zip"}], "licence": "MIT"}, "licence"),
    ],
)
def test_a_table_with_a_wrong_entry_is_refused_with_its_name_and_the_entry(monkeypatch, wrong, field):
    monkeypatch.setattr(module, "_tables", lambda: {"dog": {"title": "Dog", "home": "x", "terms": "x", **wrong}})
    with pytest.raises(ValueError, match=rf"table \[dog\]: (?s:.*)\n{field}\n"):
        official_files("dog")
