"""All differences of two corpora are listed, and nothing else."""

import numpy as np
import pytest

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.data_prep.pages.diff_stats import CorpusFacts, StatDifference, diff_stats
from vitline.data_prep.plan.corpus_stats import CorpusStats, Findings, SampleRule, SplitStats
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo


@pytest.fixture
def corpus():
    def make(counts, recipe, refused=0, names=None):
        """A corpus with the given classes and counts, all in train."""
        num_rows = sum(counts.values())
        segments = (SegmentInfo(split="train", name="s000", num_rows=num_rows, num_shards=1),)
        split = SplitInfo(num_rows=num_rows, rows_per_row_group=8, row_groups_per_shard=8, segments=segments, digest="")
        manifest = Manifest(
            name="birds",
            version="1",
            digest=str(sorted(counts.items())),
            class_map_digest="",
            num_classes=len(counts),
            single_label=True,
            order_seed=0,
            splits={"train": split},
            decode_policy=DecodePolicy(),
            counts=Counts(num_found=9, num_accepted=9, num_refused=0, num_bytes=9, refused={}),
            provenance={"request": {"source": {"path": "s3://birds"}, "recipe": recipe}},
        )
        class_map = ClassMap.of(ClassInfo(name=(names or {}).get(c, c), source_id=c) for c in counts)
        numbers = np.array([counts[info.source_id] for info in class_map.classes], np.int64)
        stats = CorpusStats(
            num_classes=len(counts),
            rule=SampleRule(),
            splits={"train": SplitStats(num_rows, 10 * num_rows, numbers)},
            **{name: np.zeros(3, np.int64) for name in ("labels_per_image", "side_px", "aspect_ratio", "file_bytes")},
            kinds={"JPEG RGB": num_rows},
            refused={"corrupt": Findings(refused, refused)} if refused else {},
            sheet={},
            duplicates={},
            leakage={},
        )
        return CorpusFacts(manifest, class_map, stats)

    return make


def test_equal_corpora_do_not_differ(corpus):
    recipe = {"decode": {"background": [255, 255, 255]}}
    assert diff_stats(corpus({"a": 3}, recipe), corpus({"a": 3}, recipe)) == []


def test_differences_are_listed(corpus):
    a = corpus({"heron": 4, "owl": 3}, {"val_fraction": 0.1, "decode": {"max_pixels": 5}})
    b = corpus(
        {"crane": 2, "heron": 4, "owl": 1},
        {"val_fraction": 0.2, "decode": {"max_pixels": 5}},
        6,
        {"heron": "grey heron"},
    )
    rows = {row.what: (row.a, row.b) for row in diff_stats(a, b)}
    assert rows.pop("digest")
    assert rows == {
        "recipe: val_fraction": (0.1, 0.2),
        "refused: corrupt": (None, 6),
        "classes": (2, 3),
        "classes that the other lacks": (None, "1 (crane)"),
        "classes with another label id": ("2 (heron = 0, owl = 1)", "2 (heron = 1, owl = 2)"),
        "classes with another name": ("1 (heron)", "1 (grey heron)"),
        "classes with another number of images": ("1 (owl: 3)", "1 (owl: 1)"),
    }


def test_long_lists_are_shortened(corpus):
    many = corpus({f"c{i:03d}": 1 for i in range(1200)}, {})
    lacking = next(row for row in diff_stats(many, corpus({"z": 1}, {})) if row.what == "classes that the other lacks")
    assert lacking == StatDifference(
        "classes that the other lacks", "1,200 (c000, c001, c002, c003, c004, ...)", "1 (z)"
    )
