"""Class maps: files, releases by name, and conversions."""

import hashlib

import pytest

from vitline.data_prep.labels import class_maps
from vitline.data_prep.labels.class_maps import RELEASES, Release, applied, extended, load_class_map, mapping
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.infra.storage import open_store


def map_of(*source_ids):
    return ClassMap(classes=tuple(ClassInfo(name=source_id, source_id=source_id) for source_id in source_ids))


def test_class_list_keeps_its_order_and_names(memory_root):
    text = "\ufeffn02\tcat, house cat\r\nbarn owl\n\nn01\t\n".encode()
    open_store(memory_root).write("lists/my.txt", text)
    found = load_class_map(f"{memory_root}/lists/my.txt")
    assert [(info.source_id, info.name) for info in found.classes] == [
        ("n02", "cat, house cat"),
        ("barn owl", "barn owl"),
        ("n01", "n01"),
    ]


def test_a_classes_file_survives_writing_and_reading(tmp_path):
    written = ClassMap(
        classes=(ClassInfo(name="b", source_id="2", parents=("top", "mid")), ClassInfo(name="a", source_id="1"))
    )
    open_store(tmp_path).write_json("classes.json", written.as_file())
    assert load_class_map(f"{tmp_path}/classes.json") == written
    text = (tmp_path / "classes.json").read_text().replace('"mid"', '"middle"')
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ValueError, match="was changed after it was written"):
        load_class_map(f"{tmp_path}/classes.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\nb\na\n", "'a' is class 0 and class 2"),
        (b"\n \n", "holds no classes"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'{"classes": 3}', "not a classes.json"),
        (b'{"classes"', "not a classes.json"),
    ],
)
def test_a_file_that_is_not_a_class_map_is_refused(memory_root, data, message):
    open_store(memory_root).write("map", data)
    with pytest.raises(ValueError, match=message):
        load_class_map(f"{memory_root}/map")


@pytest.mark.parametrize("wrong", ["imagenet21k-spring", "no/such/file.txt", "s3://", ""])
def test_an_unknown_name_lists_the_known_ones(wrong):
    with pytest.raises(ValueError, match="imagenet21k-fall11, imagenet21k-google"):
        load_class_map(wrong)


@pytest.fixture(scope="module")
def releases():
    if not class_maps._list_of_timm(RELEASES["imagenet1k"]):
        pytest.skip("the lists are in the package timm")
    return {name: load_class_map(name) for name, release in RELEASES.items() if release.list_file}


def test_releases_have_the_published_number_of_classes(releases):
    """Counts: arXiv:2104.10972; Google's head has 21,843 outputs; ILSVRC2012 1000."""
    sizes = {name: len(found.classes) for name, found in releases.items()}
    assert sizes == {
        "imagenet1k": 1000,
        "imagenet12k": 11_821,
        "imagenet21k-fall11": 21_841,
        "imagenet21k-google": 21_843,
        "imagenet21k-p": 11_221,
        "imagenet21k-p-winter21": 10_450,
    }
    for found in releases.values():
        assert found.source_ids == sorted(set(found.source_ids))  # the usual order, by WNID


def test_mapping_between_releases_lists_lost_classes(releases):
    google, fall11 = releases["imagenet21k-google"], releases["imagenet21k-fall11"]
    found = mapping(google, fall11)
    assert (found.lost, found.unmet) == (("n03931044", "n09859684"), ())
    assert (
        "21,841 classes are in both; only in the first: n03931044, n09859684; only in the second: none" in found.summary
    )
    for label_id, other in enumerate(found.label_ids):
        assert other is None or google.classes[label_id].source_id == fall11.classes[other].source_id
    winter = mapping(releases["imagenet21k-p"], releases["imagenet21k-p-winter21"])
    assert (len(winter.lost), len(winter.unmet)) == (771, 0)
    # The one class of ImageNet-1k that the Fall 2011 release lacks is the teddy bear.
    assert mapping(releases["imagenet1k"], fall11).lost == ("n04399382",)


def test_a_file_given_for_a_release_is_checked(memory_root, monkeypatch):
    lines = "n01\nn02\nn03"
    right = Release(num_classes=3, what="three", list_file="x.txt", sha256=hashlib.sha256(lines.encode()).hexdigest())
    monkeypatch.setitem(RELEASES, "three", right)
    store = open_store(memory_root)
    store.write("right", lines.encode() + b"\n")
    store.write("moved", b"n01\nn03\nn02\n")
    assert load_class_map(f"three={memory_root}/right").source_ids == ["n01", "n02", "n03"]
    with pytest.raises(ValueError, match=r"3 classes with sha256 .*, but three \(three\) has 3 classes"):
        load_class_map(f"three={memory_root}/moved")


@pytest.mark.parametrize("name", ["imagenet21k-p", "imagenet21k-winter21"])
def test_error_of_a_missing_class_list_names_the_next_step(name, monkeypatch):
    monkeypatch.setattr(class_maps.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=f"as {name}=URI") as caught:
        load_class_map(name)
    assert f"{RELEASES[name].num_classes:,} classes" in str(caught.value)
    assert RELEASES[name].sha256 in str(caught.value)


def test_a_new_segment_changes_no_label_id():
    old = map_of("m", "b")
    grown = extended(old, map_of("z", "b", "a").classes)
    assert grown.source_ids == ["m", "b", "a", "z"]
    assert extended(grown, old.classes) == grown
    again = mapping(old, grown)
    assert (again.label_ids, again.lost, again.unmet) == ((0, 1), (), ("a", "z"))
    assert mapping(grown, old).label_ids == (0, 1, None, None)


def test_applied_class_map_gives_exactly_its_classes():
    wanted = ClassMap(classes=(*map_of("z", "a").classes, ClassInfo(name="Bee", source_id="b")))
    source = [ClassInfo(name=name, source_id=name[0], parents=("top",)) for name in ("ant", "bumblebee", "cat")]
    assert applied(wanted, source).classes == (wanted.classes[0], source[0], wanted.classes[2])


def test_numeric_classes_that_differ_only_in_leading_zeros_are_refused():
    old, new = (ClassInfo(name=label, source_id=label) for label in ("7", "000007"))
    with pytest.raises(ValueError, match="have class '000007', but the corpus has class '7'"):
        class_maps.extended(ClassMap.of([old]), [new])
    assert class_maps.extended(ClassMap.of([new]), [new]).source_ids == ["000007"]
