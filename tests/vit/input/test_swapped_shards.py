"""Shards that were swapped, duplicated or rewritten: neither the reader nor a training's input uses one of their rows."""

import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, ShardingConfig
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import ShardError, ShardReader, load_manifest, segment_keys
from vitline.data_prep.shards.subsets import take
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.input.batches import eval_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

from ...batches import train_batches
from ...pictures import blurred

CONFIG = InputConfig(
    global_batch_size=8, num_lanes=4, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.5)
)


@pytest.fixture(scope="module")
def request_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for c, label in enumerate(("cat", "dog")):
        (folder / label).mkdir()
        for i in range(50):
            (folder / label / f"{i}.jpg").write_bytes(blurred(1000 * c + i))
    sharding = ShardingConfig(row_group_bytes=3_000, min_row_groups=8, shard_bytes=9_000)
    recipe = CorpusRecipe(sharding=sharding, val_fraction=0.2, test_fraction=0.0)
    return CorpusConfig(name="pets", source=ClassFolders(path=str(folder)), recipe=recipe)


@pytest.fixture(params=["file", "memory"])
def root(request, tmp_path):
    return f"{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def corpus(request_of, root):
    prepare([request_of], root)
    return corpus_store(open_store(root), request_of)


def keys_of(corpus, split="train"):
    return segment_keys(load_manifest(corpus).splits[split].segments[0])


def read_with_reader(corpus):
    with ShardReader(corpus, load_manifest(corpus), "train") as reader:
        for group in range(reader.split.num_row_groups):
            reader.row_group(group, ["image", "label"])


def train(corpus):
    manifest = load_manifest(corpus)
    steps = manifest.splits["train"].num_rows // CONFIG.global_batch_size + 1
    with train_batches(corpus, manifest, "train", CONFIG, seed=0, num_steps=steps, micro_batch_size=8) as batches:
        assert len(list(batches)) == steps


def evaluate(corpus):
    with eval_batches(corpus, load_manifest(corpus), "train", CONFIG.augment, batch_size=8) as batches:
        assert sum(batch.num_valid for batch in batches) == load_manifest(corpus).splits["train"].num_rows


READERS = (read_with_reader, train, evaluate)


def assert_refused(corpus, bad, expected):
    """`bad`: key -> bytes put in its place. Every reader names one of these shards; all read again once they are restored."""
    good = {key: corpus.read(key) for key in bad}
    assert all(good[key] != data for key, data in bad.items())
    for key, data in bad.items():
        corpus.write(key, data)
    for read in READERS:
        with pytest.raises(ShardError, match=expected) as caught:
            read(corpus)
        message = str(caught.value)
        assert any(corpus.uri_of(key) in message for key in bad), message
        assert "`vitline data verify`" in message
    for key, data in good.items():
        corpus.write(key, data)


def rewritten(corpus, key, how):
    """A shard with other labels, as another program would write it."""
    data = pa.BufferReader(corpus.read(key))
    # `read_table` drops what the footer states, `ParquetFile.read` keeps it.
    table = pq.ParquetFile(data).read() if how == "by pyarrow, keeping metadata" else pq.read_table(data)
    labels = [1 - label for label in table["label"].to_pylist()]
    for name, values in (("label", labels), ("labels", [[label] for label in labels])):
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    manifest, sink = load_manifest(corpus), pa.BufferOutputStream()
    size = manifest.splits["train"].rows_per_row_group
    pq.write_table(table, sink, row_group_size=size, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def test_swapped_and_duplicated_shards_are_refused_by_name(corpus):
    first, second, third, *_ = keys_of(corpus)
    one, two, three = map(corpus.read, (first, second, third))
    states = "states that it is train/s000/part-.* but the manifest lists train/s000/part-.* swapped or copied"
    assert_refused(corpus, {first: two, second: one}, states)
    assert_refused(corpus, {first: two, second: three, third: one}, states)
    assert_refused(corpus, {second: one}, states)
    assert_refused(corpus, {key: one for key in keys_of(corpus)[1:]}, states)
    of_val = keys_of(corpus, "val")[0]
    assert_refused(corpus, {first: corpus.read(of_val)}, "states that it is val/s000/part-")
    for read in READERS:
        read(corpus)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("by pyarrow", "states no identity, but was written with one"),
        ("by pyarrow, keeping metadata", "holds .* bytes of rows, but states that .* another program rewrote it"),
    ],
)
def test_a_rewritten_shard_is_refused_by_name(corpus, how, expected):
    assert_refused(corpus, {keys_of(corpus)[1]: rewritten(corpus, keys_of(corpus)[1], how)}, expected)


def test_a_shard_of_another_version_is_refused_although_it_has_the_same_place(corpus, request_of, root):
    other_request = replace(request_of, **{"recipe.order_seed": 1})
    prepare([other_request], root)
    other = corpus_store(open_store(root), other_request)
    first = keys_of(corpus)[0]
    assert_refused(corpus, {first: other.read(first)}, "states the content digest .* but the shard list says")
    named = replace(request_of, name="animals")
    prepare([named], root)
    same_rows = corpus_store(open_store(root), named).read(first)
    assert_refused(corpus, {first: same_rows}, "is a shard of the corpus animals, but the manifest is that of pets")


@pytest.mark.slow
def test_swapped_shards_of_subsets_and_of_added_segments_are_refused(corpus, request_of, root, tmp_path):
    subset = open_store(f"{corpus.uri.rpartition('/')[0]}/{take(corpus, 30).version}")
    for i in range(40):
        for label in ("cat", "dog"):
            (tmp_path / "more" / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / "more" / label / f"new{i}-{label}.jpg").write_bytes(blurred(5000 + i + 100 * (label == "dog")))
    added_request = replace(
        request_of, source=ClassFolders(path=str(tmp_path / "more")), add_to=f"pets/{corpus.uri.rpartition('/')[2]}"
    )
    prepare([added_request], root)
    added = corpus_store(open_store(root), added_request)
    new = segment_keys(load_manifest(added).splits["train"].segments[1])
    assert new[0].startswith("train/s001/")
    old = keys_of(corpus)
    for reads in (subset, added):
        for read in READERS:
            read(reads)
    one, two = corpus.read(old[0]), corpus.read(old[1])
    corpus.write(old[0], two)
    corpus.write(old[1], one)
    for reads in (subset, added):
        for read in READERS:
            with pytest.raises(ShardError, match=r"states that it is train/s000/part-"):
                read(reads)
    corpus.write(old[0], one)
    corpus.write(old[1], two)
    good = added.read(new[0])
    added.write(new[0], one)
    for read in READERS:
        with pytest.raises(ShardError, match=r"states that it is train/s000/.* lists train/s001/"):
            read(added)
    added.write(new[0], good)
    read_with_reader(added)
