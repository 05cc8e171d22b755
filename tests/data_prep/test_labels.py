"""Class maps, and several labels to a picture."""

import pytest

from data_prep import examine, find_corpus
from data_prep.corpora.raw import RawCorpus, RawExample
from data_prep.find_corpus import corpus_store
from data_prep.labels import ClassInfo, ClassMap
from data_prep.prepare import prepare
from data_prep.shard_format import ShardReader, load_class_names, load_manifest
from data_prep.verify_shards import verify_corpus
from infra.storage import open_store


def test_label_ids_follow_from_the_set_of_classes():
    infos = [ClassInfo(name=n.upper(), source_id=n) for n in ("n02", "n01", "n10")]
    one, two = ClassMap.of(infos), ClassMap.of(reversed(infos))
    assert one == two
    assert one.source_ids == ["n01", "n02", "n10"]
    assert one.digest == two.digest != ClassMap.of(infos[:2]).digest
    assert one.as_file()["classes"][0] == {"name": "N01", "source_id": "n01", "parents": []}
    with pytest.raises(ValueError, match="Two classes have the source id 'n01'"):
        ClassMap.of([*infos, infos[1]])


class TaggedPictures(RawCorpus):
    """Pictures with several tags and a confidence for each."""

    origin = "tags"
    single_label = False

    def __init__(self, base, tags):
        self._base, self._tags = base, tags

    def fingerprint(self):
        return "1"

    def examples(self, root, spill):
        for key, (labels, weights) in self._tags.items():
            yield RawExample(key, labels, "train", self._base, key, weights=weights)


@pytest.fixture
def prepare_tagged(picture, request_for, memory_root, monkeypatch):
    def make(tags, **recipe):
        base = open_store(f"{memory_root}-source")
        for i, key in enumerate(tags):
            base.write(key, picture(i))
        for module in (examine, find_corpus):
            monkeypatch.setattr(module, "open_source", lambda config: TaggedPictures(base.uri, tags))
        request = request_for("/not/read", **recipe)
        prepare([request], memory_root)
        return corpus_store(open_store(memory_root), request)

    return make


def test_all_labels_and_weights_stay_and_small_classes_go_from_them(prepare_tagged):
    tags = {
        "a.jpg": (("sea", "boat"), (0.5, 0.25)),
        "b.jpg": (("boat", "rare", "sea"), (1.0, 0.125, 0.75)),
        "c.jpg": (("odd",), (1.0,)),
        "d.jpg": (("sea",), (0.0,)),
    }
    corpus = prepare_tagged(tags, min_images_per_class=2)
    manifest = load_manifest(corpus)
    assert (manifest.single_label, manifest.has_weights, manifest.num_classes) == (False, True, 2)
    assert "label" not in manifest.arrow_schema().names
    with ShardReader(corpus, manifest, "train") as reader:
        rows = [row for i in range(reader.split.num_row_groups) for row in reader.row_group(i).to_pylist()]
    assert load_class_names(corpus) == ["boat", "sea"]
    assert {row["example_id"]: (row["labels"], row["weights"]) for row in rows} == {
        "a.jpg": ([1, 0], [0.5, 0.25]),
        "b.jpg": ([0, 1], [1.0, 0.75]),
        "d.jpg": ([1], [0.0]),
    }
    assert manifest.counts.refused == {"small_class": 1}
    assert verify_corpus(corpus).problems == {}


@pytest.mark.parametrize("wrong", [(("sea",), None), (("sea", "boat"), (1.0,))])
def test_weights_are_for_every_label_or_for_none(prepare_tagged, wrong):
    with pytest.raises(ValueError, match=r"'b\.jpg' has 1 labels|'b\.jpg' has 2 labels"):
        prepare_tagged({"a.jpg": (("sea",), (1.0,)), "b.jpg": wrong})


def test_a_single_label_source_gives_one_label(prepare_tagged, monkeypatch):
    monkeypatch.setattr(TaggedPictures, "single_label", True)
    with pytest.raises(ValueError, match=r"'a\.jpg' has 2 labels"):
        prepare_tagged({"a.jpg": (("sea", "boat"), None)})
