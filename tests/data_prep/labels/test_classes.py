"""Class maps, and several labels per image."""

import re

import pytest

from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.labels.class_maps import extended
from vitline.data_prep.labels.classes import ClassInfo, ClassMap, number_label
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardReader, load_class_names, load_manifest
from vitline.data_prep.shards.verify_shards import verify_corpus
from vitline.data_prep.sources import class_folders
from vitline.data_prep.sources.raw import ListedCorpus, RawExample
from vitline.infra.storage import open_store


def test_label_ids_follow_from_the_set_of_classes():
    infos = [ClassInfo(name=n.upper(), source_id=n) for n in ("n02", "n01", "n10")]
    one, two = ClassMap.of(infos), ClassMap.of(reversed(infos))
    assert one == two
    assert one.source_ids == ["n01", "n02", "n10"]
    assert one.label_ids() == {"n01": 0, "n02": 1, "n10": 2}
    assert one.digest == two.digest != ClassMap.of(infos[:2]).digest
    assert one.as_file()["classes"][0] == {"name": "N01", "source_id": "n01", "parents": []}
    with pytest.raises(ValueError, match="Two classes have the source id 'n01'"):
        ClassMap.of([*infos, infos[1]])


def test_numbered_classes_sort_as_their_numbers():
    numbers = [0, 2, 9, 10, 21_842, 100_000]
    assert sorted(map(number_label, reversed(numbers))) == [number_label(number) for number in numbers]


def test_classes_with_decimal_points_sort_by_value_and_others_as_text():
    def order(*labels):
        return ClassMap.of(ClassInfo(name=label, source_id=label) for label in labels).source_ids

    assert order("10.5", "2.5", "000007", "-1.5", "-10.5") == ["-10.5", "-1.5", "2.5", "000007", "10.5"]
    assert order("10", "9", "2") == ["10", "2", "9"]  # as folders of class folders are sorted
    assert order("10.5", "9.5", "a") == ["10.5", "9.5", "a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("7", "007"),
        ("2.5", "+2.50"),
        ("cat", "\ufeffcat"),
        ("hot dog", "hot\xa0 dog"),
        ("cat", "c\u200bat"),
    ],
)
def test_two_spellings_of_one_label_are_refused_with_both(prepare_tagged, one, other):
    with pytest.raises(ValueError, match="two spellings of one") as refused:
        prepare_tagged({"a.jpg": ((one,), None), "b.jpg": ((other,), None)})
    assert {repr(one), repr(other)} <= set(re.findall(r"'[^']*'", str(refused.value)))
    with pytest.raises(ValueError, match="two spellings"):
        extended(ClassMap.of([ClassInfo(name=one, source_id=one)]), [ClassInfo(name=other, source_id=other)])


class TaggedPictures(ListedCorpus):
    """Images with several tags and a confidence for each."""

    origin = "tags"
    single_label = False

    def __init__(self, base, tags):
        self._base, self._tags = base, tags

    def fingerprint(self):
        return "1"

    def listing(self, place):
        for key, (labels, weights) in self._tags.items():
            yield RawExample(key, labels, "train", self._base, key, weights=weights)


@pytest.fixture
def prepare_tagged(picture, request_for, memory_root, monkeypatch):
    def make(tags, **recipe):
        base = open_store(f"{memory_root}-source")
        for i, key in enumerate(tags):
            base.write(key, picture(i))
        monkeypatch.setattr(class_folders, "ClassFolderCorpus", lambda source, recipe: TaggedPictures(base.uri, tags))
        request = request_for("/not/read", **recipe)
        prepare([request], memory_root)
        return corpus_store(open_store(memory_root), request)

    return make


def labelled_rows(corpus):
    manifest = load_manifest(corpus)
    with ShardReader(corpus, manifest, "train") as reader:
        rows = [row for i in range(reader.split.num_row_groups) for row in reader.row_group(i).to_pylist()]
    return {row["example_id"]: (row["labels"], row.get("weights")) for row in rows}


TAGS = {
    "a.jpg": (("sea", "boat"), (0.5, 0.25)),
    "b.jpg": (("boat", "rare", "sea"), (1.0, 0.125, 0.75)),
    "c.jpg": (("odd",), (1.0,)),
    "d.jpg": (("sea",), (0.0,)),
}


def test_all_labels_and_weights_are_kept_except_those_of_small_classes(prepare_tagged):
    corpus = prepare_tagged(TAGS, min_images_per_class=2)
    manifest = load_manifest(corpus)
    assert (manifest.single_label, manifest.has_weights, manifest.num_classes) == (False, True, 2)
    assert "label" not in manifest.arrow_schema().names
    assert load_class_names(corpus) == ["boat", "sea"]
    assert labelled_rows(corpus) == {
        "a.jpg": ([1, 0], [0.5, 0.25]),
        "b.jpg": ([0, 1], [1.0, 0.75]),
        "d.jpg": ([1], [0.0]),
    }
    assert manifest.counts.refused == {"small_class": 1}
    assert verify_corpus(corpus).problems == {}


def test_with_a_class_map_the_classes_are_exactly_its_own(prepare_tagged, memory_root):
    open_store(memory_root).write("map.txt", b"sea\tThe sea\nnever\nodd\n")
    corpus = prepare_tagged(TAGS, class_map=f"{memory_root}/map.txt")
    assert load_class_names(corpus) == ["The sea", "never", "odd"]
    assert labelled_rows(corpus) == {
        "a.jpg": ([0], [0.5]),
        "b.jpg": ([0], [0.75]),
        "c.jpg": ([2], [1.0]),
        "d.jpg": ([0], [0.0]),
    }


@pytest.mark.parametrize("wrong", [(("sea",), None), (("sea", "boat"), (1.0,))])
def test_weights_are_required_for_all_examples_or_none(prepare_tagged, wrong):
    with pytest.raises(ValueError, match="for all examples or for none"):
        prepare_tagged({"a.jpg": (("sea",), (1.0,)), "b.jpg": wrong})


def test_a_single_label_source_gives_one_label(prepare_tagged, monkeypatch):
    monkeypatch.setattr(TaggedPictures, "single_label", True)
    with pytest.raises(ValueError, match=r"a\.jpg.* 2 labels"):
        prepare_tagged({"a.jpg": (("sea", "boat"), None)})
