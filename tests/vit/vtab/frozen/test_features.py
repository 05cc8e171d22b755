"""Stored parts of features: every example once, written once, shared by splits, refused when damaged or outdated."""

import pytest
import torch

from vitline.data_prep.shard_format import load_manifest
from vitline.infra.config import digest_of, replace
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import published_digest
from vitline.vit.features import extract_features, feature_plan
from vitline.vit.features.extract_features import Extractor
from vitline.vit.features.feature_plan import FeatureSource, plan_parts, work_chunks
from vitline.vit.features.features import FeatureReader, Features, finish_split, missing_parts, read_part, write_part
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.published.models import load_model

from ..conftest import reference

SPLITS = ("train", "val", "test", "train800", "val200", "train800val200")


@pytest.fixture
def manifest(digits):
    return load_manifest(digits)


@pytest.fixture
def source(digits, manifest, models) -> FeatureSource:
    return FeatureSource(
        model=models.trained,
        model_digest=published_digest(models.trained),
        corpus=digits.uri,
        corpus_digest=manifest.digest,
        decode_digest=digest_of(manifest.decode_policy),
    )


@pytest.fixture
def store_features(root, source, manifest):
    """store_features(split): computes and stores its features, and returns a reader of them."""

    def go(split: str, batch_size: int = 100) -> FeatureReader:
        parts = plan_parts(source, manifest, split)
        assert sorted(part.key for part in Extractor(root, batch_size=batch_size).ensure(parts)) == sorted(
            part.key for part in parts
        )
        finish_split(open_store(root).child(source.folder), manifest, parts)
        return FeatureReader(open_store(root), source, [split])

    return go


@pytest.mark.slow
@pytest.mark.parametrize("part_rows", [1, 100, 250, 10_000])
@pytest.mark.parametrize("split", SPLITS)
def test_parts_of_a_split_contain_each_row_once_and_whole_row_groups(source, manifest, split, part_rows, monkeypatch):
    monkeypatch.setattr(feature_plan, "PART_ROWS", part_rows)
    info, parts = manifest.split(split), plan_parts(source, manifest, split)
    assert [row for part in parts for row in part.rows] == list(range(info.num_rows))
    assert len({part.key for part in parts}) == len(parts)
    starts = {info.place(group).first_row for group in range(info.num_row_groups)}
    assert {part.rows.start for part in parts} <= starts


@pytest.mark.parametrize(("part_rows", "batch_size"), [(90, 7), (512, 100)])
def test_stored_features_equal_those_of_one_forward_pass(
    digits, manifest, source, store_features, part_rows, batch_size, monkeypatch
):
    monkeypatch.setattr(feature_plan, "PART_ROWS", part_rows)
    reader = store_features("test", batch_size)
    whole, (features, labels) = reader.whole(), reference(digits, manifest, "test", load_model(source.model))
    assert reader.num_rows == len(whole.values) == 797
    torch.testing.assert_close(whole.values, features, atol=1e-5, rtol=0)
    assert whole.classes.tolist() == labels.tolist() == reader.labels().tolist()
    wanted = torch.tensor([796, 3, 400, 3])
    torch.testing.assert_close(reader.rows(wanted), whole.values[wanted], atol=0, rtol=0)
    assert len(reader.cost_s) == len(reader.parts)


def test_splits_share_the_parts_of_their_segments(source, manifest, store_features, images_forwarded):
    store_features("train")
    store_features("val")
    before = sum(images_forwarded)
    assert before == manifest.split("train").num_rows + manifest.split("val").num_rows
    joined = store_features("train800val200")
    assert sum(images_forwarded) == before
    torch.testing.assert_close(
        joined.whole().values, torch.cat([store_features(s).whole().values for s in ("train800", "val200")])
    )


def test_only_missing_parts_are_computed(root, source, manifest, images_forwarded, monkeypatch):
    monkeypatch.setattr(feature_plan, "PART_ROWS", 100)
    parts, folder = plan_parts(source, manifest, "test"), open_store(root).child(source.folder)
    killed = Extractor(root).ensure(parts)
    for _ in range(3):
        next(killed)
    killed.close()
    left = missing_parts(folder, parts)
    assert 0 < len(left) < len(parts)
    with pytest.raises(RuntimeError, match=r"more parts are missing"):
        finish_split(folder, manifest, parts)
    with pytest.raises(RuntimeError, match=r"test.json is missing: the features of split 'test' are not complete"):
        FeatureReader(open_store(root), source, ["test"])
    images_forwarded.clear()
    assert len(list(Extractor(root).ensure(parts))) == len(parts)
    assert images_forwarded == [len(part.rows) for part in left]
    images_forwarded.clear()
    assert len(list(Extractor(root).ensure(parts))) == len(parts)
    assert images_forwarded == []


def test_concurrent_evaluations_store_the_same_features(root, source, manifest, images_forwarded, monkeypatch):
    monkeypatch.setattr(feature_plan, "PART_ROWS", 100)
    # Neither evaluation sees parts of the other.
    monkeypatch.setattr(extract_features, "missing_parts", lambda folder, parts: list(parts))
    parts, folder = plan_parts(source, manifest, "test"), open_store(root).child(source.folder)
    racers = [Extractor(root, batch_size=size).ensure(parts) for size in (100, 7)]
    for together in zip(*racers, strict=True):
        assert together[0] == together[1]
    assert sum(images_forwarded) == 2 * 797
    finish_split(folder, manifest, parts)
    finish_split(folder, manifest, parts)
    assert len(FeatureReader(open_store(root), source, ["test"]).whole().values) == 797


def test_first_of_two_writers_wins_and_a_damaged_part_is_named(root):
    folder = open_store(root)
    first, second = (Features(torch.full((3, 2), x), torch.arange(3), torch.ones(3).long()) for x in (1.0, 2.0))
    write_part(folder, "part", first)
    write_part(folder, "part", second)
    torch.testing.assert_close(read_part(folder, "part", 3).values, first.values)
    with pytest.raises(RuntimeError, match=r"/part cannot be read .* it has 3 rows, expected 4\. Delete the folder"):
        read_part(folder, "part", 4)
    data = bytearray(folder.read("part"))
    data[-1] ^= 1
    folder.write("part", bytes(data))
    with pytest.raises(RuntimeError, match=r"/part cannot be read .* does not match the digest"):
        read_part(folder, "part", 3)
    folder.write("part", bytes(data[:-4]))
    with pytest.raises(RuntimeError, match=r"/part cannot be read"):
        read_part(folder, "part", 3)


def test_several_labels_per_image_are_stored_and_any_of_them_is_a_hit(root):
    several = Features(torch.zeros(3, 2), torch.tensor([4, 7, 1, 0, 4]), torch.tensor([2, 1, 2]))
    write_part(open_store(root), "part", several)
    found = read_part(open_store(root), "part", 3)
    assert [found.hits(torch.tensor(guess)) for guess in ([7, 1, 4], [4, 4, 0], [0, 0, 1], [4, 1, 0])] == [3, 2, 0, 3]


def test_feature_folder_depends_on_digests_of_model_corpus_and_decoding(source):
    moved = replace(source, model="s3://elsewhere/model", corpus="s3://elsewhere/corpus")
    assert moved.folder == source.folder
    for name in ("model_digest", "corpus_digest", "decode_digest"):
        assert replace(source, **{name: "0" * 64}).folder != source.folder


def test_a_model_or_corpus_that_was_replaced_since_planning_is_refused(root, source, manifest):
    for name in ("model_digest", "corpus_digest", "decode_digest"):
        other = replace(source, **{name: "0" * 64})
        with pytest.raises(RuntimeError, match="planned with 000000000000"):
            list(Extractor(root).ensure(plan_parts(other, manifest, "val")))


def test_non_finite_features_are_refused_with_their_row(root, source, manifest, monkeypatch):
    real = extract_features.part_features

    def broken(*args):
        values = real(*args).values.clone()
        values[7, 3] = torch.nan
        return Features(values, torch.zeros(len(values)).long(), torch.ones(len(values)).long())

    monkeypatch.setattr(extract_features, "part_features", broken)
    with pytest.raises(
        ValueError,
        match=r"not finite for row 7 of split 'val' of .*, and for 0 more\. Its training has probably diverged",
    ):
        list(Extractor(root).ensure(plan_parts(source, manifest, "val")))


def test_work_chunks_are_consecutive_parts_of_one_split_and_contain_each_once(source, manifest, monkeypatch):
    monkeypatch.setattr(feature_plan, "PART_ROWS", 10)
    parts = [part for split in ("train", "test") for part in plan_parts(source, manifest, split)]
    chunks = work_chunks(parts, num_workers=3)
    assert [part for portion in chunks for part in portion] == parts
    assert all(len({part.split for part in portion}) == 1 for portion in chunks)
    assert len(chunks) >= 12
    assert work_chunks(parts[:1], num_workers=8) == [parts[:1]]


def test_a_pre_logits_layer_is_part_of_the_features(digits, manifest):
    config = ViTConfig(
        image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32, pre_logits=True
    )
    network = VisionTransformer(config, 3).eval()
    images = torch.rand(2, 3, 8, 8)
    features = network.features(images)
    assert features.abs().max() <= 1
    torch.testing.assert_close(network.head(features), network(images))


def test_write_error_is_raised_where_the_parts_are_computed(root, source, manifest, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(extract_features, "write_part", full)
    with pytest.raises(OSError, match="no space left"):
        list(Extractor(root).ensure(plan_parts(source, manifest, "val")))
