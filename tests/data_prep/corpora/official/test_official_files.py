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
    assert len(module._tables()) == 28
    for data_set in module._tables():
        names = [name for file in official_files(data_set).files for name in (file.name, *file.other_names)]
        assert len(set(names)) == len(names)
