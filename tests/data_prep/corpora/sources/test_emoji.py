"""Emoji: groups of hand-made examples, and a check of the real packages: no test image is in pre-training in any style."""

import pytest

from data_prep.config import CorpusRecipe, Emoji
from data_prep.corpora.presets import noto_emoji, twitter_emoji
from data_prep.corpora.raw import FetchUnavailable, WorkFolder
from data_prep.corpora.sources.emoji import (
    CATEGORY_OF,
    STYLES,
    BaseEmoji,
    EmojiCorpus,
    fetch_style,
    group_bases,
    motif,
    read_bases,
    task_bases,
)
from data_prep.find_corpus import corpus_store
from data_prep.prepare import prepare
from data_prep.shard_format import ShardReader, load_manifest
from infra.storage import open_store


def test_variants_of_an_emoji_have_one_motif():
    woman_running, person_running, man_running_right = "1F3C3-200D-2640-FE0F", "1F3C3", "1F3C3-200D-2642-FE0F-200D-27A1"
    assert motif(woman_running) == motif(person_running)
    assert motif(man_running_right) != motif(person_running)
    assert motif("1F468-200D-1F33E") == motif("1F469-200D-1F33E") == motif("1F9D1-200D-1F33E")  # farmers
    assert motif("1F466") == motif("1F467") == motif("1F9D2") == motif("1F468")  # boy, girl, child, man
    assert motif("1F1EB-1F1F7") != motif("1F1EB-1F1EE")  # flags of France and Finland


def test_groups_join_emoji_with_equal_images_in_any_style_or_equal_motifs():
    bases = [
        BaseEmoji("A", "c", "s", ("a.png",)),
        BaseEmoji("B", "c", "s", ("b.png",)),
        BaseEmoji("C", "c", "s", ("c.png", "c-dark.png")),
        BaseEmoji("D", "c", "s", ("d.png",)),
        BaseEmoji("A-200D-2640", "c", "s", ("e.png",)),
        BaseEmoji("F", "c", "s", ("f.png",)),
    ]
    alike = {"google": {"a.png": "1", "b.png": "1"}, "twitter": {"b.png": "2", "c-dark.png": "2"}}
    pictures = {
        style: {f"img/{style}/64/{name}": alike[style].get(name, name) for base in bases for name in base.pictures}
        for style in STYLES
    }
    groups = group_bases(bases, pictures)
    assert groups == {"A": "A", "B": "A", "C": "A", "A-200D-2640": "A", "D": "D", "F": "F"}


@pytest.fixture(scope="module")
def real_packages(request):
    """The URI of a cache with both packages: pytest's cache, filled by npm at first use."""
    uri = str(request.config.cache.mkdir("vitline-sources"))
    try:
        for style in STYLES:
            fetch_style(style, open_store(uri))
    except FetchUnavailable as error:
        pytest.skip(f"the emoji packages cannot be fetched: {error}")
    return uri


@pytest.mark.slow
def test_listing_has_parts_and_every_worker_knows_the_category_of_a_class(real_packages, memory_root):
    source = Emoji(style="google", role="pretrain", cache=real_packages)
    work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/work"), 500)
    parts = list(EmojiCorpus(source, CorpusRecipe()).parts(work))
    fresh = EmojiCorpus(source, CorpusRecipe())
    examples = [example for part in parts for example in fresh.examples(part, work)]
    assert [part.num_examples for part in parts[:-1]] == [500] * (len(parts) - 1)
    assert len({example.example_id for example in examples}) == len(examples) > 2000
    assert all(open_store(e.base).read(e.key, e.offset, e.offset + 4) == b"\x89PNG" for e in examples[::100])
    bases = read_bases(open_store(real_packages), fetch_style("google", open_store(real_packages))["emoji.json"])
    assert {base.subcategory: base.category for base in bases} == CATEGORY_OF
    assert fresh.class_info("face-smiling").parents == ("Smileys & Emotion",)


@pytest.fixture(scope="module")
def real_corpora(real_packages, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("store"))
    requests = noto_emoji(real_packages), twitter_emoji(real_packages)
    prepare(requests, root)
    return [corpus_store(open_store(root), request) for request in requests]


def rows_of(corpus, split):
    manifest = load_manifest(corpus)
    with ShardReader(corpus, manifest, split) as reader:
        groups = range(reader.split.num_row_groups)
        columns = ["example_id", "group", "pixel_sha256"]
        return [row for i in groups for row in reader.row_group(i, columns).to_pylist()]


@pytest.mark.slow
def test_no_emoji_of_a_test_split_occurs_in_pretraining_in_any_style(real_corpora, real_packages):
    """Compared in the shards by group, by base code and by pixels."""
    noto, twitter = real_corpora
    bases = read_bases(open_store(real_packages), fetch_style("google", open_store(real_packages))["emoji.json"])
    base_of = {picture: base.code for base in bases for picture in base.pictures}

    def codes(rows):
        return {base_of[row["example_id"].rpartition("/")[2]] for row in rows}

    pretraining = [row for split in load_manifest(noto).splits for row in rows_of(noto, split)]
    test = rows_of(twitter, "test")
    held_out = rows_of(twitter, "val")
    trained = rows_of(noto, "train")
    for seen, unseen in ((pretraining, test), (trained, held_out), (rows_of(twitter, "train800val200"), test)):
        assert not codes(seen) & codes(unseen)
        for column in ("group", "pixel_sha256"):
            assert not {row[column] for row in seen} & {row[column] for row in unseen}
    assert len(test) == 656
    assert len(codes(pretraining)) > 1100


@pytest.mark.slow
def test_task_has_the_split_sizes_of_vtab_1k(real_corpora):
    _, twitter = real_corpora
    manifest = load_manifest(twitter)
    rows = {name: split.num_rows for name, split in manifest.splits.items()}
    assert rows == {"train": 800, "val": 200, "train800": 800, "val200": 200, "train800val200": 1000, "test": 656}
    assert manifest.num_classes == 58
    ids = {name: [row["example_id"] for row in rows_of(twitter, name)] for name in rows}
    assert ids["train800val200"] == ids["train800"] + ids["val200"] == ids["train"] + ids["val"]
    folders = {key.split("/")[0] for key in twitter.list() if "/part-" in key}
    assert folders == {"train", "val", "test", "_work"}  # joined splits copy nothing


@pytest.mark.slow
def test_every_class_of_the_task_has_ten_bases(real_packages):
    cache = open_store(real_packages)
    bases = read_bases(cache, fetch_style("google", cache)["emoji.json"])
    eligible = task_bases(bases, 10)
    assert (len(bases), len(eligible), len({base.subcategory for base in eligible})) == (1911, 1656, 58)
